"""Real trajectories and batches of them from short arguments, and trainer ranks that are threads of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, FinishReason, Span, Trajectory
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.batch import Batch

T = TypeVar("T")


def trajectory(
    prompt: Sequence[int],
    completion: Sequence[int],
    logprobs: Sequence[float] | None = None,
    own: Sequence[int] | None = None,
    group: str = "g",
    index: int = 0,
    versions: int | Sequence[int] = 0,
    finish_reason: FinishReason = "stop",
) -> Trajectory:
    """A trajectory whose completion has T tokens. Of each of these: `logprobs` (None: -1), `own`, 1 where the policy wrote it
    (None: everywhere), and `versions` of the weights that sampled it (an int: of all)."""
    length = len(completion)
    of_token = [versions] * length if isinstance(versions, int) else versions
    assert len(of_token) == length
    spans, end = [], 0
    for version, run in itertools.groupby(of_token):
        start, end = end, end + len(list(run))
        spans.append(Span(version, start, end))
    return Trajectory(
        group_id=group,
        attempt=1,
        index=index,
        prompt_token_ids=np.array(prompt, np.int32),
        completion_token_ids=np.array(completion, np.int32),
        logprobs=np.array([-1.0] * length if logprobs is None else logprobs, np.float32),
        loss_mask=np.array([1] * length if own is None else own, np.uint8),
        spans=tuple(spans),
        finish_reason=finish_reason,
        text="",
        replica="r",
    )


def batch(
    trajectories: Sequence[AnyTrajectory],
    rewards: Sequence[float] | None = None,
    *,
    components: Sequence[Mapping[str, float]] | None = None,
    environment: str = "e",
    multipliers: Sequence[float] | None = None,
    step: int = 0,
    max_age: int = 1000,
) -> Batch:
    """The whole batch of these trajectories, whose groups are told apart by `group_id`; rewards are 0 and multipliers 1 unless given.

    A rank's share of it is `batch(…).take(places)`.
    """
    size = len(trajectories)
    group_ids = list(dict.fromkeys(t.group_id for t in trajectories))
    scores = [
        Score("SCORED", float(reward), components=dict(given), environment=environment)
        for reward, given in zip(rewards or [0.0] * size, components or [{}] * size, strict=True)
    ]
    return Batch.of(
        trajectories,
        scores,
        places=range(size),
        groups=[group_ids.index(t.group_id) for t in trajectories],
        multipliers=[1.0] * size if multipliers is None else multipliers,
        step=step,
        max_age=max_age,
    )


class ThreadRanks(Ranks):
    """One of several ranks, each a thread: a collective reads what all of them brought to it, `said`."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: list[Any]) -> None:
        super().__init__()
        self.rank = rank
        self.size = len(said)
        self._barrier = barrier
        self._said = said

    def all_gather(self, value: T, kind: Any = None) -> list[T]:
        self._said[self.rank] = value
        self._barrier.wait()
        everyone = list(self._said)
        self._barrier.wait()
        return everyone

    def gather(self, value: T, kind: Any = None) -> list[T]:
        everyone = self.all_gather(value)
        return everyone if self.rank == 0 else [value]

    def sum_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        tables = self.all_gather(values)
        assert {table.shape for table in tables} == {values.shape}, "ranks are not in the same collective"
        total: npt.NDArray[np.float64] = np.sum(np.stack(tables), axis=0)
        return total

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        columns = np.array(self.all_gather(values), dtype=np.float64)
        match operation:
            case dist.ReduceOp.SUM:
                combined = columns.sum(axis=0)
            case dist.ReduceOp.MIN:
                combined = columns.min(axis=0)
            case _:
                combined = columns.max(axis=0)
        return [float(x) for x in combined]


def on_ranks(work: Callable[[Ranks], T], count: int) -> list[T]:
    """What `work` returns on each of `count` ranks that run at once, or raises what all of them raise."""
    barrier, said = threading.Barrier(count, timeout=10), [None] * count
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, ThreadRanks(rank, barrier, said)) for rank in range(count)]
    if any(future.exception() for future in futures):
        assert len({repr(future.exception()) for future in futures}) == 1, [future.exception() for future in futures]
    return [future.result() for future in futures]
