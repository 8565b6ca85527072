"""All that the golden files' tests import of the product. What else they use is the command line, YAML, files of a run and calls of the
buffer's functions. So a refactoring that moves or renames modules edits this file and no other one here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import Config
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call, EpisodeTrajectory, Span, Trajectory
from headrace.replay.connection import function_name
from headrace_services.replay import library
from headrace_services.trainer.demo_models import tiny
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step

__all__ = ["Sample", "Turn", "functions", "make_model", "qualified", "train"]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One call of an episode; `parent` is the number of the one that it continues, -1 for none."""

    parent: int
    context: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]
    version: int
    trained: bool = True


@dataclasses.dataclass(frozen=True)
class Sample:
    """A scored trajectory. Of each token of `completion`: `logprobs`, `own` (1 where the policy wrote it), `versions` of the weights. With
    `turns` it is an episode, and these three and `prompt` are empty."""

    group: int
    index: int
    reward: float
    components: Mapping[str, float]
    multiplier: float = 1.0
    prompt: Sequence[int] = ()
    completion: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    own: Sequence[int] = ()
    versions: Sequence[int] = ()
    truncated: bool = False
    turns: Sequence[Turn] = ()


def train(sections: Mapping[str, Any], steps: Sequence[Sequence[Sample]], *, first: int, max_age: int) -> list[Any]:
    """Of a new learner with this configuration, which trains on one batch after the other, from step `first` on: the metrics of each step,
    and the advantages and returns [N] that it estimated."""
    learner = Learner(Config.model_validate(sections))
    learner.counters.current_step = first
    found = []
    for step, samples in enumerate(steps, first):
        batch = Batch.of(
            [_trajectory(sample) for sample in samples],
            [Score("SCORED", s.reward, components=dict(s.components), environment="golden") for s in samples],
            places=range(len(samples)),
            groups=[sample.group for sample in samples],
            multipliers=[sample.multiplier for sample in samples],
            step=step,
            max_age=max_age,
        )
        metrics = train_step(learner, batch)
        columns = {"advantages": batch.advantages, "returns": batch.returns, "multipliers": batch.multipliers}
        found.append((metrics, {name: column for name, column in columns.items() if column is not None}))
    return found


def _trajectory(sample: Sample) -> AnyTrajectory:
    group = f"g{sample.group}"
    if sample.turns:
        calls = [
            Call(
                parent=turn.parent,
                context_token_ids=np.array(turn.context, np.int32),
                completion_token_ids=np.array(turn.completion, np.int32),
                logprobs=np.array(turn.logprobs, np.float32),
                spans=(Span(turn.version, 0, len(turn.completion)),),
                finish_reason="stop",
                replica="r",
                trained=turn.trained,
            )
            for turn in sample.turns
        ]
        return EpisodeTrajectory(group, 1, sample.index, tuple(calls), sample.truncated, "runner")
    spans, end = [], 0
    for version, run in itertools.groupby(sample.versions):
        start, end = end, end + len(list(run))
        spans.append(Span(version, start, end))
    return Trajectory(
        group_id=group,
        attempt=1,
        index=sample.index,
        prompt_token_ids=np.array(sample.prompt, np.int32),
        completion_token_ids=np.array(sample.completion, np.int32),
        logprobs=np.array(sample.logprobs, np.float32),
        loss_mask=np.array(sample.own, np.uint8),
        spans=tuple(spans),
        finish_reason="length" if sample.truncated else "stop",
        text="",
        replica="r",
    )


def functions() -> str:
    """The source of the buffer's library for `FUNCTION LOAD`."""
    return library.source()


def qualified(function: str) -> str:
    """The name of one of the buffer's functions on the server, which names its build."""
    return function_name(function)


def make_model(folder: Path) -> None:
    """The demo's model, with random weights."""
    tiny.make(folder, warmup=False)
