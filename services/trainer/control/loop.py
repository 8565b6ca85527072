"""The trainer's loop on rank 0: look, decide, act, repeat.

`decisions.decide` decides what to do next; this module does it. All buffer calls are made from the event loop. All work with torch runs in
one thread beside it. A step whose batch a restart dropped is taken again under the same number.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

from headrace.base.errors import (
    EnvironmentBroken,
    Fenced,
    InvalidCall,
    ReplayUnavailable,
    SamplingStarved,
    ServiceError,
    WrongTimeline,
)
from headrace.config import Config
from headrace.records.origin import Origin
from headrace.records.trajectory import Float32, Group, Int32
from headrace.replay import End, Replica, Reservation, RunState, Waiting, frequent
from headrace.replay.base_client import BATCH
from headrace.run.headlines import accuracy_name, build_changes
from headrace.run.journal import surviving
from headrace_services.refit.probe import (
    Differences,
    choose_token_ids,
    differences,
    is_bounded_by_rounding,
    is_exact,
    probe_length,
    repeat_text,
    rollout_dtype,
    tolerance,
    unseen_window,
)
from headrace_services.trainer.control import decisions
from headrace_services.trainer.control.checkpoint import ENDED, FAILURES, TRAINED, CheckpointState
from headrace_services.trainer.control.checkpoint_writer import CheckpointWriter
from headrace_services.trainer.control.context import TrainerContext
from headrace_services.trainer.control.decisions import Action, Backoff, LoopState, Plan
from headrace_services.trainer.control.rank import Weights, check_reservation, shard_batch
from headrace_services.trainer.control.resume import ResumeState, lost_writes
from headrace_services.trainer.control.validation import Validation, reaches_target
from headrace_services.trainer.data import Problem
from headrace_services.trainer.learning.batch import BatchRejected
from headrace_services.trainer.telemetry import alarm
from headrace_services.trainer.telemetry.alarm import ReplicaDisagreement
from headrace_services.trainer.telemetry.metrics import (
    Extent,
    batch_metrics,
    episode_metrics,
    sampling_metrics,
    score_metrics,
)
from headrace_services.trainer.telemetry.plots import CURVES
from headrace_services.trainer.telemetry.throughput import StepTimes

log = logging.getLogger(__name__)

POLL_S = 0.5
# Rejected batches in a row that end the run.
MAX_REJECTIONS = 3

T = TypeVar("T")


class Loop:
    """One trainer's run, from where it resumed to its end."""

    def __init__(self, config: Config, context: TrainerContext, resumed: ResumeState) -> None:
        self._config = config
        self._context = context
        self._replay = context.replay
        self._clock = context.clock
        self._resumed = resumed
        self._timeline = resumed.timeline
        self._ledger = resumed.ledger
        self._writer = CheckpointWriter(context, resumed.timeline)
        self._plan = Plan.of(config, can_validate=context.prompts.can_validate)
        # the version of the weights, and what has been done with it
        self._version = resumed.version
        # the newest checkpoint, published or being written
        self._saved = resumed.version if resumed.version > 0 else None
        self._saved_in_time = False
        self._reply: Reservation | Waiting | End | None = None
        self._reward: float | None = None
        self._rejections = 0  # since the last step that was trained
        # the fleet
        self._refitted = False
        self._ever_verified = False  # some replica was, since this trainer started
        self._backoffs: dict[str, Backoff] = {}
        self._probe: tuple[Int32, Float32, Differences] | None = None  # and the tolerance
        # training prompts that have failed: at the last look (-1 before the first), and when the newest step's metrics were taken
        self._failed, self._failed_before = -1, 0
        self._alive: frozenset[str] = frozenset()  # replicas that took part at the last look
        # by replica, in a row: refits that it failed, and steps in which its log-probabilities stood apart
        self._failed_refits: dict[str, int] = {}
        self._outliers: dict[str, int] = {}
        # the running validation, when it began, and when the loop began to wait for it
        self._validation: Validation | None = None
        self._validating_since = 0.0
        self._awaited_since: float | None = None
        lines = surviving(context.journal.read())
        self._builds = {
            name: builds for line in lines for name, builds in line.builds.items()
        }  # the builds that scored last
        validations = [line for line in lines if line.kind == "validation"]
        self._validated = {line.step for line in validations}
        self._target_reached = any(self._reaches_target(line.metrics) for line in validations)
        # times, set when the first turn begins
        self._began = self._step_began = self._healthy_at = self._runner_at = context.began
        self._init_metrics: dict[str, float] = {}  # kept for the first step's metrics
        self._step_s = 0.0  # how long the last step took
        self._seconds: dict[Action, float] = defaultdict(float)  # spent in this step
        self._awaiting_scores = 0.0  # the part of it spent waiting for scores

    async def run(self) -> bool:
        """Train until the last step or the last prompt (returns True), or until a stop (returns False).

        Raises `ServiceError` when the run can't continue, and `ReplayUnavailable` if the buffer's server lost writes: a restart restores
        the buffer.
        """
        feeding: asyncio.Task[None] | None = None
        try:
            if self._resumed.refill:
                again = await self._context.feeder.refill(self._resumed.missing())
                log.info("%d prompts that were not trained on are queued again", again)
            self._failed_before = (await self._call(self._replay.state)).counts.get("failed", 0)
            feeding = asyncio.create_task(self._context.feeder.run(self._resumed.missing))
            self._began = self._step_began = self._healthy_at = self._runner_at = self._clock()
            self._init_metrics = {"efficiency/init/total_s": self._began - self._context.began}
            return await self._take_turns(feeding)
        except (Fenced, InvalidCall, ServiceError) as error:
            reserved = self._version + isinstance(self._reply, Reservation)
            state = await self._call(self._replay.state)
            if lost_writes(self._resumed, state, reserved):
                raise ReplayUnavailable(
                    f"the buffer's server lost writes ({error}); start this trainer again: it resumes from its last checkpoint and "
                    "restores the buffer"
                ) from error
            if not isinstance(error, Fenced) and state.timeline != self._timeline:
                # a read failed, because its data is gone, before any call that names the timeline
                raise WrongTimeline(f"timeline {state.timeline} has ended this trainer's: {error}") from error
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait([feeding])
            await self._writer.close()

    async def _take_turns(self, feeding: asyncio.Task[None]) -> bool:
        while True:
            if feeding.done():
                feeding.result()  # its error ends the run
            await self._writer.look()
            fleet = await self._call(self._replay.replicas)
            if self._validation is not None and await self._validation.poll():
                await self._report_validation(self._validation)
            run = await self._call(self._replay.state)
            counts = run.counts
            await self._note_failures(counts.get("failed", 0))
            decision = decisions.decide(self._plan, self._look(fleet, run))
            began = self._clock()
            match decision.action:
                case Action.STOP:
                    await self._writer.finish()
                    log.info(
                        "stopped at version %d; the next start continues from checkpoint %s%s",
                        self._version, "of the initial model" if self._saved is None else self._saved,
                        "" if self._version == (self._saved or 0) else " and trains what came after it again",
                    )  # fmt: skip
                    await self._context.telemetry.draw_end()
                    return False
                case Action.FAIL:
                    raise ServiceError(decision.reason)
                case Action.CONDEMN:
                    raise ServiceError(decision.reason + await self._reasons_of_failures())
                case Action.FINISH:
                    if isinstance(self._reply, End) and self._version < self._plan.last_version:
                        log.info("the prompts are used up after %d steps (max_num_epochs)", self._version)
                    await self._writer.finish()
                    await self._finish()
                    return True
                case Action.CHECKPOINT:
                    await self._checkpoint()
                case Action.REFIT:
                    await self._refit()
                case Action.VALIDATE:
                    await self._validate()
                case Action.ABANDON_VALIDATION:
                    assert self._validation is not None
                    log.warning(
                        "the validation of version %d is abandoned: %s", self._validation.version, decision.reason
                    )
                    await self._validation.abandon()
                    await self._report_validation(self._validation)
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
            took = self._clock() - began
            if decision.action is Action.TRAIN:  # `_train` ends the step when it takes its metrics
                self._healthy_at = self._runner_at = self._clock()
            else:
                self._seconds[decision.action] += took
            if decision.action in (Action.WAIT, Action.RESERVE):
                self._awaiting_scores += decisions.share_in_scoring(counts) * took

    def _look(self, fleet: Sequence[Replica], run: RunState) -> LoopState:
        now, running = self._clock(), self._validation
        self._alive = frozenset(replica.id for replica in decisions.alive(fleet))
        # during a validation of older weights, the replicas that hold those weights count
        held = self._version if self._refitted or running is None else running.version
        healthy = decisions.count_verified(fleet, held, self._timeline)
        if healthy or decisions.is_loading(fleet):
            self._healthy_at = now
        if run.alive_runners or not run.episodes:
            self._runner_at = now
        if self._refitted or not self._alive:
            self._context.readiness.problem = None if healthy else "no rollout replica holds verified weights"
        behind = decisions.behind(fleet, self._version, self._timeline)
        return LoopState(
            now=now,
            stop=self._context.stop.is_set(),
            version=self._version,
            saved=self._saved == self._version,
            refitted=self._refitted,
            validated=self._version in self._validated,
            validating=None if running is None else running.version,
            awaited_since=self._awaited_since,
            members=len(self._alive),
            healthy=healthy,
            healthy_at=self._healthy_at,
            refit_due=decisions.refit_due(behind, self._backoffs, now),
            reply=self._reply,
            target_reached=self._target_reached,
            quarantined=sum(replica.state == "QUARANTINED" for replica in fleet),
            must_save=not self._saved_in_time and self._plan.must_save_now(now - self._began, self._step_s),
            counts=run.counts,
            episodes=run.episodes,
            runners=run.alive_runners,
            runner_at=self._runner_at,
        )

    async def _reasons_of_failures(self) -> str:
        """Return the most frequent reasons of the newest training groups that failed, as the end of a sentence."""
        reasons = await self._call(self._replay.failures)
        return f". Of the newest {len(reasons)} failures: {'; '.join(frequent(reasons))}" if reasons else ""

    async def _note_failures(self, failed: int) -> None:
        """Record the number of training prompts that have failed, and show the reasons on the page."""
        if failed != self._failed:
            why = await self._reasons_of_failures()
            self._context.readiness.failures = f"{failed} prompts failed{why}" if failed else ""
        self._failed = failed

    def _failures_of_step(self) -> dict[str, float]:
        """Return the metrics of the prompts that failed since the step before."""
        new = max(0, self._failed - self._failed_before)  # retries lower the count
        self._failed_before = self._failed
        if new:
            log.warning(
                "step %d: %d prompts failed since the step before; in total, %s",
                self._version, new, self._context.readiness.failures,
            )  # fmt: skip
        return {"failed_prompts": float(new), "failed_prompts_total": float(self._failed)}

    # -- a step ----------------------------------------------------------------------------------------------------------

    async def _reserve(self) -> Reservation | Waiting | End:
        try:
            return await self._call(lambda: self._replay.reserve(self._version, self._timeline))
        except EnvironmentBroken as error:
            raise ServiceError(
                f"step {self._version}: {error}; fix the environment, and start the run again: it continues where it stopped"
            ) from error
        except SamplingStarved as error:
            algorithm = self._config.algorithm
            key = f"{algorithm.name}.dynamic_sampling_max_gen_batches"
            raise ServiceError(
                f"step {self._version}: {error}; raise {key} {algorithm.dynamic_sampling_max_gen_batches}, or use prompts and "
                "rewards with which a prompt's completions score differently"
            ) from error

    async def _train(self, reservation: Reservation) -> None:
        """Train step t on its batch. The weights of version t become version t + 1."""
        config, context, lead, step = self._config, self._context, self._context.lead, self._version
        began = self._clock()
        groups = await self._call(lambda: self._replay.read_groups(reservation.groups))
        check_reservation(reservation, groups, config.algorithm.num_prompts_per_step)
        shares = shard_batch(reservation, config, lead.ranks.size)
        multipliers = [group.loss_multiplier for group in groups]
        try:
            trained = await context.torch(lambda: lead.step(reservation, multipliers, shares))
        except BatchRejected as rejected:
            await self._reject(reservation, rejected)
            return
        self._rejections = 0
        origins, extents = trained.origins, [trajectory.extent for trajectory in trained.trajectories]
        if masked := int(trained.metrics["masked_tokens"]):
            await self._call(lambda: self._replay.masked(step, self._timeline, masked))
        self._ledger.record(step, reservation.groups, [group.order for group in groups])
        await asyncio.to_thread(context.lineage.write, step, groups, origins)
        await self._compare_replicas(step, trained.errors)
        metrics = {**trained.metrics, **batch_metrics(reservation, groups, extents, trained.truncated)}
        environment_of = {group.id: group.env_name for group in groups}
        environments = [environment_of[trajectory.group_id] for trajectory in reservation.trajectories]
        metrics |= score_metrics(environments, trained.trajectories)
        episodes = {name for name, env in config.env.items() if env.episodes}
        metrics |= episode_metrics(environments, extents, episodes)
        if config.algorithm.use_dynamic_sampling:
            metrics |= sampling_metrics(reservation, config.algorithm.generation_batch)
        batch = await context.torch(lead.gather_batch) if context.telemetry.wants_batch(metrics) else None
        metrics |= await context.telemetry.trained(step, groups, batch, metrics)
        metrics |= self._failures_of_step()
        metrics |= self._end_step(began, extents)
        self._reward = metrics["reward"]
        self._version = step + 1
        self._refitted, self._reply, self._probe, self._backoffs = False, None, None, {}
        context.feeder.wake()
        log.info(
            "step %d: reward %.3f, age %.1f, %.0f tokens/s, %.2f s",
            step, metrics["reward"], metrics["avg_trajectory_age"],
            metrics["performance/tokens_per_sec"], metrics["timing/train/total_step_time"],
        )  # fmt: skip
        builds = builds_of(groups, origins)
        for _, changed in build_changes([(step - 1, self._builds), (step, builds)]):
            log.info("%s", changed)
        self._builds |= builds
        await self._publish("train", step, metrics, builds)

    async def _reject(self, reservation: Reservation, rejected: BatchRejected) -> None:
        """Give the batch back. The groups that can't be trained on are generated again, and the step is reserved again.

        Raises `ServiceError` after `MAX_REJECTIONS` in a row: bad data alone does not explain that.
        """
        self._rejections += 1
        if self._rejections == MAX_REJECTIONS:
            raise ServiceError(
                f"{MAX_REJECTIONS} batches in a row could not be trained on: {rejected}. Look at these groups with `headrace groups show`: "
                "a replica, the buffer's server or the check itself may be at fault; then report it"
            ) from rejected
        log.error(
            "step %d is rejected: %s. Of its %d groups, %d are generated again",
            reservation.step, rejected, len(reservation.groups), len(rejected.groups),
        )  # fmt: skip
        nonce, attempts = secrets.token_hex(8), dict(zip(reservation.groups, reservation.attempts, strict=True))
        # any others are found again in the next batch
        named = {group: attempts[group] for group in list(rejected.groups)[:BATCH]}
        reason = rejected.groups[next(iter(named))]
        await self._call(lambda: self._replay.reject_step(reservation.step, self._timeline, nonce, named, reason))
        self._reply = None

    def _end_step(self, began: float, extents: Sequence[Extent]) -> dict[str, float]:
        """End the step whose training began at `began`, and begin the next. Return the metrics of the time since the last step."""
        now, lead = self._clock(), self._context.lead
        times = step_times(
            self._seconds, now - self._step_began, now - began, lead.learner.seconds, self._awaiting_scores
        )
        self._step_began, self._step_s = now, times.total
        self._seconds.clear()
        self._awaiting_scores = 0.0
        init_metrics, self._init_metrics = self._init_metrics, {}
        generating = len(self._alive) * self._config.policy.generation.vllm_cfg.tensor_parallel_size
        metrics = init_metrics | self._writer.take_metrics()
        return metrics | self._context.meter.metrics(
            times,
            [extent.paths for extent in extents],
            lead.learner.work,
            training_devices=lead.ranks.size,
            generating_devices=generating,
        )

    async def _checkpoint(self) -> None:
        """Take a snapshot for a checkpoint, once the previous checkpoint is published."""
        await self._writer.finish()
        context, retries = self._context, self._context.feeder.retries
        ended = await self._call(self._replay.ended)
        counters = context.lead.learner.counters
        state = CheckpointState(
            version=self._version,
            timeline=self._timeline,
            incarnation=self._resumed.incarnation,
            ancestors=self._resumed.ancestors,
            cursor=self._ledger.last + 1,
            failed=ended.failed,
            filtered=ended.filtered,
            retries=retries,
            consumed_samples=counters.consumed_samples,
            total_valid_tokens=counters.total_valid_tokens,
            run_id=self._config.run.id or "",
            prompts=context.prompts.counts.digest,
            metrics={} if self._reward is None else {"train:reward": self._reward},
        )
        keep = {self._validation.version} if self._validation else set()
        files = {TRAINED: self._ledger.encode(), ENDED: ended.bitmap, FAILURES: ended.failures}
        await self._writer.save(state, self._ledger.cut(), keep, files)
        self._saved = state.version
        self._saved_in_time |= self._plan.must_save_now(self._clock() - self._began, self._step_s)

    # -- the fleet -------------------------------------------------------------------------------------------------------

    async def _refit(self) -> None:
        context, lead = self._context, self._context.lead
        if self._probe is None:
            window, longest = lead.learner.policy.window, self._config.policy.max_total_sequence_length
            length = probe_length(longest, lead.learner.vocab_size, None if self._ever_verified else window)
            if not self._ever_verified and (unseen := unseen_window(longest, length, window)):
                log.warning("%s", unseen)
            if is_exact(self._config):
                ids = choose_token_ids(lead.learner.vocab_size, length)
            else:
                ids = repeat_text((tokens for _, tokens in context.prompts.encoded()), length)
            logprobs = await context.torch(lambda: lead.probe(ids.tolist()))
            rounded = None
            if is_bounded_by_rounding(self._config):
                rounded = await context.torch(lambda: lead.rounded_probe(ids.tolist()))
            accepted = tolerance(self._config, None if rounded is None else differences(logprobs, rounded))
            context.telemetry.agree(accepted)
            self._probe = ids, logprobs, accepted
        token_ids, logprobs, accepted = self._probe
        adapter = Weights(lead, adapter_alone=True) if self._config.policy.lora_cfg.adapter_alone else None
        report = await self._call(
            lambda: context.sender.refit(
                self._version,
                self._timeline,
                Weights(lead),
                token_ids,
                logprobs,
                adapter=adapter,
                tolerance=accepted,
            )
        )
        self._refitted = True
        failed = {replica: f"its refit failed: {report.refused[replica]}" for replica in report.failed}
        self._failed_refits = await self._judge(self._failed_refits, report.verified, failed)
        behind = decisions.behind(await self._call(self._replay.replicas), self._version, self._timeline)
        self._backoffs = decisions.next_backoffs(behind, self._backoffs, self._clock())
        log.info("version %d: %d of %d replicas verified", self._version, len(report.verified), len(report.members))
        for replica, reason in report.refused.items():
            log.warning("replica %s did not take version %d: %s", replica, self._version, reason)
        self._ever_verified |= bool(report.verified)
        if not self._version and not self._ever_verified:
            self._end_without_model(await self._call(self._replay.replicas), report.refused)

    def _end_without_model(self, fleet: Sequence[Replica], refused: Mapping[str, str]) -> None:
        """Raise `ServiceError` if the whole fleet has failed with the initial weights too often to be tried again: training has not begun,
        so it is the model that trainer and replicas do not share."""
        rollout = self._config.rollout
        if decisions.is_hopeless(fleet, self._failed_refits, rollout.replicas, rollout.quarantine_after):
            policy, model = self._config.policy, self._context.lead.learner.policy
            raise ServiceError(
                f"no replica can be verified with the initial weights: {'; '.join(frequent(list(refused.values())))}. Trainer and engine "
                f"compute {policy.model_name!r} differently, or the engine can't be given its weights. Compare what they compute: here "
                f"{policy.precision} (policy.precision), {model.attention} attention; there {rollout_dtype(self._config)} "
                "(policy.generation.vllm_cfg.precision), and what the replica's log says of the engine. Of the model's configuration, what "
                f"can make a difference begin {'; '.join(model.suspects) or 'nowhere'}; policy.hf_config_overrides changes both sides. If "
                "these agree, use a model of another family, or report this one (docs/architecture.md, The probe)"
            )

    async def _compare_replicas(self, step: int, errors: Mapping[str, ReplicaDisagreement]) -> None:
        """Report to the buffer how far the log-probabilities of each replica that takes part are from the trainer's. Quarantine replicas
        that stand apart repeatedly."""
        errors = {replica: error for replica, error in errors.items() if replica in self._alive}
        means = {replica: of.error for replica, of in errors.items()}
        await self._call(lambda: self._replay.disagreements(step, self._timeline, means))
        outliers = alarm.outliers(errors, self._config.logger.train_inference_alarm.token_mult_prob_error)
        what = {
            replica: f"its log-probabilities stand apart: in step {step} token_mult_prob_error is {errors[replica].error:.4g} on its "
            f"tokens, at a mean age of {errors[replica].age:.1f}"
            for replica in outliers
        }
        for replica in outliers - self._outliers.keys():
            log.warning("replica %s: %s", replica, what[replica])
        well = errors.keys() - outliers if len(errors) > 1 else ()  # a single replica has no others to stand apart from
        self._outliers = await self._judge(self._outliers, well, what)

    async def _judge(self, streaks: Mapping[str, int], well: Iterable[str], ill: Mapping[str, str]) -> dict[str, int]:
        """Count how many times in a row each replica failed, and quarantine those that failed `rollout.quarantine_after` times. `ill` says
        what went wrong now, by replica; the replicas in `well` were fine. Returns the counts of the replicas that still take part."""
        most, counts = self._config.rollout.quarantine_after, decisions.next_streaks(streaks, well, ill)
        quarantined = set()
        for replica, what in ill.items():
            reason = f"{what}; {counts[replica]} times in a row"
            if most is None or counts[replica] < most:
                continue
            if await self._call(partial(self._replay.quarantine, replica, self._timeline, reason)):
                quarantined.add(replica)
                log.error("replica %s is quarantined: %s. Fix the cause, and restart the replica", replica, reason)
        return {id_: times for id_, times in counts.items() if id_ in self._alive - quarantined}

    # -- validation ------------------------------------------------------------------------------------------------------

    async def _validate(self) -> None:
        groups = await asyncio.to_thread(self._context.prompts.validation, self._version)
        validation = Validation(self._replay, self._context.retry, self._timeline, self._version)
        await validation.start(groups)
        self._validation, self._validating_since, self._awaited_since = validation, self._clock(), None
        self._validated.add(self._version)

    async def _report_validation(self, validation: Validation) -> None:
        self._validation, self._awaited_since = None, None
        version, took = validation.version, self._clock() - self._validating_since
        metrics = {**validation.metrics(), "timing/validation/total_validation_time": took}
        for reason, times in validation.failures().items():
            log.warning("validation of version %d: %d groups failed: %s", version, times, reason)
        log.info(
            "version %d: %s %s on %d held-out prompts, %d failed, %d pending",
            version, accuracy_name(metrics), f"{metrics['accuracy']:.3f}" if "accuracy" in metrics else "unknown",
            metrics["evaluated"], metrics["failed"], metrics["pending"],
        )  # fmt: skip
        failed: list[tuple[str, Group | Problem, str]] = [*validation.failed, *self._context.prompts.left_out]
        await self._context.telemetry.validated(version, validation.evaluated, failed)
        await self._publish("validation", version, metrics)
        if self._reaches_target(metrics):
            self._target_reached = True
            algorithm = self._config.algorithm
            metric, threshold = algorithm.stop_at_validation_metric, algorithm.stop_at_validation_threshold
            log.info("the run ends: %s is at least %g", metric, threshold)
        named = {f"val:{name}": value for name, value in metrics.items()}
        self._writer.add_metrics(version, named)

    def _reaches_target(self, metrics: Mapping[str, float]) -> bool:
        algorithm = self._config.algorithm
        return reaches_target(metrics, algorithm.stop_at_validation_metric, algorithm.stop_at_validation_threshold)

    # -- metrics and curves ----------------------------------------------------------------------------------------------

    async def _publish(
        self,
        kind: Literal["train", "validation"],
        step: int,
        metrics: Mapping[str, float],
        builds: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._context.journal.append(kind, step, self._timeline, metrics, builds=builds)
        self._context.telemetry.notify()
        self._context.gauges.update(kind, step, metrics)
        await self._call(lambda: self._replay.publish_metrics(kind, step, metrics, self._timeline))

    async def _finish(self) -> None:
        await self._context.telemetry.draw_end()
        log.info("the run is complete: version %d, curves in %s", self._version, self._config.run_folder / CURVES)

    async def _wait(self) -> None:
        await self._call(lambda: self._context.sender.end_stray_epoch(self._timeline))
        await self._call(lambda: self._replay.wait_ready(POLL_S))

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._context.retry(call)


def builds_of(groups: Sequence[Group], origins: Mapping[str, Sequence[Origin]]) -> dict[str, list[str]]:
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
        refit_bubble=over(Action.REFIT),
        validation=over(Action.AWAIT_VALIDATION, Action.VALIDATE, Action.ABANDON_VALIDATION),
        checkpoint=over(Action.CHECKPOINT),
        awaiting_scores=awaiting_scores,
    )
