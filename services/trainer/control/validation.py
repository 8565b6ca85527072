"""Evaluating a version of the weights on held-out prompts, through the buffer's validation lane, while training goes on."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.replay import Evaluated, ReplayClient
from headrace.trajectory import Group, Trajectory
from services.trainer.control.patience import Patience

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tally:
    """What one evaluated group adds: rewards [n], lengths [n] in tokens, and the versions that wrote it."""

    task: str
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    truncated: int
    versions: frozenset[int]

    @classmethod
    def of(cls, evaluated: Evaluated) -> Tally:
        trajectories = [trajectory for trajectory, _ in evaluated.trajectories]
        # law 7: a trajectory without a reward fails its group in the buffer and never gets here
        rewards = tuple(float(score.reward) for _, score in evaluated.trajectories if score.reward is not None)
        return cls(
            task=evaluated.group.task_name,
            rewards=rewards,
            lengths=tuple(t.completion_token_ids.size for t in trajectories),
            truncated=sum(t.finish_reason == "length" for t in trajectories),
            versions=frozenset().union(*map(_versions, trajectories)),
        )


def _versions(trajectory: Trajectory) -> frozenset[int]:
    return frozenset(span.version for span in trajectory.spans)


def summarise(tallies: Sequence[Tally], failed: int, pending: int) -> dict[str, float]:
    """Metrics of a validation. Failed and pending groups are counted apart and never enter a mean; where none was
    evaluated, there is no accuracy at all. `pass_k` is the share of prompts with a reward above 0 among their several
    completions. `version_min` and `version_max` are those of the tokens."""
    metrics: dict[str, float] = {"evaluated": len(tallies), "failed": failed, "pending": pending}
    if not tallies:
        return metrics
    metrics["accuracy"] = float(np.mean([r for t in tallies for r in t.rewards]))
    if any(len(t.rewards) > 1 for t in tallies):
        metrics["pass_k"] = float(np.mean([any(r > 0 for r in t.rewards) for t in tallies]))
    metrics["mean_length"] = float(np.mean([n for t in tallies for n in t.lengths]))
    metrics["truncation_rate"] = sum(t.truncated for t in tallies) / sum(len(t.lengths) for t in tallies)
    versions = frozenset().union(*(t.versions for t in tallies))
    metrics["version_min"], metrics["version_max"] = float(min(versions)), float(max(versions))
    by_task: dict[str, list[float]] = defaultdict(list)
    for tally in tallies:
        by_task[tally.task].extend(tally.rewards)
    if len(by_task) > 1:
        metrics.update({f"accuracy/{task}": float(np.mean(rewards)) for task, rewards in sorted(by_task.items())})
    return metrics


def reaches(metrics: Mapping[str, float], metric: str | None, threshold: float | None) -> bool:
    """Whether a validation ends the run: its `metric` (with or without `val:`) is there and at least `threshold`."""
    if metric is None or threshold is None:
        return False
    return metrics.get(metric.removeprefix("val:"), -math.inf) >= threshold


class Validation:
    """One evaluation of one version: the groups it enqueued and what has come back of them so far."""

    def __init__(self, replay: ReplayClient, patience: Patience, timeline: str, version: int) -> None:
        self.version = version
        self.evaluated: list[Evaluated] = []
        self._replay = replay
        self._patience = patience
        self._timeline = timeline
        self._pending: tuple[str, ...] = ()
        self._failed: dict[str, str] = {}

    async def start(self, groups: Sequence[Group]) -> None:
        """Make room (what the validation before this one left is dropped) and enqueue."""
        await self.abandon()
        self._pending = tuple(group.id for group in groups)
        await self._patience(lambda: self._replay.enqueue(groups, self._timeline))

    async def poll(self) -> bool:
        """Take in what was finished since the last look; True when nothing is pending."""
        if self._pending:
            done, failed, _ = await self._patience(lambda: self._replay.evaluated(self._pending))
            self.evaluated.extend(done)
            self._failed.update(failed)
            finished = {evaluated.group.id for evaluated in done} | failed.keys()
            self._pending = tuple(id_ for id_ in self._pending if id_ not in finished)
        return not self._pending

    async def abandon(self) -> None:
        """Give up what is pending; it stays counted as pending."""
        await self._patience(lambda: self._replay.drop_validation(self._timeline))

    def metrics(self) -> dict[str, float]:
        return summarise([Tally.of(one) for one in self.evaluated], len(self._failed), len(self._pending))

    def complaints(self) -> Mapping[str, int]:
        """Reasons of failed groups and how often each was given."""
        return Counter(self._failed.values())
