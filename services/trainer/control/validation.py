"""Evaluates a version of the weights on held-out prompts, through the buffer's validation lane, while training continues.

With `trainer.validation_replicas`, some replicas keep the version and evaluate it beside training, and the others go on to the next one.
Without it, or where no other replica would be left, all evaluate it, and the next refit waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np

from headrace.base.errors import InvalidCall
from headrace.config import Config
from headrace.records.trajectory import Group
from headrace.replay import BufferRetry, Evaluated, ReplayClient, Replica
from headrace.run.evaluation import reaches
from headrace.run.headlines import accuracy_name
from headrace.run.journal import Line

from ..data.sources import Problem
from ..telemetry.metrics import score_metrics
from .checkpoint_writer import CheckpointWriter
from .context import TrainerContext
from .decisions import Action, choose_validators, is_verified
from .recorder import Recorder

log = logging.getLogger(__name__)


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
    metrics["partial_credit"] = float((~np.isclose(flat, 0) & ~np.isclose(flat, 1)).mean())
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


class Validation:
    """The evaluation of one version: its groups and the results so far. `validators` are the replicas that were chosen to evaluate it
    beside training; none if all do."""

    def __init__(
        self, replay: ReplayClient, retry: BufferRetry, timeline: str, version: int, validators: Set[str] = frozenset()
    ) -> None:
        self.version = version
        self.validators = validators
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
        await self._name(self.validators)
        await self._retry(lambda: self._replay.enqueue(groups, self._timeline, validation=self.version))

    async def add_validators(self, more: Set[str]) -> None:
        """Let more replicas evaluate it, because others of them are gone."""
        self.validators |= more
        await self._name(more)

    async def _name(self, validators: Set[str]) -> None:
        await self._retry(
            lambda: self._replay.drop_validation(self._timeline, before=self.version, validators=sorted(validators))
        )

    async def poll(self) -> bool:
        """Fetch the groups that finished since the last call; return True when none is pending. Groups that the buffer no longer has are
        enqueued again."""
        if self._pending:
            try:
                done, failed, unknown = await self._retry(lambda: self._replay.read_evaluated(self._pending))
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


class Validations:
    """The validations of one trainer's run. At most one is `running`; the loop began to wait for it at `awaited_since`, if it has."""

    def __init__(
        self,
        config: Config,
        context: TrainerContext,
        timeline: str,
        recorder: Recorder,
        writer: CheckpointWriter,
        lines: Sequence[Line],
    ) -> None:
        """`lines` is what the journal has of the history that this trainer continues."""
        self.running: Validation | None = None
        self.awaited_since: float | None = None
        self._algorithm = config.algorithm
        self._wanted = config.trainer.validation_replicas
        self._skipped: list[int] = []  # while this one runs
        self._context = context
        self._timeline = timeline
        self._recorder = recorder
        self._writer = writer
        self._began = 0.0  # when the running one did
        validations = [line for line in lines if line.kind == "validation"]
        self._validated = {line.step for line in validations}
        self.target_reached = any(self._reaches_target(line.metrics) for line in validations)

    def has_begun(self, version: int) -> bool:
        """Return whether a validation of `version` has begun, or ended."""
        return version in self._validated

    async def start(self, version: int, fleet: Sequence[Replica]) -> None:
        """Begin to evaluate `version`, beside training if `fleet` has the replicas for it."""
        context = self._context
        groups = await asyncio.to_thread(context.prompts.validation, version)
        chosen = choose_validators(fleet, (), self._wanted, version, self._timeline)
        validation = Validation(context.replay, context.retry, self._timeline, version, frozenset(chosen))
        await validation.start(groups)
        if chosen:
            log.info("version %d is validated beside training, by %s", version, ", ".join(chosen))
        self.running, self._began, self.awaited_since = validation, context.clock(), None
        self._validated.add(version)

    def count_validators(self, fleet: Sequence[Replica]) -> int | None:
        """Return how many replicas can evaluate the running one beside training; None if it doesn't run there."""
        if self.running is None or not self.running.validators:
            return None
        version, chosen = self.running.version, self.running.validators
        return sum(is_verified(replica, version, self._timeline) for replica in fleet if replica.id in chosen)

    async def skip(self, version: int) -> None:
        """Do without a validation of `version`, because one still runs beside training. It is reported after that one: reports are in the
        order of versions."""
        assert self.running is not None
        log.warning(
            "version %d is not validated, because the validation of version %d still runs; raise trainer.validation_replicas %d or "
            "%s.val_period %d",
            version, self.running.version, self._wanted, self._algorithm.name, self._algorithm.val_period,
        )  # fmt: skip
        self._validated.add(version)
        self._skipped.append(version)

    async def lose(self, version: int, reason: str) -> None:
        """Report a validation that an earlier trainer began, and that no trainer comes back to."""
        log.warning("the validation of version %d is lost: %s", version, reason)
        self._validated.add(version)
        await self._publish_lost(version)

    async def _publish_lost(self, version: int) -> None:
        """Report a validation without results: all its prompts are pending."""
        groups = await asyncio.to_thread(self._context.prompts.validation, version)
        await self._publish(version, summarize([], 0, len(groups)))

    async def poll(self, fleet: Sequence[Replica]) -> bool:
        """Fetch the results of the running one, and report it if they are complete. The step has that time under validation. Return whether
        it has ended."""
        if self.running is None:
            return False
        began, running = self._context.clock(), self.running
        if await running.poll():
            await self._report(running)
        elif running.validators:
            more = choose_validators(fleet, running.validators, self._wanted, running.version, self._timeline)
            if more:
                log.info("%s validate version %d too", ", ".join(more), running.version)
                await running.add_validators(frozenset(more))
        self._recorder.spend(Action.AWAIT_VALIDATION, self._context.clock() - began, {})
        return self.running is None

    async def abandon(self, reason: str) -> None:
        assert self.running is not None
        log.warning("the validation of version %d is abandoned: %s", self.running.version, reason)
        await self.running.abandon()
        await self._report(self.running)

    async def _report(self, validation: Validation) -> None:
        self.running, self.awaited_since = None, None
        version, took = validation.version, self._context.clock() - self._began
        metrics = {**validation.metrics(), "timing/validation/total_validation_time": took}
        for reason, times in Counter(reason for _, _, reason in validation.failed).items():
            log.warning("validation of version %d: %d groups failed: %s", version, times, reason)
        log.info(
            "version %d: %s %s on %d held-out prompts, %d failed, %d pending",
            version, accuracy_name(metrics), f"{metrics['accuracy']:.3f}" if "accuracy" in metrics else "unknown",
            metrics["evaluated"], metrics["failed"], metrics["pending"],
        )  # fmt: skip
        failed: list[tuple[str, Group | Problem, str]] = [*validation.failed, *self._context.prompts.left_out]
        await self._context.telemetry.report_validation(version, validation.evaluated, failed)
        await self._publish(version, metrics)
        if self._reaches_target(metrics):
            self.target_reached = True
            least = self._algorithm.stop_at_validation_threshold
            log.info("the run ends: %s is at least %g", self._algorithm.stop_at_validation_metric, least)
        skipped, self._skipped = self._skipped, []
        for each in skipped:
            await self._publish_lost(each)

    async def _publish(self, version: int, metrics: Mapping[str, float]) -> None:
        await self._recorder.publish("validation", version, metrics)
        self._writer.add_metrics(version, {f"val:{name}": value for name, value in metrics.items()})

    def _reaches_target(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a validation with these metrics ends the run."""
        metric, least = self._algorithm.stop_at_validation_metric, self._algorithm.stop_at_validation_threshold
        if metric is None or least is None:
            return False
        return reaches(metrics.get(metric.removeprefix("val:"), -math.inf), least)
