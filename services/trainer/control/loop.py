"""The trainer's loop on rank 0: look, decide, act, repeat.

`decisions.decide` decides what to do next; this module does it. All buffer calls are made from the event loop. All work with torch runs in
one thread beside it. A step whose batch a restart dropped is taken again under the same number.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from headrace.base.errors import (
    EnvironmentBroken,
    Fenced,
    InvalidCall,
    Restartable,
    SamplingStarved,
    ServiceError,
    StoppedByAlarm,
    WrongTimeline,
)
from headrace.config import Config
from headrace.net import tracing
from headrace.replay import End, Replica, Reservation, RunState, Waiting
from headrace.replay.base_client import BATCH
from headrace.run.history import CURVES
from headrace.run.journal import surviving

from ..learning.batch import BatchRejected
from . import decisions
from .checkpoint import ENDED, FAILURES, TRAINED, CheckpointState
from .checkpoint_writer import CheckpointWriter
from .context import TrainerContext
from .decisions import Action, LoopState, Plan
from .fleet import Fleet
from .rank import Weights, check_reservation, shard_batch
from .recorder import Recorder, collect_builds
from .resume import ResumeState, has_lost_writes
from .validation import Validations

log = logging.getLogger(__name__)

POLL_S = 0.5
# Rejected batches in a row that end the run.
MAX_REJECTIONS = 3


class Loop:
    """One trainer's run, from where it resumed to its end."""

    def __init__(self, config: Config, context: TrainerContext, resumed: ResumeState) -> None:
        self._config = config
        self._context = context
        self._replay, self._retry = context.replay, context.retry
        self._clock = context.clock
        self._resumed = resumed
        self._timeline = resumed.timeline
        self._ledger = resumed.ledger
        self._writer = CheckpointWriter(context, resumed.timeline)
        self._uploads, self._offers = context.uploads, context.offers
        self._plan = Plan.of(config, can_validate=context.prompts.can_validate)
        lines = surviving(context.journal.read())
        self._fleet = Fleet(config, context, resumed.timeline)
        self._recorder = Recorder(config, context, resumed.timeline, lines)
        self._validations = Validations(config, context, resumed.timeline, self._recorder, self._writer, lines)
        self._version = resumed.version  # of the weights
        # the newest checkpoint, published or being written
        self._saved = resumed.version if resumed.version > 0 else None
        self._saved_in_time = False
        self._snapped = 0  # of the newest snapshot in memory
        self._reply: Reservation | Waiting | End | None = None
        self._reward: float | None = None
        self._rejections = 0  # since the last step that was trained
        self._runner_at = context.began
        self._step_began_ns = time.time_ns()

    async def run(self) -> bool:
        """Train until the last step or the last prompt (returns True), or until a stop (returns False).

        Raises `ServiceError` when the run can't continue, and `Restartable` if the buffer's server lost writes: a restart restores
        the buffer.
        """
        feeding: asyncio.Task[None] | None = None
        try:
            if self._resumed.refill:
                again = await self._context.feeder.refill(self._resumed.missing())
                log.info("%d prompts that were not trained on are queued again", again)
            failed = (await self._retry(self._replay.state)).counts.get("failed", 0)
            feeding = asyncio.create_task(self._context.feeder.run(self._resumed.missing))
            self._context.history.start()
            self._recorder.begin(failed)
            lost = self._resumed.last_validation
            if lost is not None and not self._validations.has_begun(lost):
                await self._validations.lose(lost, "the trainer was gone before it was complete")
            self._fleet.healthy_at = self._runner_at = self._clock()
            return await self._take_turns(feeding)
        except (Fenced, InvalidCall, ServiceError) as error:
            reserved = self._version + isinstance(self._reply, Reservation)
            state = await self._retry(self._replay.state)
            if has_lost_writes(self._resumed, state, reserved):
                if isinstance(error, Restartable):
                    raise  # the writer of checkpoints found it, and said so
                raise Restartable(
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
            await self._context.history.close()

    async def _take_turns(self, feeding: asyncio.Task[None]) -> bool:
        while True:
            if feeding.done():
                feeding.result()  # its error ends the run
            self._context.history.poll()
            await self._writer.poll()
            if self._uploads is not None:
                self._uploads.poll()
            if self._offers is not None:
                self._offers.poll()
            replicas = await self._retry(self._replay.replicas)
            if await self._validations.poll(replicas):  # it has ended: who validated it gets the newest weights
                replicas = await self._retry(self._replay.replicas)
            run = await self._retry(self._replay.state)
            await self._recorder.note_failures(run.counts.get("failed", 0))
            state = self._look(replicas, run)
            decision = decisions.decide(self._plan, state)
            self._context.now.waits = decisions.waits_for(decision, state)
            began = self._clock()
            match decision.action:
                case Action.STOP:
                    running = self._validations.running
                    if (
                        running is not None and running.version < self._version
                    ):  # else the next start validates it again
                        await self._validations.abandon("the run stops")
                    await self._writer.finish()
                    await self._finish_uploads()
                    log.info(
                        "stopped at version %d; the next start continues from checkpoint %s%s",
                        self._version, "of the initial model" if self._saved is None else self._saved,
                        "" if self._version == (self._saved or 0) else " and trains what came after it again",
                    )  # fmt: skip
                    if alarm := self._recorder.stopped_by:
                        raise StoppedByAlarm(
                            f"{alarm} (run.stop_on). {self._recorder.describe_way_back()}; without this alarm in run.stop_on, "
                            "the run continues from here"
                        )
                    await self._context.telemetry.draw_end()
                    return False
                case Action.FAIL:
                    raise ServiceError(decision.reason)
                case Action.CONDEMN:
                    raise ServiceError(decision.reason + await self._recorder.describe_failures())
                case Action.FINISH:
                    if isinstance(self._reply, End) and self._version < self._plan.last_version:
                        log.info("the prompts are used up after %d steps (max_num_epochs)", self._version)
                    await self._writer.finish()
                    await self._finish_uploads()
                    await self._context.telemetry.draw_end()
                    curves = self._config.run_folder / CURVES
                    log.info("the run is complete: version %d, curves in %s", self._version, curves)
                    return True
                case Action.CHECKPOINT:
                    with self._make_span("checkpoint"):
                        await self._checkpoint()
                case Action.SNAPSHOT:
                    with self._make_span("snapshot"):
                        await self._writer.save_in_memory(*await self._describe(), dict(self._ledger.steps))
                    self._snapped = self._version
                case Action.REFIT:
                    with self._make_span("refit"):
                        await self._fleet.refit(self._version)
                case Action.OFFER:
                    with self._make_span("offer"):
                        await self._offer()
                case Action.VALIDATE:
                    is_last = decisions.is_final(self._plan, state)
                    await self._validations.start(self._version, [] if is_last else replicas)
                case Action.SKIP_VALIDATION:
                    await self._validations.skip(self._version)
                case Action.ABANDON_VALIDATION:
                    await self._validations.abandon(decision.reason)
                case Action.AWAIT_VALIDATION:
                    if self._validations.awaited_since is None:
                        self._validations.awaited_since = began
                    await self._wait()
                case Action.RESERVE:
                    self._reply = await self._reserve()
                case Action.TRAIN:
                    assert isinstance(self._reply, Reservation)
                    await self._train_in_span(self._reply)
                case Action.WAIT:
                    await self._wait()
                    self._reply = None
            if decision.action is Action.TRAIN:  # `_train` ends the step when it takes its metrics
                self._fleet.healthy_at = self._runner_at = self._clock()
            else:
                self._recorder.spend(decision.action, self._clock() - began, run.counts)

    def _look(self, replicas: Sequence[Replica], run: RunState) -> LoopState:
        now, running = self._clock(), self._validations.running
        validators = self._validations.count_validators(replicas)
        held = self._version
        if running is not None and validators is None and not self._fleet.refitted:
            held = running.version  # while older weights are validated, the replicas that hold those count
        healthy = self._fleet.look(replicas, held)
        if running is not None and running.version == self._version:
            healthy -= validators or 0  # they don't train
        if run.alive_runners or not run.episodes:
            self._runner_at = now
        return LoopState(
            now=now,
            stop=self._context.stop.is_set() or self._recorder.stopped_by != "",
            version=self._version,
            saved=self._saved == self._version,
            refitted=self._fleet.refitted,
            validated=self._validations.has_begun(self._version),
            validating=None if running is None else running.version,
            awaited_since=self._validations.awaited_since,
            validators=validators,
            members=len(self._fleet.alive),
            healthy=healthy,
            healthy_at=self._fleet.healthy_at,
            refit_due=self._fleet.refit_due(replicas, self._version),
            reply=self._reply,
            target_reached=self._validations.target_reached,
            quarantined=sum(replica.state == "QUARANTINED" for replica in replicas),
            offer_due=self._offers is not None and self._offers.is_due(replicas, self._version),
            must_save=not self._saved_in_time and self._must_save(now),
            snapshot_due=self._context.snapshots is not None
            and self._version not in (0, self._saved, self._snapped)
            and self._writer.idle,
            counts=run.counts,
            episodes=run.episodes,
            runners=run.alive_runners,
            runner_at=self._runner_at,
        )

    def _must_save(self, now: float) -> bool:
        return self._plan.must_save_now(now - self._recorder.began, self._recorder.step_s)

    # -- a step ----------------------------------------------------------------------------------------------------------

    async def _reserve(self) -> Reservation | Waiting | End:
        try:
            return await self._retry(lambda: self._replay.reserve(self._version, self._timeline))
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

    async def _train_in_span(self, reservation: Reservation) -> None:
        """Train a step, in a span that is linked to its groups. With it ends the span of the whole step, which began with the last one's
        end: its refit and the wait for its batch belong to it."""
        step, run = self._version, self._replay.run_id
        with self._make_span("train", [tracing.group_span(run, group) for group in reservation.groups]):
            await self._train(reservation)
        if self._version > step:
            ended_ns = time.time_ns()
            at = tracing.step_span(run, self._timeline, step)
            attributes = tracing.named(step=step, timeline=self._timeline)
            tracing.emit(tracing.EndedSpan("step", at, None, self._step_began_ns, ended_ns, attributes))
            self._step_began_ns = ended_ns

    def _make_span(self, name: str, links: Sequence[tracing.SpanContext] = ()) -> tracing.Span:
        """Return a span of the step that makes the next version."""
        step = tracing.step_span(self._replay.run_id, self._timeline, self._version)
        attributes = tracing.named(step=self._version, timeline=self._timeline)
        return tracing.span(name, step, links=links, attributes=attributes)

    async def _train(self, reservation: Reservation) -> None:
        """Train step t on its batch. The weights of version t become version t + 1."""
        config, context, lead, step = self._config, self._context, self._context.lead, self._version
        began = self._clock()
        groups = await self._retry(lambda: self._replay.read_groups(reservation.groups))
        check_reservation(reservation, groups, config.algorithm.num_prompts_per_step)
        shares = shard_batch(reservation, config, lead.ranks.size)
        multipliers = [group.loss_multiplier for group in groups]
        try:
            trained = await context.torch(lambda: lead.step(reservation, multipliers, shares))
        except BatchRejected as rejected:
            await self._reject(reservation, rejected)
            return
        self._rejections = 0
        origins = trained.origins
        if masked := int(trained.metrics["masked_tokens"]):
            await self._retry(lambda: self._replay.record_masked(step, self._timeline, masked))
        self._ledger.record(step, reservation.groups, [group.order for group in groups])
        await asyncio.to_thread(context.lineage.write, step, groups, origins)
        await self._fleet.compare(step, trained.errors)
        metrics = await self._recorder.measure(reservation, groups, trained, began, len(self._fleet.alive))
        metrics |= self._writer.take_metrics()
        if self._uploads is not None:
            metrics |= self._uploads.take_metrics()
        if self._offers is not None:
            metrics |= self._offers.take_metrics()
        self._reward = metrics["reward"]
        self._version, self._reply = step + 1, None
        self._fleet.outdate()
        context.feeder.wake()
        log.info(
            "step %d: reward %.3f, age %.1f, %.0f tokens/s, %.2f s",
            step, metrics["reward"], metrics["avg_trajectory_age"],
            metrics["performance/tokens_per_sec"], metrics["timing/train/total_step_time"],
        )  # fmt: skip
        tracing.current().set(
            tracing.named(
                reward=metrics["reward"],
                age=metrics["avg_trajectory_age"],
                groups=len(groups),
                trajectories=len(reservation.trajectories),
                optimizer_seconds=metrics.get("timing/train/policy_training"),
            )
        )
        builds = collect_builds(groups, origins)
        self._recorder.note_builds(step, builds)
        await self._recorder.publish("train", step, metrics, builds)

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
        await self._retry(lambda: self._replay.reject_step(reservation.step, self._timeline, nonce, named, reason))
        self._reply = None

    async def _offer(self) -> None:
        """Begin to send the weights to the store, for replicas that pull them."""
        assert self._offers is not None
        context = self._context
        source = Weights(context.lead)
        manifest = context.sender.manifest(source)
        await self._offers.offer(self._version, source, manifest, await self._fleet.probe(), context.torch)

    async def _checkpoint(self) -> None:
        """Take a snapshot for a checkpoint, once the previous checkpoint is published."""
        await self._writer.finish()
        state, files = await self._describe()
        keep = {self._validations.running.version} if self._validations.running else set()
        await self._writer.save(state, self._ledger.cut(), keep, files)
        self._saved = state.version
        self._saved_in_time |= self._must_save(self._clock())

    async def _describe(self) -> tuple[CheckpointState, dict[str, bytes]]:
        """Return the state of the run, and the files that belong to it."""
        context, retries = self._context, self._context.feeder.retries
        ended = await self._retry(self._replay.read_ended)
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
        return state, {TRAINED: self._ledger.encode(), ENDED: ended.bitmap, FAILURES: ended.failures}

    async def _finish_uploads(self) -> None:
        """Wait until the store has the newest checkpoint. Raises `ServiceError` if it does not get there: the run's machine may be gone
        soon."""
        if self._uploads is not None:
            self._context.now.waits = f"the upload of checkpoint {self._saved} to {self._config.checkpointing.store}"
            await self._uploads.finish()

    async def _wait(self) -> None:
        await self._retry(lambda: self._context.sender.end_stray_epoch(self._timeline))
        await self._retry(lambda: self._replay.wait_ready(POLL_S))
