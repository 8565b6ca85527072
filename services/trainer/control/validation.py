"""Evaluates a version of the weights on held-out prompts, through the buffer's validation lane, while training continues."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.base.errors import InvalidCall
from headrace.records.trajectory import Group
from headrace.replay import BufferRetry, Evaluated, ReplayClient
from headrace_services.trainer.telemetry.metrics import score_metrics


def summarize(evaluated: Sequence[Evaluated], failed: int, pending: int) -> dict[str, float]:
    """Return the metrics of a validation.

    Failed and pending groups are counted separately and never enter a mean. If no group was evaluated, there is no accuracy. `pass_k`, with
    several completions per prompt, is the share of prompts with at least one reward above 0. `version_min` and `version_max` are the oldest
    and newest weight versions of the tokens.
    """
    metrics: dict[str, float] = {"evaluated": len(evaluated), "failed": failed, "pending": pending}
    if not evaluated:
        return metrics
    # law 7: a trajectory without a reward fails its group in the buffer, so it never gets here
    rewards = [[float(score.reward) for _, score in one.trajectories if score.reward is not None] for one in evaluated]
    trajectories = [trajectory for one in evaluated for trajectory, _ in one.trajectories]
    flat = np.array([reward for group in rewards for reward in group])
    metrics["accuracy"], metrics["reward_std"] = float(flat.mean()), float(flat.std())
    metrics["partial_credit"] = float(((flat != 0) & (flat != 1)).mean())
    environments = [one.group.env_name for one in evaluated for _ in one.trajectories]
    metrics |= score_metrics(environments, [score for one in evaluated for _, score in one.trajectories])
    if any(len(group) > 1 for group in rewards):
        metrics["pass_k"] = float(np.mean([any(reward > 0 for reward in group) for group in rewards]))
    metrics["mean_length"] = float(np.mean([trajectory.length for trajectory in trajectories]))
    metrics["truncation_rate"] = sum(t.truncated for t in trajectories) / len(trajectories)
    metrics["version_min"] = float(min(trajectory.oldest_version for trajectory in trajectories))
    metrics["version_max"] = float(max(trajectory.newest_version for trajectory in trajectories))
    by_task: dict[str, list[float]] = defaultdict(list)
    for one, group in zip(evaluated, rewards, strict=True):
        by_task[one.group.task_name] += group
    if len(by_task) > 1:
        metrics |= {f"accuracy/{task}": float(np.mean(of_task)) for task, of_task in sorted(by_task.items())}
    return metrics


def reaches_target(metrics: Mapping[str, float], metric: str | None, threshold: float | None) -> bool:
    """Return whether a validation ends the run: its `metric` (with or without `val:`) is at least `threshold`."""
    if metric is None or threshold is None:
        return False
    return metrics.get(metric.removeprefix("val:"), -math.inf) >= threshold


class Validation:
    """The evaluation of one version: its groups and the results so far."""

    def __init__(self, replay: ReplayClient, retry: BufferRetry, timeline: str, version: int) -> None:
        self.version = version
        self.evaluated: list[Evaluated] = []
        self._replay = replay
        self._retry = retry
        self._timeline = timeline
        self._groups: dict[str, Group] = {}
        self._pending: tuple[str, ...] = ()
        self._failed: dict[str, str] = {}

    async def start(self, groups: Sequence[Group]) -> None:
        """Drop what the previous validation left behind, and enqueue `groups`."""
        self._groups = {group.id: group for group in groups}
        self._pending = tuple(self._groups)
        await self._enqueue(groups)

    async def _enqueue(self, groups: Sequence[Group]) -> None:
        await self._retry(lambda: self._replay.drop_validation(self._timeline, before=self.version))
        await self._retry(lambda: self._replay.enqueue(groups, self._timeline, validation=self.version))

    async def poll(self) -> bool:
        """Fetch the groups that finished since the last call; return True when none is pending. Groups that the buffer no longer has are
        enqueued again."""
        if self._pending:
            try:
                done, failed, unknown = await self._retry(lambda: self._replay.evaluated(self._pending))
            except InvalidCall:
                # what was just evaluated is gone, because the buffer's server lost writes; the next look handles that
                return False
            if unknown:  # the buffer's server lost writes
                await self._enqueue([self._groups[id_] for id_ in unknown])
            self.evaluated.extend(done)
            self._failed.update(failed)
            finished = {evaluated.group.id for evaluated in done} | failed.keys()
            self._pending = tuple(id_ for id_ in self._pending if id_ not in finished)
        return not self._pending

    async def abandon(self) -> None:
        """Drop the pending groups from the buffer. They still count as pending."""
        await self._retry(lambda: self._replay.drop_validation(self._timeline, before=self.version + 1))

    def metrics(self) -> dict[str, float]:
        return summarize(self.evaluated, len(self._failed), len(self._pending))

    @property
    def failed(self) -> list[tuple[str, Group, str]]:
        """The groups that failed: id, group and reason of each."""
        return [(id_, self._groups[id_], reason) for id_, reason in self._failed.items()]

    def failures(self) -> Mapping[str, int]:
        """Return the reasons of failed groups, and the number of groups with each."""
        return Counter(self._failed.values())
