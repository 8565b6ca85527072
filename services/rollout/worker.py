"""The replica's loop: heartbeat, decide, act. `decisions` decides; this module acts.

One task calls the buffer. Generations, refits and the calls of episodes (which arrive over the HTTP API) run in other tasks, and wake it
when they end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.base.errors import Fenced, HeadraceError, InvalidCall, ReplayUnavailable, Restartable, Surplus
from headrace.base.tasks import cancel
from headrace.config import Config
from headrace.net import tracing
from headrace.net.replica_client import RenderRefused, ReplicaFenced, Sampled, SampleRequest
from headrace.records.trajectory import Trajectory
from headrace.replay import BufferRetry, Epoch, HeartbeatReply, Lease, ReplayClient, ReplicaState
from headrace.replay.leases import leave, take_turn, wait_for_work

from ..refit.receiver import WeightReceiver
from . import decisions
from .calls import check_request, complete
from .decisions import (
    Abort,
    Acknowledge,
    Action,
    EndCalls,
    LeaseGroups,
    Rejoin,
    TakePart,
    WorkerState,
)
from .generate import (
    GenerationError,
    RequestAborted,
    Saver,
    generate,
    prompt_problem,
    request_id,
    sampled_tokens,
)
from .progress import Progress
from .pulling import Puller
from .sequence_slots import SequenceSlots

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

# How long a leaving replica may take to save unfinished trajectories: well within the grace period of a stopped process.
_PARTING_S = 5.0
# How a call without an answer is counted, by its error; any other has failed.
_UNANSWERED = {asyncio.CancelledError: "abandoned", ReplicaFenced: "fenced", RenderRefused: "refused"}
_NOT_VERIFIED = "the weights that it sampled from are not verified; retry, or call another replica"


class _GroupReleased(HeadraceError):
    """Raised when a trajectory that the group needs could not be generated, so that the buffer has taken the group back."""


@dataclasses.dataclass
class ReplicaStatus:
    """The state shown by the HTTP pages and the metrics. `version` and `timeline` belong to the last verified weights; they start as -1
    and ""."""

    state: ReplicaState = "STALE"
    version: int = -1
    timeline: str = ""
    unreachable: str | None = None
    refused: str | None = None
    quarantined: str | None = None
    torn: str | None = None  # why the engine is paused without complete, verified weights
    tokens: int = 0
    trajectories: int = 0
    saves: int = 0
    tokens_taken_over: int = 0
    call_tokens: int = 0
    call_prompt_tokens: int = 0
    call_cached_tokens: int = 0
    groups: Counter[str] = dataclasses.field(default_factory=Counter)
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    refits: Counter[str] = dataclasses.field(default_factory=Counter)

    def problem(self) -> str | None:
        """Return why the replica does not generate, or None if it does."""
        if self.unreachable is not None:
            return f"the buffer is unreachable: {self.unreachable}"
        if self.state == "HEALTHY":
            return None
        if self.quarantined is not None:
            return f"quarantined, because {self.quarantined}; fix the cause, then restart this replica"
        if self.refused is not None:
            return f"the last refit failed: {self.refused}"
        return f"{self.state}: waiting for the trainer to send weights"


class RolloutWorker:
    """One replica. Only the event loop that runs `run` may use `engine`."""

    def __init__(
        self,
        config: Config,
        engine: AsyncLLM,
        replay: ReplayClient,
        info: Mapping[str, Any],
        puller: Puller | None = None,
    ) -> None:
        self.status = ReplicaStatus()
        self.replica = _new_id()
        self.receiver = WeightReceiver(config, engine, replay, self.replica)
        self.slots = SequenceSlots.of(engine)
        self._config = config
        self._engine = engine
        self._replay = replay
        self._info = info
        self._puller = puller
        self._must_rejoin = False  # the weights that it pulled were not verified
        # retries until the buffer answers, which is `LeaseLost` if the lease has expired by then
        pause_s = config.rollout.heartbeat_s
        self._retry = BufferRetry(first_pause_s=pause_s, last_pause_s=pause_s, log_level=logging.DEBUG)
        self._progress = Progress()
        self._context = config.policy.max_total_sequence_length
        self._groups: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._calls: dict[asyncio.Task[Sampled], str] = {}  # the timeline on which each call goes on
        self._reply: HeartbeatReply | None = None  # the reply to the newest heartbeat
        self._refit: asyncio.Task[None] | None = None
        self._answered: str | None = None
        self._attempted: str | None = None
        self._changed = asyncio.Event()
        # cleared while the engine may compute with unverified weights: nothing is pushed then
        self._verified = asyncio.Event()
        self._verified.set()
        self._leaving = False

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self._groups)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop`, then save unfinished trajectories, return every lease without charging an attempt, and leave the fleet.

        Waits while the buffer is unreachable. Raises vLLM's `EngineDeadError`, and `Restartable` if the engine hangs.
        """
        await self._register()
        died = False
        watchdog = asyncio.create_task(self._watch_engine())
        watchdog.add_done_callback(lambda _: self._changed.set())
        try:
            while not stop.is_set():
                if watchdog.done():
                    watchdog.result()
                await take_turn(self._turn(), stop)
                await self._wait(stop)
        except Exception:
            died = True
            raise
        finally:
            await cancel([watchdog])
            await self._leave(died)

    async def _register(self) -> None:
        enter = self._replay.register if self._puller is None else self._replay.register_puller
        await enter(self.replica, self._info)

    async def _watch_engine(self) -> None:
        """Poll the engine for its weight version, which it answers between two steps of the model, whatever it is doing.

        Raises `Restartable` once it has been silent for `rollout.engine_timeout_s`. Silence during a refit does not count: a refit blocks
        the engine, but has its own deadlines.
        """
        limit = self._config.rollout.engine_timeout_s
        while True:
            refits = self.status.refits.total(), self._refit
            try:
                async with asyncio.timeout(limit):
                    await self._engine.get_weight_version()
            except TimeoutError as error:
                if refits == (self.status.refits.total(), None):
                    raise Restartable(
                        f"the engine has not answered for {limit:.0f} s (rollout.engine_timeout_s) while generating {len(self.held)} groups"
                    ) from error
            await asyncio.sleep(limit / 4)

    # -- one turn --------------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        self._changed.clear()
        self._reap()
        try:
            if self._must_rejoin:
                await self._act(Rejoin())
                self._must_rejoin = False
            progress = self._progress.count((lease for lease, _ in self._groups.values()), self._sampled)
            reply = await self._replay.heartbeat(self.replica, [*progress], [*progress.values()])
            if self._puller is not None:
                epoch = await self._puller.look(self.replica, self.receiver.weights)
                reply = msgspec.structs.replace(reply, epoch=epoch)
            self._note(reply)
            self._reply = reply
            weights = self.receiver.weights
            self._calls = {
                call: decisions.timeline_of_call(timeline, weights, reply) for call, timeline in self._calls.items()
            }
            for action in decisions.decide(self._state(reply)):
                await self._act(action)
        except ReplayUnavailable as error:
            if self.status.unreachable is None:
                log.warning("the buffer is unreachable, generation continues: %s", error)
            self.status.unreachable = str(error)
        except Fenced as refusal:
            # the state changed between the heartbeat and the action: the next turn sees the new one
            log.info("refused: %s", refusal)

    def _sampled(self, lease: Lease, index: int) -> int:
        return sampled_tokens(self._engine, request_id(lease, index))

    async def _wait(self, stop: asyncio.Event) -> None:
        """Wait for at most one heartbeat period, or until there may be something to do."""
        await wait_for_work(self._replay, self._config.rollout.heartbeat_s, (self._changed, stop))

    def _state(self, reply: HeartbeatReply) -> WorkerState:
        return WorkerState(
            replica=self.replica,
            reply=reply,
            held=self.held,
            calls=frozenset(self._calls.values()),
            weights=self.receiver.weights,
            answered=self._answered,
            attempted=self._attempted,
            refitting=self._refit is not None,
            torn=self.status.torn is not None,
            in_flight_updates=self._config.algorithm.asynchrony.in_flight_weight_updates,
            max_groups=self._config.rollout.max_concurrent_groups,
            pulls=self._puller is not None,
        )

    def _note(self, reply: HeartbeatReply) -> None:
        self.status.unreachable = None
        if reply.state != self.status.state:
            log.info("replica %s is %s", self.replica, reply.state)
        self.status.state = reply.state
        quarantined, self.status.quarantined = self.status.quarantined, reply.reason or None
        if reply.reason and quarantined is None:
            log.error("replica %s is %s", self.replica, self.status.problem())
        epoch = reply.epoch
        if epoch is not None and self.replica in epoch.verified:
            self.status.version, self.status.timeline = epoch.version, epoch.timeline
        if self._puller is not None:
            self.status.refused = self._puller.problem
        else:
            self.status.refused = epoch.refused.get(self.replica) if epoch is not None else None

    async def _act(self, action: Action) -> None:
        match action:
            case Abort(tokens, complete):
                # a group whose own call has been refused in the meantime has ended and was counted
                running = {token for token in tokens if not self._groups[token][1].done()}
                if lost := len(running - complete):
                    log.info("%d leases are lost", lost)
                self.status.groups["lost"] += lost
                self.status.groups["complete"] += len(running & complete)
                await self._stop_generating(tokens)
            case EndCalls(timelines):
                await self._end_calls(timelines)
            case Rejoin():
                old, self.replica = self.replica, _new_id()
                self.receiver = WeightReceiver(self._config, self._engine, self._replay, self.replica)
                log.warning("%s re-enters the fleet as %s", old, self.replica)
                self._attempted = None  # what is pulled has the same name for every replica
                await self._replay.deregister(old)
                await self._register()
            case Acknowledge(epoch):
                await self.receiver.acknowledge(epoch)
                self._answered = epoch.id
            case TakePart(epoch):
                self._attempted = epoch.id
                self._verified.clear()
                self._refit = asyncio.create_task(self._take_part(epoch))
            case LeaseGroups(count):
                for lease in await self._replay.lease(self.replica, count):
                    if (lease.timeline, lease.version) != self.receiver.weights:
                        self._rejoin_after_lost_writes(
                            f"the fleet records version {lease.version} of timeline {lease.timeline} for this replica"
                        )
                        return
                    self._groups[lease.token] = (lease, asyncio.create_task(self._generate_group(lease)))

    def _rejoin_after_lost_writes(self, reason: str) -> None:
        """Handle a buffer whose record of this replica's weights is wrong, because its server lost writes (a failover, a power cut).

        No trajectory from these weights could be pushed. The next turn re-enters the fleet, which passes the leases on without charging any
        group an attempt.
        """
        self.status.torn = f"{reason}, which holds {self.receiver.weights}: the buffer lost writes"
        log.warning("replica %s: %s", self.replica, self.status.torn)
        self._changed.set()

    def _reap(self) -> None:
        """Remove finished tasks. Raises the error of a task that failed fatally."""
        for token, (_, task) in list(self._groups.items()):
            if task.done():
                del self._groups[token]
                task.result()
        if self._refit is not None and self._refit.done():
            refit, self._refit = self._refit, None
            refit.result()
        if self._engine.errored:
            raise self._engine.dead_error

    # -- a refit ---------------------------------------------------------------------------------------------------------

    async def _take_part(self, epoch: Epoch) -> None:
        verified = False
        run, timeline, version = self._replay.run_id, epoch.timeline, epoch.version
        span = tracing.span(
            "receive_weights",
            tracing.epoch_span(run, timeline, version, epoch.id),
            attributes=tracing.named(replica_id=self.replica, version=version, timeline=timeline),
        )
        try:
            with span:
                verified = await self.receiver.take_part(epoch)
                span.set(tracing.named(verified=verified))
        except ReplayUnavailable as error:
            log.warning("the buffer became unreachable during the refit to version %d: %s", epoch.version, error)
        finally:
            self._changed.set()
        self.status.refits["verified" if verified else "failed"] += 1
        if verified:
            self.status.version, self.status.timeline, self.status.torn = epoch.version, epoch.timeline, None
            if self._puller is not None:
                self._puller.succeed()
        else:
            self.status.torn = f"the refit to version {epoch.version} was not verified"
            await self._end_calls(set(self._calls.values()))
            await self._give_back(self.status.torn)
            if self._puller is not None:
                self._puller.fail(self.status.torn)
                self._must_rejoin = True
        self._verified.set()

    async def _give_back(self, reason: str) -> None:
        """Abort all generations and release their leases, because some tokens may come from unverified weights."""
        leases = [lease for lease, _ in self._groups.values()]
        await self._stop_generating(self.held)
        for lease in leases:
            with contextlib.suppress(Fenced):
                await self._retry(partial(self._replay.release, lease, reason, failed=False))
        self.status.groups["returned"] += len(leases)

    # -- generating ------------------------------------------------------------------------------------------------------

    async def _generate_group(self, lease: Lease) -> None:
        outcome = "complete"
        try:
            if problem := prompt_problem(lease.group, self._context):
                outcome = "rejected"
                await self._retry(partial(self._replay.reject, lease, problem))
            else:
                async with asyncio.TaskGroup() as trajectories:
                    for index in lease.missing:
                        trajectories.create_task(self._generate_one(lease, index))
                if self._leaving:
                    outcome = "returned"
        except Fenced as refusal:
            outcome = "lost"
            log.info("group %s: %s", lease.group.id, refusal)
        except ExceptionGroup as errors:
            outcome = await self._hand_back(lease, errors.exceptions[0])
        finally:
            self._changed.set()
        self.status.groups[outcome] += 1

    async def _hand_back(self, lease: Lease, cause: Exception) -> str:
        """Release the group with `cause` as the reason, and return the outcome. Raises a fatal cause."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(cause, EngineDeadError):
            raise cause
        if isinstance(cause, Surplus):
            return "complete"
        if isinstance(cause, _GroupReleased):
            return "failed"
        if isinstance(cause, Fenced):
            log.info("group %s: %s", lease.group.id, cause)
            return "lost"
        if isinstance(cause, InvalidCall) and await self._is_ahead():
            self._rejoin_after_lost_writes(str(cause))
            return "returned"
        log.error("group %s: no trajectory", lease.group.id, exc_info=cause)
        reason = f"{type(cause).__name__}: {cause}"
        # no replica can generate a request that vLLM refuses outright (a token outside the vocabulary, …)
        refused = isinstance(cause, VLLMClientError)
        with contextlib.suppress(Fenced):
            if refused:
                await self._retry(partial(self._replay.reject, lease, reason))
            else:
                await self._retry(partial(self._replay.release, lease, reason, failed=True))
        return "rejected" if refused else "failed"

    async def _is_ahead(self) -> bool:
        """Return whether this replica's weights are newer than any step that the buffer knows."""
        weights = self.receiver.weights
        return weights is not None and weights[1] > (await self._retry(self._replay.state)).next_step

    async def _generate_one(self, lease: Lease, index: int) -> None:
        saver = Saver(self._config.rollout.save_partial_tokens, partial(self._save, lease))
        try:
            async with self.slots.take():
                if self._leaving:
                    return
                # the salt of the weights that the engine has now: this may have waited across a refit
                salt = self.receiver.cache_salt
                with self._traced(lease, index):
                    trajectory = await generate(self._engine, lease, index, self.replica, saver, salt)
        except GenerationError as error:
            if self._leaving and isinstance(error, RequestAborted):
                return
            log.warning("group %s: %s", lease.group.id, error)
            if not await self._retry(partial(self._replay.abandon, lease, index, str(error))):
                raise _GroupReleased from error
            return
        await self._verified.wait()
        await self._retry(partial(self._replay.push, lease, trajectory))
        self.status.trajectories += 1
        taken_over = lease.prefixes[index].completion_token_ids.size if index in lease.prefixes else 0
        self.status.tokens += trajectory.completion_token_ids.size - taken_over
        self.status.tokens_taken_over += taken_over

    def _traced(self, lease: Lease, index: int) -> tracing.Span:
        return tracing.span(
            "generate",
            tracing.lease_span(self._replay.run_id, lease.group.id, lease.attempt, self.replica),
            attributes=tracing.named(
                group_id=lease.group.id,
                index=index,
                attempt=lease.attempt,
                replica_id=self.replica,
                version=lease.version,
                timeline=lease.timeline,
            ),
        )

    async def _save(self, lease: Lease, trajectory: Trajectory) -> None:
        """Save an unfinished trajectory. A save may fail or be skipped: the next one contains everything that it would have saved."""
        if not self._verified.is_set():
            return
        with contextlib.suppress(ReplayUnavailable):
            await self._replay.save(lease, trajectory)
            self.status.saves += 1

    async def _stop_generating(self, tokens: Iterable[str]) -> None:
        await cancel([self._groups.pop(token)[1] for token in tokens])

    # -- calls of episodes -----------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, *, special_tokens: bool) -> Sampled:
        """Sample for a call, and return once its weights are verified. Cancellation aborts the request in the engine.

        Raises `ReplicaFenced`, `RenderRefused` for a request that no replica may sample, and whatever `complete` raises.
        """
        try:
            sampled = await self._run_call(request, special_tokens=special_tokens)
        except BaseException as error:
            self.status.calls[_UNANSWERED.get(type(error), "failed")] += 1
            raise
        self.status.calls["answered"] += 1
        self.status.call_tokens += len(sampled.token_ids)
        self.status.call_prompt_tokens += len(request.token_ids)
        self.status.call_cached_tokens += sampled.cached_tokens
        return sampled

    async def _run_call(self, request: SampleRequest, *, special_tokens: bool) -> Sampled:
        check_request(request, self._context, self._engine.model_config.get_vocab_size())
        if (fenced := self._fence(request)) is not None:
            raise fenced
        # no await between the check and this entry, which the next decision sees
        call = asyncio.create_task(self._sample(request, special_tokens=special_tokens))
        self._calls[call] = request.timeline
        try:
            await asyncio.wait([call])
        finally:
            await cancel([call])
            timeline = self._calls.pop(call)
            # a refit waits for the last call only; a heartbeat after each call would cost as much as the call itself
            if not self._calls:
                self._changed.set()
        if call.cancelled():
            raise self._fence(request) or ReplicaFenced("unhealthy", _NOT_VERIFIED)
        sampled = call.result()
        if sampled.timeline not in (request.timeline, timeline):
            raise ReplicaFenced("unhealthy", _NOT_VERIFIED)
        return sampled

    async def _sample(self, request: SampleRequest, *, special_tokens: bool) -> Sampled:
        name = f"call-{secrets.token_hex(8)}"
        async with self.slots.take():
            salt = self.receiver.cache_salt
            it = await complete(self._engine, request, name, special_tokens=special_tokens, cache_salt=salt)
        await self._verified.wait()
        weights = self.receiver.weights
        if weights is None:
            raise ReplicaFenced("unhealthy", _NOT_VERIFIED)
        return Sampled(
            *(it.token_ids, it.logprobs, it.spans, it.finish_reason, it.stop_reason, *weights),
            replica=self.replica,
            cached_tokens=it.cached_tokens,
        )

    def _fence(self, request: SampleRequest) -> ReplicaFenced | None:
        if self._leaving:
            return ReplicaFenced("leaving", "the replica is shutting down; call another replica")
        if self._reply is None:
            return ReplicaFenced("unhealthy", "the replica has not joined the fleet; call another replica")
        return decisions.fence(self._state(self._reply), request.timeline, request.min_version)

    async def _end_calls(self, timelines: Iterable[str]) -> None:
        await cancel([call for call, timeline in self._calls.items() if timeline in timelines])

    # -- leaving ---------------------------------------------------------------------------------------------------------

    async def _leave(self, died: bool) -> None:
        self._leaving = True
        await self._end_calls(set(self._calls.values()))
        if self._refit is not None:
            await cancel([self._refit])
        if self._groups and self._verified.is_set() and not self._engine.errored:
            await self._save_all()
        await self._stop_generating(self.held)
        if self._puller is not None:
            await self._puller.aclose()
        await leave(self._replay.deregister(self.replica, died=died))

    async def _save_all(self) -> None:
        """Abort all generations. Each saves its unfinished trajectory, so that another replica can continue it."""
        requests = [request_id(lease, index) for lease, _ in self._groups.values() for index in lease.missing]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_S):
                await self._engine.abort(requests)
                await asyncio.wait([task for _, task in self._groups.values()])


def _new_id() -> str:
    return f"rollout-{secrets.token_hex(6)}"
