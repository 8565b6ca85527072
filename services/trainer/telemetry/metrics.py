"""The numbers of a run: computed from what a step was made of, kept in `metrics.jsonl`, offered to Prometheus.

`metrics.jsonl` holds one JSON object a line: `kind` (`train`, `validation`, or `rewind`), `step`, `timeline`, `time` (Unix
seconds) and `metrics`. `step` of a `train` line is the step t that turned version t into t + 1; of a `validation` line the
version that was evaluated; of a `rewind` line the checkpoint that the trainer went on from, which supersedes the lines of
later weights above it (`surviving`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.errors import ServiceError
from headrace.replay import Reservation
from headrace.trajectory import Group

JOURNAL = "metrics.jsonl"  # in the run's folder

Kind = Literal["train", "validation", "rewind"]


def batch_metrics(reservation: Reservation, groups: Sequence[Group], truncated: float) -> dict[str, float]:
    """What a batch was like: rewards as the environments gave them, ages in steps, lengths in tokens.

    `groups` are the batch's, in its order; where they are of several tasks, each one's mean reward is `environment_reward/<task>`.
    """
    batch = reservation.trajectories
    group_of = dict(zip(reservation.groups, groups, strict=True))
    ages = np.array([reservation.step - t.oldest_version for t in batch])
    completions = np.array([t.length for t in batch])
    lengths = np.array(total_lengths(reservation, groups))
    metrics = {
        "environment_reward": float(np.mean([t.reward for t in batch])),
        "avg_trajectory_age": float(ages.mean()),
        "max_trajectory_age": float(ages.max()),
        "mean_prompt_length": float((lengths - completions).mean()),
        "mean_gen_tokens_per_sample": float(completions.mean()),
        "min_gen_tokens_per_sample": float(completions.min()),
        "max_gen_tokens_per_sample": float(completions.max()),
        "mean_total_tokens_per_sample": float(lengths.mean()),
        "total_num_tokens": float(lengths.sum()),
        "truncation_rate": truncated / len(batch),
    }
    tasks = {group.task_name for group in groups}
    if len(tasks) > 1:
        for task in sorted(tasks):
            mine = [t.reward for t in batch if group_of[t.group_id].task_name == task]
            metrics[f"environment_reward/{task}"] = float(np.mean(mine))
    return metrics


def total_lengths(reservation: Reservation, groups: Sequence[Group]) -> list[int]:
    """Tokens of prompt and completion of each trajectory of a batch."""
    prompts = {group.id: group.prompt_token_ids.size for group in groups}
    return [prompts[t.group_id] + t.length for t in reservation.trajectories]


def sampling_metrics(reservation: Reservation, generation_batch: float) -> dict[str, float]:
    """What dynamic sampling did for a batch: groups scored since the batch before, in batches of `generation_batch` groups, and those of
    them that were filtered."""
    return {
        "dynamic_sampling_num_gen_batches": reservation.scored / generation_batch,
        "dynamic_sampling_scored_groups": reservation.scored,
        "dynamic_sampling_filtered_groups": reservation.filtered,
    }


@dataclasses.dataclass(frozen=True)
class Line:
    kind: Kind
    step: int
    timeline: str
    time: float
    metrics: dict[str, float]


def surviving(lines: Iterable[Line]) -> list[Line]:
    """The lines that belong to the history of the newest weights.

    A rewind to version c abandons the steps that made later versions (`train` lines with step >= c) and what was measured on
    those (`validation` lines with step > c); weights c themselves are the same bytes, and keep theirs.
    """
    kept: list[Line] = []
    for line in lines:
        if line.kind == "rewind":
            kept = [k for k in kept if k.step < line.step or (k.kind == "validation" and k.step == line.step)]
        else:
            kept.append(line)
    return kept


class Journal:
    """`metrics.jsonl`, appended to line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)

    def append(self, kind: Kind, step: int, timeline: str, metrics: Mapping[str, float]) -> None:
        line = Line(kind, step, timeline, time.time(), dict(metrics))
        with self.path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(line)) + "\n")

    def read(self) -> list[Line]:
        """Raises `ServiceError` naming the first line that is not one of ours."""
        return read_journal(self.path)


def read_journal(path: Path) -> list[Line]:
    """What a trainer, perhaps one at work, has written; none where there is no such file. Raises as `Journal.read` does."""
    return list(_parse(path))


def _cut_torn_line(path: Path) -> None:
    """A process killed in the middle of a write leaves half a line; what follows must not be glued to it."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _parse(path: Path) -> Iterator[Line]:
    if not path.exists():
        return
    whole, _, _ = path.read_text().rpartition("\n")  # a writer may be in the middle of the last line
    yield from parse_lines(whole, str(path))


def parse_lines(text: str, where: str) -> Iterator[Line]:
    """The lines of `text`. Raises `ServiceError` naming `where` and the first line that is not one of ours."""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields: dict[str, Any] = json.loads(line)
            yield Line(**fields)
        except (ValueError, TypeError) as error:
            raise ServiceError(
                f"{where}:{number}: not a line of metrics ({error}); remove it or move the file away"
            ) from error


class Gauges(Collector):
    """The newest value of every metric as `headrace_trainer_<name>`, validation as `headrace_trainer_validation_<name>`."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def update(self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]) -> None:
        prefix = "headrace_trainer_" if kind == "train" else "headrace_trainer_validation_"
        for name, value in {"step": step, **metrics}.items():
            self._values[prefix + "".join(c if c.isalnum() else "_" for c in name)] = float(value)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._values.items():
            yield GaugeMetricFamily(name, "newest value", value=value)

    @contextmanager
    def registered(self, registry: CollectorRegistry = REGISTRY) -> Iterator[Gauges]:
        registry.register(self)
        try:
            yield self
        finally:
            registry.unregister(self)
