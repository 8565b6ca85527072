"""Trajectories as they were trained on or evaluated, token by token, for people: files of JSON lines, and a block for the eye.

`train_data_step12.jsonl.gz` holds a line for each trajectory that step 12 trained on, `val_data_step12.jsonl.gz` one for each that
evaluated version 12; `zcat` reads them. Lists of tokens are those of the completion and of equal length; null stands where the
policy did not write the token, or nothing was computed. Log-probabilities and advantages are rounded to six decimals.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from headrace.errors import ServiceError
from headrace.trajectory import Float32, Score, Trajectory, UInt8
from headrace.trajectory import Group as TrajectoryGroup
from services.trainer.files import atomic_write
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
    """The files of a run. Of each kind those written last stay, `keep` of them (None: all; 0: none is written)."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self.folder = folder
        self._keep = keep

    @property
    def wanted(self) -> bool:
        return self._keep != 0

    def path(self, kind: Kind, step: int) -> Path:
        return self.folder / f"{kind}_data_step{step}.jsonl.gz"

    def write(self, kind: Kind, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """The file is there whole or not at all. Raises `ServiceError` for a full disk."""
        if not self.wanted:
            return
        path = self.path(kind, step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as unfinished, gzip.open(unfinished, "wb", compresslevel=1) as file:
                for record in records:
                    file.write(msgspec.json.encode(record) + b"\n")
            self._retain(kind)
        except OSError as error:
            raise ServiceError(
                f"can't write trajectories to {path} ({error}); free space there, set logger.log_dir, or "
                "logger.keep_step_data=0 to write none"
            ) from error

    def read(self, kind: Kind, step: int) -> list[dict[str, Any]]:
        """The records of a file; none where it is not there (any more)."""
        path = self.path(kind, step)
        if not path.exists():
            return []
        with gzip.open(path, "rb") as file:
            return [msgspec.json.decode(line) for line in file]

    def _retain(self, kind: Kind) -> None:
        if self._keep is None:
            return
        files = sorted(self.folder.glob(f"{kind}_data_step*.jsonl.gz"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[: -self._keep]:
            path.unlink()


def choose(rewards: Sequence[float], count: int) -> list[int]:
    """Places of the `count` to show, best first: half of them the best, half the worst, of an odd count one in the middle."""
    order = sorted(range(len(rewards)), key=lambda place: -rewards[place])
    if len(order) <= count:
        return order
    half, odd = divmod(count, 2)
    middle = [order[len(order) // 2]] if odd else []
    return [*order[:half], *middle, *order[len(order) - half :]]


@dataclasses.dataclass(frozen=True)
class Shown:
    """A trajectory for the eye."""

    prompt: str
    answer: str
    reward: float
    note: str


def shown(record: Mapping[str, Any]) -> Shown:
    """Of a line of a file."""
    prompt = "\n".join(f"{message['role']}: {_said(message.get('content'))}" for message in record["messages"])
    tokens = len(record["token_ids"])
    end = "cut off" if record["finish_reason"] == "length" else "ended"
    return Shown(
        prompt, record["content"], record["rewards"], f"{record['task']}, {tokens} tokens, {end}, {record['group']}"
    )


def _said(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def show(console: Console, title: str, samples: Sequence[Shown]) -> None:
    """A coloured block on a terminal, plain text elsewhere."""
    for place, sample in enumerate(samples, start=1):
        console.print(_panel(f"{title}, {place} of {len(samples)}", sample))


def _panel(title: str, sample: Shown) -> RenderableType:
    colour = "green" if sample.reward > 0 else "red"
    return Panel(
        Group(
            Text(sample.prompt, style="dim"),
            Text(sample.answer, style="bold"),
            Text.assemble((f"reward {sample.reward:g}", colour), f"  {sample.note}"),
        ),
        title=title,
        title_align="left",
        border_style=colour,
    )


def as_markdown(samples: Sequence[Shown]) -> str:
    """The same for a tracker."""
    return "\n\n---\n\n".join(
        f"**reward {sample.reward:g}** ({sample.note})\n\n" + _quoted(sample.prompt) + "\n\n" + _quoted(sample.answer)
        for sample in samples
    )


def _quoted(text: str) -> str:
    """As it stands: a completion may hold Markdown of its own."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
