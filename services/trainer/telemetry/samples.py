"""Trajectories as they were trained on or evaluated, token by token: files of JSON lines, and a few of them printed.

`train_data_step12.jsonl.gz` holds one line per trajectory that step 12 trained on, `val_data_step12.jsonl.gz` one per trajectory that
evaluated version 12; `zcat` reads them. Per-token lists cover the completion and are of equal length; null stands where the policy did
not write the token, or nothing was computed. Log-probabilities and advantages are rounded to six decimals.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from headrace.errors import ServiceError
from headrace.trajectory import Float32, Score, Trajectory, UInt8
from headrace.trajectory import Group as TrajectoryGroup
from services.trainer.files import whole_file
from services.trainer.learning.experience import Trace

Kind = Literal["train", "val"]
DECIMALS = 6


@dataclasses.dataclass(frozen=True)
class TrainingSample:
    """One trajectory as a step trained on it.

    Arrays are [T] over the completion. `mask` is 1 on tokens that count; the others are NaN on tokens that the policy did not
    write: `advantages`, and the log-probabilities of the trainer at the start of the step (`start`), of the reference policy
    (`ref`) and of the `teacher`, None where they were not computed. `total_reward` is the reward after scaling and shaping,
    `multiplier` the weight of the trajectory in the loss.
    """

    trajectory: Trajectory
    score: Score
    mask: UInt8
    advantages: Float32
    total_reward: float
    multiplier: float
    start: Float32 | None = None
    ref: Float32 | None = None
    teacher: Float32 | None = None

    @property
    def difference(self) -> Float32:
        """|gen - start| [T]; NaN where there is nothing to compare."""
        if self.start is None:
            return np.full(self.mask.size, np.nan, dtype=np.float32)
        return np.abs(self.trajectory.logprobs - self.start)


def sample_of(trajectory: Trajectory, score: Score, trace: Trace) -> TrainingSample:
    """A trajectory with what a step knew of the tokens that the policy wrote."""
    written = np.flatnonzero(trajectory.loss_mask)

    def spread(values: npt.ArrayLike) -> Float32:
        whole = np.full(trajectory.loss_mask.size, np.nan, dtype=np.float32)
        whole[written] = values
        return whole

    return TrainingSample(
        trajectory,
        score,
        (spread(trace.experience.mask) == 1).astype(np.uint8),
        spread(trace.advantages),
        trace.reward,
        trace.multiplier,
        None if trace.start is None else spread(trace.start),
        None if trace.ref is None else spread(trace.ref),
        None if trace.teacher is None else spread(trace.teacher),
    )


def training_record(step: int, group: TrajectoryGroup, sample: TrainingSample) -> dict[str, Any]:
    """A line of `train_data_step<N>`, with NeMo RL's names where it has them."""
    return {
        **_record(step, group, sample.trajectory, sample.score),
        "total_reward": sample.total_reward,
        "sample_loss_mask": sample.multiplier,
        "token_loss_mask": sample.mask.tolist(),
        "advantages": _rounded(sample.advantages),
        "prev_logprobs": _rounded(sample.start),
        "reference_policy_logprobs": _rounded(sample.ref),
        "teacher_logprobs": _rounded(sample.teacher),
    }


def validation_record(version: int, group: TrajectoryGroup, trajectory: Trajectory, score: Score) -> dict[str, Any]:
    """A line of `val_data_step<N>`."""
    return {**_record(version, group, trajectory, score), "token_loss_mask": trajectory.loss_mask.tolist()}


def _record(step: int, group: TrajectoryGroup, trajectory: Trajectory, score: Score) -> dict[str, Any]:
    return {
        "step": step,
        "group": group.id,
        "task": group.task_name,
        "index": trajectory.index,
        "attempt": trajectory.attempt,
        "environment": score.environment,
        "rewards": score.reward,
        "components": score.components,
        "finish_reason": trajectory.finish_reason,
        "spans": [[span.version, span.start, span.end] for span in trajectory.spans],
        "turns": trajectory.turns,
        "replica": trajectory.replica,
        "messages": group.messages,
        "content": trajectory.text,
        "input_lengths": trajectory.prompt_token_ids.size + trajectory.completion_token_ids.size,
        "prompt_token_ids": trajectory.prompt_token_ids.tolist(),
        "token_ids": trajectory.completion_token_ids.tolist(),
        "generation_logprobs": _rounded(np.where(trajectory.loss_mask > 0, trajectory.logprobs, np.nan)),
    }


def _rounded(values: Float32 | None) -> list[float] | None:
    return None if values is None else np.round(values.astype(np.float64), DECIMALS).tolist()


class SampleFiles:
    """The files of a run, of which the newest `keep` of each kind stay (None: all; 0: none is written)."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self._keep = keep

    @property
    def wanted(self) -> bool:
        return self._keep != 0

    def path(self, kind: Kind, step: int) -> Path:
        return self.folder / f"{kind}_data_step{step}.jsonl.gz"

    def write(self, kind: Kind, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a file atomically. Raises `ServiceError` for a full disk."""
        if not self.wanted:
            return
        path = self.path(kind, step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as unfinished, gzip.open(unfinished, "wb", compresslevel=1) as file:
                for record in records:
                    file.write(msgspec.json.encode(record) + b"\n")
            if self._keep is not None:
                keep_newest(self.folder, f"{kind}_data_step*.jsonl.gz", self._keep)
        except OSError as error:
            raise ServiceError(
                f"can't write trajectories to {path} ({error}); free space there, set logger.log_dir, or "
                "logger.keep_step_data=0 to write none"
            ) from error

    def read(self, kind: Kind, step: int) -> list[dict[str, Any]]:
        """The records of a file; none where the file is gone."""
        path = self.path(kind, step)
        if not path.exists():
            return []
        with gzip.open(path, "rb") as file:
            return [msgspec.json.decode(line) for line in file]


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Delete all but the `count` files that were written last: by their times, as a rewound run takes a step again; of files that the
    clock can't tell apart, those of the highest steps."""

    def age(path: Path) -> tuple[int, int, str]:
        return path.stat().st_mtime_ns, len(path.name), path.name

    for path in sorted(folder.glob(pattern), key=age, reverse=True)[count:]:
        path.unlink()


def choose(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The `count` records to show, best first: half of them those of the highest reward, half those of the lowest; of an odd count one
    from the middle."""
    order = sorted(records, key=lambda record: -record["rewards"])
    if len(order) <= count:
        return order
    half, odd = divmod(count, 2)
    middle = [order[len(order) // 2]] if odd else []
    return [*order[:half], *middle, *order[len(order) - half :]]


def show(console: Console, title: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Print a coloured block for each record on a terminal, plain text elsewhere."""
    for place, record in enumerate(records, start=1):
        colour = "green" if record["rewards"] > 0 else "red"
        reward = Text.assemble((f"reward {record['rewards']:g}", colour), f"  {_note(record)}")
        block = Group(Text(_prompt(record), style="dim"), Text(record["content"], style="bold"), reward)
        heading = f"{title}, {place} of {len(records)}"
        console.print(Panel(block, title=heading, title_align="left", border_style=colour))


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The same for a tracker. Texts are indented, so that they show as they are: a completion may hold Markdown of its own."""
    return "\n\n---\n\n".join(
        f"**reward {record['rewards']:g}** ({_note(record)})\n\n"
        + "\n\n".join(textwrap.indent(text, "    ", lambda _: True) for text in (_prompt(record), record["content"]))
        for record in records
    )


def _prompt(record: Mapping[str, Any]) -> str:
    return "\n".join(f"{message['role']}: {_content(message.get('content'))}" for message in record["messages"])


def _content(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _note(record: Mapping[str, Any]) -> str:
    end = "cut off" if record["finish_reason"] == "length" else "ended"
    return f"{record['task']}, {len(record['token_ids'])} tokens, {end}, {record['group']}"
