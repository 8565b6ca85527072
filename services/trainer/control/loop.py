"""The trainer's loop on rank 0: looks, decides, does, and looks again.

What to do next is `decisions.decide`; this module carries it out. Every call of the buffer is made here, on the event loop; torch works in
one thread, so that health pages stay alive. A step whose batch was dropped by a restart is done again with the same number.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeVar

from headrace.config import Config
from headrace.errors import SamplingStarved, ServiceError
from headrace.replay import End, Replica, Reservation, Waiting
from headrace.trajectory import Float32, Int32
from headrace.weights.probe import choose_token_ids
from services.trainer.control import decisions
from services.trainer.control.checkpoint import ENDED, TRAINED, State
from services.trainer.control.decisions import Action, Plan, Retry, RunningValidation, View
from services.trainer.control.laws import check_batch
from services.trainer.control.shares import assign
from services.trainer.control.start import Standing
from services.trainer.control.step_times import step_times
from services.trainer.control.tools import Tools
from services.trainer.control.validation import Validation, reaches
from services.trainer.control.worker import Weights
from services.trainer.learning.step import policy_epochs
from services.trainer.telemetry.journal import Line, surviving
from services.trainer.telemetry.metrics import batch_metrics, sampling_metrics, total_lengths
from services.trainer.telemetry.plots import CURVES, draw_curve, write_page
from services.trainer.telemetry.throughput import Devices

log = logging.getLogger(__name__)

GLANCE_S = 0.5
PROBE_TOKENS = 64

T = TypeVar("T")


class Loop:
    """One trainer's run from `standing` to its end. `feeding` is the feeder's task; if it fails, so does the run."""

    def __init__(self, config: Config, tools: Tools, standing: Standing, feeding: asyncio.Task[None]) -> None:
        self._config = config
        self._tools = tools
        self._standing = standing
        self._feeding = feeding
        self._plan = Plan.of(config, can_validate=tools.prompts.can_validate)
        self._version = standing.version
        self._saved = standing.version if standing.version > 0 else None
        self._ledger = standing.ledger
        self._reply: Reservation | Waiting | End | None = None
        self._offered = False
        self._retries: dict[str, Retry] = {}
        self._probe: tuple[Int32, Float32] | None = None
        self._validation: Validation | None = None
        self._awaited_since: float | None = None
        self._validating_since = 0.0
        history = surviving(tools.journal.read())
        self._validated = {line.step for line in history if line.kind == "validation"}
        self._reward: float | None = None
        self._reached = any(self._ends_the_run(line.metrics) for line in history if line.kind == "validation")
        self._healthy_at = self._step_began = self._began = tools.clock()
        self._start = {"efficiency/init/total_s": self._began - tools.began}  # until the first step's metrics have it
        self._step_s = 0.0  # how long the last step took
        self._saved_in_time = False
        self._seconds: dict[Action, float] = defaultdict(float)
        self._generating = 0  # live replicas, when they were last looked at

    @property
    def reserved(self) -> int:
        """How many steps the buffer has handed out to these weights and their successors, as far as this trainer knows."""
        return self._version + isinstance(self._reply, Reservation)

    async def run(self) -> bool:
        """Until the last step or the last prompt (True), or a stop (False). Raises `ServiceError` when the run can't go on."""
        while True:
            if self._feeding.done():
                self._feeding.result()
            fleet = await self._call(self._tools.replay.replicas)
            self._generating = len(decisions.alive(fleet))
            await self._look_at_validation()
            decision = decisions.decide(self._plan, self._view(fleet))
            began = self._tools.clock()
            match decision.action:
                case Action.STOP:
                    self._say_where_it_stopped()
                    return False
                case Action.FAIL:
                    raise ServiceError(decision.reason)
                case Action.FINISH:
                    await self._finish()
                    return True
                case Action.CHECKPOINT:
                    await self._checkpoint()
                case Action.REFIT:
                    await self._refit()
                case Action.VALIDATE:
                    await self._validate()
                case Action.ABANDON_VALIDATION:
                    await self._abandon_validation(decision.reason)
                case Action.AWAIT_VALIDATION:
                    if self._awaited_since is None:
                        self._awaited_since = began
                    await self._wait()
                case Action.RESERVE:
                    self._reply = await self._reserve()
                case Action.TRAIN:
                    assert isinstance(self._reply, Reservation)
                    await self._train(self._reply)
                case Action.WAIT:
                    await self._wait()
                    self._reply = None
            if decision.action is Action.TRAIN:  # a step ends where its metrics are taken, in `_end_step`
                self._healthy_at = self._tools.clock()
            else:
                self._seconds[decision.action] += self._tools.clock() - began

    def _view(self, fleet: Sequence[Replica]) -> View:
        now, timeline = self._tools.clock(), self._standing.timeline
        # while older weights are evaluated, the replicas that hold those are the ones that count
        held = self._version if self._offered or self._validation is None else self._validation.version
        healthy = decisions.count_verified(fleet, held, timeline)
        if healthy:
            self._healthy_at = now
        if self._offered or not decisions.alive(fleet):
            self._tools.phase.problem = None if healthy else "no rollout replica holds verified weights"
        running = self._validation
        return View(
            now=now,
            stop=self._tools.stop.is_set(),
            version=self._version,
            saved=self._saved == self._version,
            offered=self._offered,
            validated=self._version in self._validated,
            validation=RunningValidation(running.version, self._awaited_since) if running else None,
            members=len(decisions.alive(fleet)),
            healthy=healthy,
            behind_due=decisions.any_due(decisions.behind(fleet, self._version, timeline), self._retries, now),
            healthy_at=self._healthy_at,
            reply=self._reply,
            reached=self._reached,
            runs_out=not self._saved_in_time and self._plan.runs_out(now - self._began, self._step_s),
        )

    # -- training --------------------------------------------------------------------------------------------------------

    async def _reserve(self) -> Reservation | Waiting | End:
        try:
            return await self._call(lambda: self._tools.replay.reserve(self._version, self._standing.timeline))
        except SamplingStarved as error:
            algorithm = self._config.algorithm
            key, limit = (
                f"{algorithm.name}.dynamic_sampling_max_gen_batches",
                algorithm.dynamic_sampling_max_gen_batches,
            )
            raise ServiceError(
                f"step {self._version}: {error}; raise {key} {limit}, or use prompts and rewards "
                "that tell a prompt's completions apart"
            ) from error

    async def _train(self, reservation: Reservation) -> None:
        replay, step = self._tools.replay, self._version
        began = self._tools.clock()
        groups = await self._call(lambda: replay.read_groups(reservation.groups))
        check_batch(reservation, groups, self._config.algorithm.num_prompts_per_step)
        ranks, size, whole = self._tools.lead.ranks, self._config.policy_batch, self._config.policy.share_prompts
        shares = assign(reservation, groups, ranks, size, whole_groups=whole)
        learnt = await self._tools.torch(lambda: self._tools.lead.step(step, shares))
        if masked := int(learnt["masked_tokens"]):
            await self._call(lambda: replay.masked(step, self._standing.timeline, masked))
        self._ledger.record(step, reservation.groups, [group.order for group in groups])
        telemetry, lead = self._tools.telemetry, self._tools.lead
        origins = await self._tools.torch(lead.origins)
        await asyncio.to_thread(self._tools.lineage.write, step, groups, origins)
        truncated = learnt.pop("truncated")
        metrics = {**learnt, **batch_metrics(reservation, groups, truncated)}
        if self._config.algorithm.use_dynamic_sampling:
            metrics |= sampling_metrics(reservation, self._config.algorithm.generation_batch)
        samples = await self._tools.torch(lead.samples) if telemetry.wants_samples(metrics) else []
        metrics |= await telemetry.trained(step, groups, samples, metrics)
        metrics |= self._end_step(began, total_lengths(reservation, groups))
        self._reward = metrics["reward"]
        self._version = step + 1
        self._offered, self._reply, self._probe, self._retries = False, None, None, {}
        self._tools.feeder.nudge()
        log.info(
            "step %d: reward %.3f, age %.1f, %.0f tokens/s, %.2f s",
            step, metrics["reward"], metrics["avg_trajectory_age"],
            metrics["performance/tokens_per_sec"], metrics["timing/train/total_step_time"],
        )  # fmt: skip
        await self._publish("train", step, metrics)

    def _end_step(self, began: float, lengths: Sequence[int]) -> dict[str, float]:
        """Where the time since the last step went, this one's training having begun at `began`; the next step begins here."""
        now, lead = self._tools.clock(), self._tools.lead
        start, self._start = self._start, {}
        total, training = now - self._step_began, now - began
        times = step_times(self._seconds, total, training, lead.learner.seconds)
        self._step_began, self._step_s = now, times.total
        self._seconds.clear()
        generating = self._generating * self._config.policy.generation.vllm_cfg.tensor_parallel_size
        epochs = policy_epochs(self._config, self._version)
        return start | self._tools.meter.metrics(times, lengths, Devices(lead.ranks, generating), epochs)

    async def _checkpoint(self) -> None:
        """Publish, then let the buffer forget what led here: in this order nothing is lost, whatever dies in between."""
        ended = await self._call(self._tools.replay.ended)
        counters = self._tools.lead.learner.counters
        state = State(
            version=self._version,
            timeline=self._standing.timeline,
            incarnation=self._standing.incarnation,
            ancestors=self._standing.ancestors,
            cursor=self._ledger.orders.last + 1,
            failed=ended.failed,
            filtered=ended.filtered,
            consumed_samples=counters.consumed_samples,
            total_valid_tokens=counters.total_valid_tokens,
            run_id=self._config.run.id or "",
            metrics={} if self._reward is None else {"train:reward": self._reward},
        )
        keep = {self._validation.version} if self._validation else set()
        files = {TRAINED: self._ledger.orders.encode(), ENDED: ended.bitmap}
        tools = self._tools

        def write() -> None:
            folder = tools.checkpoints.begin(state.version)
            tools.lead.save(str(folder))
            tools.lineage.force()
            tools.checkpoints.publish(state, self._ledger.steps, keep, files)

        await tools.torch(write)
        self._ledger.published()
        self._saved = state.version
        self._saved_in_time |= self._plan.runs_out(tools.clock() - self._began, self._step_s)
        log.info("checkpoint %s", tools.checkpoints.path(state.version))
        await self._call(lambda: tools.replay.commit(state.version, state.timeline))

    # -- the fleet -------------------------------------------------------------------------------------------------------

    async def _refit(self) -> None:
        tools, timeline = self._tools, self._standing.timeline
        if self._probe is None:
            self._probe = await tools.torch(self._make_probe)
        ids, logprobs = self._probe
        report = await self._call(
            lambda: tools.sender.refit(self._version, timeline, Weights(tools.lead), ids, logprobs)
        )
        self._offered = True
        fleet = await self._call(tools.replay.replicas)
        left = decisions.behind(fleet, self._version, timeline)
        self._retries = decisions.after_refit(left, self._retries, tools.clock())
        log.info("version %d: %d of %d replicas verified", self._version, len(report.verified), len(report.members))
        for replica, reason in report.refused.items():
            log.warning("replica %s did not take version %d: %s", replica, self._version, reason)

    def _make_probe(self) -> tuple[Int32, Float32]:
        lead = self._tools.lead
        length = min(PROBE_TOKENS, self._config.policy.max_total_sequence_length - 1)
        ids = choose_token_ids(lead.learner.vocab_size, length=max(2, length))
        return ids, lead.probe(ids.tolist())

    # -- validation ------------------------------------------------------------------------------------------------------

    async def _validate(self) -> None:
        tools = self._tools
        groups = await asyncio.to_thread(tools.prompts.validation, self._version)
        validation = Validation(tools.replay, tools.patience, self._standing.timeline, self._version)
        await validation.start(groups)
        self._validation, self._awaited_since, self._validating_since = validation, None, tools.clock()
        self._validated.add(self._version)

    async def _look_at_validation(self) -> None:
        if self._validation is not None and await self._validation.poll():
            await self._report_validation(self._validation)

    async def _abandon_validation(self, reason: str) -> None:
        if self._validation is None:
            return
        log.warning("the validation of version %d is given up: %s", self._validation.version, reason)
        await self._validation.abandon()
        await self._report_validation(self._validation)

    async def _report_validation(self, validation: Validation) -> None:
        self._validation, self._awaited_since = None, None
        took = self._tools.clock() - self._validating_since
        metrics = {**validation.metrics(), "timing/validation/total_validation_time": took}
        for complaint, times in validation.complaints().items():
            log.warning("validation of version %d: %d groups failed: %s", validation.version, times, complaint)
        log.info(
            "version %d: accuracy %s on %d held-out prompts, %d failed, %d pending",
            validation.version, f"{metrics['accuracy']:.3f}" if "accuracy" in metrics else "unknown",
            metrics["evaluated"], metrics["failed"], metrics["pending"],
        )  # fmt: skip
        await self._tools.telemetry.validated(validation.version, validation.evaluated)
        await self._publish("validation", validation.version, metrics)
        if self._ends_the_run(metrics):
            self._reached = True
            algorithm = self._config.algorithm
            log.info(
                "the run ends: %s is at least %g",
                algorithm.stop_at_validation_metric,
                algorithm.stop_at_validation_threshold,
            )
        await asyncio.to_thread(self._draw_curves)
        named = {f"val:{name}": value for name, value in metrics.items()}
        await asyncio.to_thread(self._tools.checkpoints.add_metrics, validation.version, named)

    def _ends_the_run(self, metrics: Mapping[str, float]) -> bool:
        algorithm = self._config.algorithm
        return reaches(metrics, algorithm.stop_at_validation_metric, algorithm.stop_at_validation_threshold)

    # -- the end ---------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        folder = self._config.run_folder
        lines = await asyncio.to_thread(self._draw_curves)
        await asyncio.to_thread(draw_curve, lines, folder / "curve.png", f"Headrace, run {self._config.run.id}")
        log.info("the run is complete: version %d, curves in %s", self._version, folder / CURVES)

    def _draw_curves(self) -> list[Line]:
        """The page of the surviving history, whose lines are returned."""
        lines = surviving(self._tools.journal.read())
        write_page(lines, self._config.run_folder / CURVES, f"Headrace, run {self._config.run.id}")
        return lines

    def _say_where_it_stopped(self) -> None:
        log.info(
            "stopped at version %d; the next start goes on from checkpoint %s and trains what came after it again",
            self._version, "of the initial model" if self._saved is None else self._saved,
        )  # fmt: skip

    async def _publish(self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]) -> None:
        self._tools.journal.append(kind, step, self._standing.timeline, metrics)
        self._tools.telemetry.nudge()
        self._tools.gauges.update(kind, step, metrics)
        await self._call(lambda: self._tools.replay.publish_metrics(kind, step, metrics))

    async def _wait(self) -> None:
        await self._call(lambda: self._tools.replay.wait_ready(GLANCE_S))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._tools.patience(call)
