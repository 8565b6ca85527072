"""Samples: the trajectories of steps and validations, token by token, in files of JSON lines; a few of them are printed.

`train_data_step12.jsonl.gz` has one line per trajectory that step 12 trained on, `val_data_step12.jsonl.gz` one per trajectory that
evaluated version 12; `zcat` reads them. Per-token lists cover the completion and have equal lengths; null means that the policy did
not write the token, or that nothing was computed. Log-probabilities and advantages are rounded to six decimals.
"""

from __future__ import annotations

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
from headrace.printable import printable
from headrace.trajectory import Float32, Score, Trajectory
from headrace.trajectory import Group as TrajectoryGroup
from headrace_services.trainer.files import atomic_write
from headrace_services.trainer.learning.batch import Batch, Float64

Kind = Literal["train", "val"]
DECIMALS = 6


def over_completion(batch: Batch, i: int, values: npt.NDArray[Any] | None) -> Float32:
    """Spread a column `values` [N] over the completion of trajectory `i`, [T]: its values at policy tokens, NaN elsewhere, all NaN without
    a column."""
    mask = batch.trajectories[i].loss_mask
    whole = np.full(mask.size, np.nan, dtype=np.float32)
    if values is not None:
        whole[mask != 0] = values[batch.tokens_of([i])]
    return whole


def training_record(step: int, group: TrajectoryGroup, batch: Batch, i: int) -> dict[str, Any]:
    """A line of `train_data_step<N>`, trajectory `i` of the batch, with NeMo RL's names where it has them."""

    def column(values: Float32 | Float64 | None) -> list[float] | None:
        whole = over_completion(batch, i, values)
        return None if np.isnan(whole).all() else _rounded(whole)

    return {
        **_record(step, group, batch.trajectories[i], batch.scores[i]),
        "total_reward": float(batch.rewards[i]),
        "sample_loss_mask": float(batch.multipliers[i]),
        "token_loss_mask": (over_completion(batch, i, batch.mask) == 1).astype(int).tolist(),
        "advantages": _rounded(over_completion(batch, i, batch.advantages)),
        "prev_logprobs": column(batch.old_logprobs),
        "reference_policy_logprobs": column(batch.ref_logprobs),
        "teacher_logprobs": column(batch.teacher_logprobs),
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


def _rounded(values: Float32) -> list[float]:
    rounded: list[float] = np.round(values.astype(np.float64), DECIMALS).tolist()
    return rounded


class SampleFiles:
    """The sample files of a run; the newest `keep` of each kind stay (None: all; 0: none is written)."""

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
            with atomic_write(path) as unfinished, gzip.open(unfinished, "wb", compresslevel=1) as file:
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
        """The records of a file; none if the file is gone."""
        path = self.path(kind, step)
        if not path.exists():
            return []
        with gzip.open(path, "rb") as file:
            return [msgspec.json.decode(line) for line in file]


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Delete all but the `count` files written last. Files are ordered by time, because a rewound run repeats steps, and by step if their
    times are equal."""

    def age(path: Path) -> tuple[int, int, str]:
        return path.stat().st_mtime_ns, len(path.name), path.name

    for path in sorted(folder.glob(pattern), key=age, reverse=True)[count:]:
        path.unlink()


def choose(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The `count` records to show, best first: half have the highest rewards, half the lowest; with an odd count, one is from the
    middle."""
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
        prompt, content = (printable(text, keep="\n\t") for text in (_prompt(record), record["content"]))
        block = Group(Text(prompt, style="dim"), Text(content, style="bold"), reward)
        heading = f"{title}, {place} of {len(records)}"
        console.print(Panel(block, title=heading, title_align="left", border_style=colour))


def as_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as Markdown, for a tracker. Texts are indented, so that Markdown in a completion is shown literally."""
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
