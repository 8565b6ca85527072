"""Records that the parts of the loop work on: a small run, its groups, trajectories and batches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.records.trajectory import Group, Span, Trajectory
from headrace.replay import Reservation, ReservedTrajectory, RunState
from tests.support.buffer import make_group


def run_state(**changes: object) -> RunState:
    state = RunState(
        "r", "now", "home", next_step=6, committed=4, enqueued=20, closed=False, counts={},
        timelines=(("first", 0), ("line", 2), ("now", 4)),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def group(name: str, n: int = 2, task: str = "sums") -> Group:
    return make_group(0, n=n, group_id=name, env_name="e", task_name=task, prompt_token_ids=np.array([1], np.int32))


def trajectory(**changes: object) -> Trajectory:
    base = Trajectory(
        group_id="g",
        attempt=1,
        index=0,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        completion_token_ids=np.array([3, 4], dtype=np.int32),
        logprobs=np.array([-1.0, -2.0], dtype=np.float32),
        loss_mask=np.ones(2, dtype=np.uint8),
        spans=(Span(4, 0, 1), Span(5, 1, 2)),
        finish_reason="stop",
        text="34",
        replica="r",
    )
    return msgspec.structs.replace(base, **changes)


def reservation(*groups: str, lengths: Sequence[int] | None = None) -> Reservation:
    """Step 4, two trajectories a group, of `lengths`; without, of lengths of their own."""
    reserved = [(name, index) for name in groups for index in range(2)]
    lengths = lengths or [10 * (place // 2) + place % 2 + 1 for place in range(len(reserved))]
    rows = [
        ReservedTrajectory(name, index, f"{name}{index}", float(index), length, 3, 4)
        for (name, index), length in zip(reserved, lengths, strict=True)
    ]
    return Reservation(4, groups, tuple(rows))
