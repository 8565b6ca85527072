"""Records what the loop does: the metrics of each step, where its seconds went, the prompts that failed, and the builds of the environments
that scored."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from headrace.config import Config
from headrace.records.origin import Origin
from headrace.records.trajectory import Group
from headrace.replay import Reservation, frequent
from headrace.run.checkpoints import find_published
from headrace.run.collapse import CollapseDetector
from headrace.run.headlines import alarms, build_changes
from headrace.run.journal import Line

from ..telemetry.metrics import (
    Extent,
    batch_metrics,
    episode_metrics,
    sampling_metrics,
    score_metrics,
)
from ..telemetry.throughput import StepTimes
from . import decisions
from .context import TrainerContext
from .decisions import Action
from .rank import TrainedStep

log = logging.getLogger(__name__)


class Recorder:
    """Records one trainer's run. `step_s` is how long the newest step took, `began` when the loop began."""

    def __init__(self, config: Config, context: TrainerContext, timeline: str, lines: Sequence[Line]) -> None:
        """`lines` is what the journal has of the history that this trainer continues."""
        self.began = self._step_began = context.began
        self.step_s = 0.0
        self._config = config
        self._context = context
        self._timeline = timeline
        self._collapse = CollapseDetector(lines)
        self.stopped_by = ""  # the alarm of the newest step that `run.stop_on` names, as a sentence
        # the builds that scored last
        self._builds = {name: builds for line in lines for name, builds in line.builds.items()}
        # training prompts that have failed: at the last look (-1 before the first), and when the newest step's metrics were taken
        self._failed, self._failed_before = -1, 0
        self._init_metrics: dict[str, float] = {}  # kept for the first step's metrics
        self._seconds: dict[Action, float] = defaultdict(float)  # spent in this step
        self._awaiting_scores = 0.0  # the part of it spent waiting for scores

    def begin(self, failed: int) -> None:
        """Begin the first turn. `failed` prompts had failed before."""
        self._failed_before = failed
        self.began = self._step_began = self._context.clock()
        self._init_metrics = {"efficiency/init/total_s": self.began - self._context.began}

    def spend(self, action: Action, seconds: float, counts: Mapping[str, int]) -> None:
        """Add what an action other than TRAIN took. `counts` are the run's training groups by state."""
        self._seconds[action] += seconds
        if action in (Action.WAIT, Action.RESERVE):
            self._awaiting_scores += decisions.share_in_scoring(counts) * seconds

    # -- failed prompts --------------------------------------------------------------------------------------------------

    async def describe_failures(self) -> str:
        """Return the most frequent reasons of the newest training groups that failed, as the end of a sentence."""
        reasons = await self._context.retry(self._context.replay.failures)
        return f". Of the newest {len(reasons)} failures: {'; '.join(frequent(reasons))}" if reasons else ""

    async def note_failures(self, failed: int) -> None:
        """Record the number of training prompts that have failed, and show the reasons on the page."""
        if failed != self._failed:
            why = await self.describe_failures()
            self._context.readiness.failures = f"{failed} prompts failed{why}" if failed else ""
        self._failed = failed

    def _count_failures(self, step: int) -> dict[str, float]:
        """Return the metrics of the prompts that failed since the step before."""
        new = max(0, self._failed - self._failed_before)  # retries lower the count
        self._failed_before = self._failed
        if new:
            log.warning(
                "step %d: %d prompts failed since the step before; in total, %s",
                step, new, self._context.readiness.failures,
            )  # fmt: skip
        return {"failed_prompts": float(new), "failed_prompts_total": float(self._failed)}

    # -- a step ----------------------------------------------------------------------------------------------------------

    async def measure(
        self, reservation: Reservation, groups: Sequence[Group], trained: TrainedStep, began: float, replicas: int
    ) -> dict[str, float]:
        """End the step, whose training began at `began` while `replicas` took part, and return its metrics."""
        config, context = self._config, self._context
        extents = [trajectory.extent for trajectory in trained.trajectories]
        metrics = {**trained.metrics, **batch_metrics(reservation, groups, extents, trained.truncated)}
        environment_of = {group.id: group.env_name for group in groups}
        environments = [environment_of[trajectory.group_id] for trajectory in reservation.trajectories]
        metrics |= score_metrics(environments, trained.trajectories)
        episodes = config.episodic.keys()
        metrics |= episode_metrics(environments, extents, episodes)
        if config.algorithm.use_dynamic_sampling:
            metrics |= sampling_metrics(reservation, config.algorithm.generation_batch)
        batch = await context.torch(context.lead.gather_batch) if context.telemetry.wants_batch(metrics) else None
        metrics |= await context.telemetry.report_step(reservation.step, groups, batch, metrics)
        metrics |= self._count_failures(reservation.step)
        return metrics | self._end_step(began, extents, replicas)

    def _end_step(self, began: float, extents: Sequence[Extent], replicas: int) -> dict[str, float]:
        """Begin the next step. Return the metrics of the time since the last one."""
        now, lead = self._context.clock(), self._context.lead
        times = step_times(
            self._seconds, now - self._step_began, now - began, lead.learner.seconds, self._awaiting_scores
        )
        self._step_began, self.step_s = now, times.total
        self._seconds.clear()
        self._awaiting_scores = 0.0
        init_metrics, self._init_metrics = self._init_metrics, {}
        return init_metrics | self._context.meter.metrics(
            times,
            [extent.paths for extent in extents],
            lead.learner.work,
            training_devices=lead.ranks.size,
            generating_devices=replicas * self._config.policy.generation.vllm_cfg.tensor_parallel_size,
        )

    def note_builds(self, step: int, builds: Mapping[str, list[str]]) -> None:
        """Log environments that were scored by other builds than before. `builds` are those of `step`, by environment."""
        for _, changed in build_changes([(step - 1, self._builds), (step, builds)]):
            log.info("%s", changed)
        self._builds |= builds

    async def publish(
        self,
        kind: Literal["train", "validation"],
        step: int,
        metrics: Mapping[str, float],
        builds: Mapping[str, list[str]] | None = None,
    ) -> None:
        context = self._context
        if kind == "train":
            metrics = {**metrics, **self._look_for_collapse(step, metrics, builds or {})}
            self.stopped_by = self._name_alarm(step, metrics)
        context.journal.append(kind, step, self._timeline, metrics, builds=builds)
        context.telemetry.notify()
        context.gauges.update(kind, step, metrics)
        await context.retry(lambda: context.replay.publish_metrics(kind, step, metrics, self._timeline))

    def _look_for_collapse(
        self, step: int, metrics: Mapping[str, float], builds: Mapping[str, list[str]]
    ) -> dict[str, float]:
        """Return the metric that tells whether the policy is collapsed. A new collapse is logged."""
        before = self._collapse.found
        found = self._collapse.add(Line("train", step, self._timeline, time.time(), dict(metrics), builds=dict(builds)))
        if found is not None and before is None:
            log.warning(
                "%s. %s. %s; run.stop_on=[collapse] ends a run by itself",
                found, ", ".join(found.evidence), self.describe_way_back(),
            )  # fmt: skip
        return {"collapse_alarm": float(found is not None)}

    def describe_way_back(self) -> str:
        """Return how the run can continue from weights before an alarm."""
        if self._collapse.found is None:
            return "`headrace rewind` goes back to an earlier checkpoint"
        folder = self._config.checkpoint_folder
        return self._collapse.found.describe_way_back(self._config.run_folder.name, find_published(folder))

    def _name_alarm(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return the alarms of a step that end the run, in words; empty if there is none."""
        stop_on = self._config.run.stop_on
        collapse = [str(self._collapse.found)] if "collapse" in stop_on and self._collapse.found is not None else []
        return "; ".join([*collapse, *alarms(step, metrics, {*stop_on} - {"collapse"})])


def collect_builds(groups: Sequence[Group], origins: Mapping[str, Sequence[Origin]]) -> dict[str, list[str]]:
    """Return the builds that scored a batch, by environment, in the batch's order. A build without a name is ""."""
    found: dict[str, dict[str, None]] = {}
    for group in groups:
        found.setdefault(group.env_name, {}).update({origin.build or "": None for origin in origins[group.id]})
    return {name: list(builds) for name, builds in found.items()}


def step_times(
    spent: Mapping[Action, float], total: float, training: float, learner: Mapping[str, float], awaiting_scores: float
) -> StepTimes:
    """Split the `total` seconds of a step. `training` of them were training, and `learner` has the parts of that. `spent` has the seconds
    of the loop's other actions. `awaiting_scores` is the part of its waiting that was for scores."""

    def over(*actions: Action) -> float:
        return sum(spent.get(action, 0.0) for action in actions)

    return StepTimes(
        total=total,
        training=training,
        learner=learner,
        buffer_starvation=over(Action.WAIT, Action.RESERVE),
        refit_bubble=over(Action.REFIT, Action.OFFER),
        validation=over(Action.AWAIT_VALIDATION, Action.VALIDATE, Action.SKIP_VALIDATION, Action.ABANDON_VALIDATION),
        checkpoint=over(Action.CHECKPOINT, Action.SNAPSHOT),
        awaiting_scores=awaiting_scores,
    )
