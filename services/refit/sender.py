"""The trainer's end of a refit: announce an epoch, gather its members, broadcast the weights, wait for the proofs, end the epoch.

The sender never waits for a replica past a deadline. A replica that does not acknowledge is left out. If one dies during the transfer, or
holds it up beyond its deadline, another attempt is made without it. If living members can't be reached, another attempt is made by another
backend (`backends`). Every live replica that the buffer doesn't know to hold the version takes part; the others don't notice. So a replica
that joins late costs one model for itself, whatever the size of the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import torch

from headrace.base import devices
from headrace.base.addresses import LOOPBACK, is_loopback, own_address, parse_hosts, with_port
from headrace.base.errors import (
    Fenced,
    InvalidCall,
    ReplayUnavailable,
    ServiceError,
    WeightChannelError,
    WeightChannelTimeout,
    WrongTimeline,
)
from headrace.config import Config
from headrace.net import tracing
from headrace.records.trajectory import Float32, Int32
from headrace.replay import Epoch, ReplayClient

from . import membership, nccl
from .backends import Backend, Backends, nccl_problem
from .channel import Channel, Channels, GroupRank, RendezvousStore
from .manifest import Manifest
from .probe import Differences, rollout_dtype, tolerance
from .rendezvous import Announcement, Rendezvous
from .states import StateReference
from .transfer import send

logger = logging.getLogger(__name__)

# The interval at which the members are checked during a transfer: a dead member only falls silent.
POLL_S = 0.25
# These are cast to the dtype that replicas compute in, because replicas would cast them anyway.
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class WeightSource(Protocol):
    """The weights to send. Floating point in another dtype than the replicas' is cast to it. It is iterated at most once per attempt,
    always to its end, on a thread other than the event loop's."""

    def metadata(self) -> Sequence[tuple[str, str, Sequence[int]]]:
        """Return (checkpoint name, type by torch's name, full shape) of what iteration yields, in its order."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclasses.dataclass(frozen=True)
class RefitReport:
    """The outcome of a refit. `seconds` are by phase (acknowledge, transfer, verify), over all attempts. `given_up` are the backends that
    this trainer no longer uses, because they failed.

    `members` are those of the last attempt and those that an earlier one verified; empty if no live replica came. `refused` has the reason
    of each member that did not complete an attempt. `failed` are those among them that were at fault.
    """

    version: int
    members: tuple[str, ...]
    verified: tuple[str, ...]
    refused: dict[str, str]
    failed: frozenset[str]
    seconds: dict[str, float]
    nbytes: int
    attempts: int
    given_up: tuple[Backend, ...] = ()


class _AttemptOutcome(enum.Enum):
    """The outcome of one attempt.

    SETTLED: every member has verified, refused, died or run out of time. INTERRUPTED: the transfer did not reach all members, but another
    attempt may reach those that were not at fault. TOO_SLOW: it did not end in time, and another attempt would not either. NO_MEMBERS: no
    live replica came.
    """

    SETTLED = enum.auto()
    INTERRUPTED = enum.auto()
    TOO_SLOW = enum.auto()
    NO_MEMBERS = enum.auto()


@dataclasses.dataclass
class _Refit:
    """The state that the attempts at one refit share. `seconds` and what follows it grow from attempt to attempt.

    `silent` are members that did not report within the deadline whether they had completed it. `late` are those that seem to have held up a
    transfer that did not end in time, and take no further part. `source` is `whole` or the `adapter`, as the members of the attempt need
    it, and `manifest` is of that. `channel` is the one to the attempt's group; None if it has got none.
    """

    version: int
    timeline: str
    whole: WeightSource
    adapter: WeightSource | None
    source: WeightSource
    manifest: Manifest
    probe_ids: Int32
    probe_logprobs: Float32
    tolerance: Differences
    states: StateReference | None
    channel: Channel | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    verified: set[str] = dataclasses.field(default_factory=set)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    excluded: set[str] = dataclasses.field(default_factory=set)
    silent: set[str] = dataclasses.field(default_factory=set)
    late: set[str] = dataclasses.field(default_factory=set)

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[float]:
        """Add the time in the context to `seconds`. Yields the time at its start."""
        started = time.monotonic()
        try:
            yield started
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started


class WeightSender:
    """Sends weights to the fleet. Holds the rendezvous store and the process group while the trainer runs. Refits must not overlap.

    Raises `ServiceError` if `weight_channel.port` is busy.
    """

    def __init__(self, config: Config, replay: ReplayClient) -> None:
        self._config = config.weight_channel
        self._tolerance = tolerance(config)
        self._dtype = rollout_dtype(config)
        self._workers = config.policy.generation.vllm_cfg.tensor_parallel_size
        on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
        self._gpu = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._uuids = devices.uuids(os.environ)[self._gpu.index :][:1] if self._gpu is not None else []
        self._backends = Backends(self._config.backend, may_be_nonblocking=nccl.may_be_nonblocking())
        self._said: str | None = None  # how the weights travel, as last logged
        self._replay = replay
        self._host = self._config.host or host_towards(config.redis_url)
        self._meeting = RendezvousStore(self._host, self._config.port)
        logger.info("weights are handed out at %s", with_port(self._host, self._meeting.port))
        self._channels = Channels()
        self._members: tuple[str, ...] = ()  # of the open channel's group
        self._have_model: frozenset[str] = frozenset()  # replicas whose engines are proved to hold the whole model

    async def refit(
        self,
        version: int,
        timeline: str,
        source: WeightSource,
        probe_ids: Int32,
        probe_logprobs: Float32,
        *,
        adapter: WeightSource | None = None,
        tolerance: Differences | None = None,
        states: StateReference | None = None,
    ) -> RefitReport:
        """Send `version` to every live replica without it: all of `source`, or only the `adapter`, which is its last part. The adapter is
        enough if every receiver has the rest, which doesn't change, from an earlier refit. A replica is verified if its log-probabilities
        of `probe_ids` [L] are the trainer's, `probe_logprobs` [L - 1] (temperature 1), up to `tolerance` (None: the configuration's).
        With the trainer's `states`, replicas that failed the probe before say where theirs begin to differ.

        Returns when each member has verified, refused or died, or a deadline has passed. The caller decides whether that is good enough. It
        also brings late replicas to the current version.

        Raises:
        - `WrongTimeline` and `ReplayUnavailable` from the buffer; the latter also if the buffer's server lost the epoch (another refit
          opens a new one)
        - `ServiceError` if the backend is not available here, or `probe_logprobs` are not finite
        - `Restartable` if a call of an earlier refit hangs in the backend
        - `ValueError` if `source` does not yield what its metadata describes
        """
        if probe_logprobs.size != probe_ids.size - 1:
            raise ValueError(f"{probe_logprobs.size} log-probabilities for a probe of {probe_ids.size} tokens")
        if not np.isfinite(probe_logprobs).all():
            raise ServiceError(
                f"under the weights of version {version} the probe's log-probabilities are not finite, so no replica could be verified. "
                "Lower the learning rate, and start again from the last checkpoint"
            )
        bounds = tolerance or self._tolerance
        manifest = self.manifest(source)
        refit = _Refit(version, timeline, source, adapter, source, manifest, probe_ids, probe_logprobs, bounds, states)
        already_given_up = len(self._backends.given_up)
        for attempt in itertools.count(1):
            began_ns = time.time_ns()
            epoch, outcome = await self._attempt(refit)
            self._trace(epoch, outcome, began_ns, refit.manifest.nbytes)
            # neither a backend that was given up nor a member that is left out is a lost member
            changes = len(self._backends.given_up) - already_given_up + bool(refit.late)
            if outcome is not _AttemptOutcome.INTERRUPTED or attempt > self._config.max_retries + changes:
                break
            logger.warning("attempt %d to send version %d failed: %s", attempt, version, refit.refused)
        return RefitReport(
            version=version,
            members=tuple(sorted(refit.verified.union(epoch.members))),
            verified=tuple(sorted(refit.verified)),
            refused=refit.refused,
            # who was late is slower than others only if these completed it
            failed=frozenset(refit.excluded | refit.silent | (refit.late if refit.verified else set())),
            seconds=refit.seconds,
            nbytes=refit.manifest.nbytes,
            attempts=attempt,
            given_up=tuple(self._backends.given_up),
        )

    def _trace(self, epoch: Epoch, outcome: _AttemptOutcome, began_ns: int, nbytes: int) -> None:
        """Export the span of an epoch, in which its members receive the weights."""
        attributes = tracing.named(
            version=epoch.version,
            timeline=epoch.timeline,
            outcome=outcome.name.lower(),
            members=epoch.members,
            verified=epoch.verified,
            refused=sorted(epoch.refused),
            bytes=nbytes,
        )
        at = tracing.epoch_span(self._replay.run_id, epoch.timeline, epoch.version, epoch.id)
        parent = tracing.current().context
        tracing.emit(tracing.EndedSpan("epoch", at, parent, began_ns, time.time_ns(), attributes))

    async def aclose(self) -> None:
        await asyncio.to_thread(self._channels.leave, self._config.timeout_s)

    async def _attempt(self, refit: _Refit) -> tuple[Epoch, _AttemptOutcome]:
        """Run one epoch from its announcement to its end. Returns its final state and the outcome."""
        self._channels.check()
        refit.channel = None
        epoch = await self._announce(refit)
        if not epoch.acknowledged:
            with _server_lost(epoch.id):
                ended = await self._replay.end_epoch(epoch.id, aborted=True)
            return msgspec.structs.replace(ended, members=(), verified=()), _AttemptOutcome.NO_MEMBERS
        adapter = refit.adapter if self._have_model.issuperset(epoch.acknowledged) else None
        source = refit.whole if adapter is None else adapter
        if source is not refit.source:
            refit.source, refit.manifest = source, self.manifest(source)
        rendezvous = await self._rendezvous(epoch, refit)
        # before any member's: a member that gave up first would leave a transfer of which nobody could tell who held it up
        deadline = time.monotonic() + rendezvous.timeout_s
        with _server_lost(epoch.id):
            epoch = await self._replay.begin_epoch(
                epoch.id, rendezvous.encode(), refit.probe_logprobs.tolist(), *refit.tolerance
            )
        failure = await self._transfer(epoch, rendezvous, refit, deadline)
        late: dict[str, str] = {}
        if failure is None:
            outcome = await self._await_proofs(epoch, refit)
        else:
            outcome, late = await self._judge_failure(failure, epoch, rendezvous, refit)
        with _server_lost(epoch.id):
            ended = await self._replay.end_epoch(
                epoch.id, aborted=failure is not None or outcome is _AttemptOutcome.INTERRUPTED
            )
        is_explained = outcome is not _AttemptOutcome.INTERRUPTED or bool(late)
        self._note_outcome(ended, rendezvous.backend, refit.channel, failure, is_explained=is_explained)
        if adapter is None:
            self._have_model = self._have_model.difference(ended.members).union(ended.verified)
        refit.verified.update(ended.verified)
        refit.refused.update(ended.refused)
        if outcome is _AttemptOutcome.TOO_SLOW:
            refit.refused.update(dict.fromkeys(set(ended.members) - set(ended.verified), str(failure)))
        refit.refused.update(late)
        refit.late.update(late)
        refit.excluded |= membership.at_fault(ended)
        if outcome is _AttemptOutcome.SETTLED:
            refit.silent |= membership.find_unsettled(ended, await self._replay.replicas())
            silence = f"it was silent for {self._config.timeout_s:g} s (weight_channel.timeout_s)"
            refit.refused.update(dict.fromkeys(refit.silent, silence))
        if set(ended.verified) != set(ended.members):
            self._channels.close()  # some member may have left the group
        return ended, outcome

    def manifest(self, source: WeightSource) -> Manifest:
        """Return what replicas get of `source`, in their dtype."""
        return Manifest.of(
            ((name, self._dtype if dtype in FLOATS else dtype, shape) for name, dtype, shape in source.metadata()),
            self._config.bucket_size("cpu" if self._gpu is None else "cuda"),
        )

    async def end_stray_epoch(self, timeline: str) -> None:
        """End an epoch of this timeline that no refit of this sender drives. Its members take no work while it is announced.

        Such an epoch exists if the buffer's server lost `open_epoch` and a copy of the call arrived afterwards. Call this between refits.
        """
        epoch = await self._replay.epoch()
        if epoch is None or epoch.timeline != timeline or epoch.state not in ("announced", "transfer"):
            return
        logger.warning("no refit drives epoch %s (version %d); it is ended", epoch.id, epoch.version)
        with _server_lost(epoch.id):
            await self._replay.end_epoch(epoch.id, aborted=True)

    async def _announce(self, refit: _Refit) -> Epoch:
        """Open an epoch and gather its members: wait until every live replica has acknowledged it, or the deadline has passed."""
        excluded = refit.excluded | refit.late
        announcement = Announcement(tuple(sorted(excluded))).encode()
        with refit.timed("acknowledge") as started:
            epoch = await self._replay.open_epoch(secrets.token_hex(8), refit.version, refit.timeline, announcement)
            while membership.find_awaited(epoch, await self._replay.replicas(), excluded):
                left = started + self._config.timeout_s - time.monotonic()
                if left <= 0:
                    break
                await self._replay.wait_epoch(min(left, POLL_S))
                epoch = await self._current(epoch.id, "announced")
        return epoch

    async def _rendezvous(self, epoch: Epoch, refit: _Refit) -> Rendezvous:
        """Return what the members need in order to meet. If the members are those of the last refit, they keep its group."""
        fleet = [replica for replica in await self._replay.replicas() if replica.id in epoch.acknowledged]
        problem = nccl_problem(
            self._uuids, {replica.id: str(replica.info.get("gpus", "")).split() for replica in fleet}
        )
        backend = self._backends.choose(epoch.acknowledged, problem)
        self._say_how(backend, problem)
        channel = self._channels.open
        return Rendezvous(
            group_id=epoch.id,
            previous_group="" if channel is None else channel.membership.group_id,
            previous_members=() if channel is None else self._members,
            backend=backend,
            host=self._host,
            port=self._meeting.port,
            secret=secrets.token_bytes(32),
            workers=self._workers,
            timeout_s=self._config.timeout_s,
            connect_s=self._config.timeout_s if backend == "gloo" else self._config.connect_s,
            manifest=refit.manifest,
            probe_token_ids=refit.probe_ids,
            states=refit.states,
        )

    def _say_how(self, backend: Backend, problem: str | None) -> None:
        """Log how the weights travel, if that has changed."""
        slow = " through the hosts' memory" if backend == "gloo" and self._gpu is not None else ""
        how, level = f"weights travel by {backend}{slow}", logging.INFO
        if problem is not None:
            how += f": {problem}"
        elif given_up := self._backends.describe_failures():
            how += (
                f", because nothing faster reached the replicas, which were there ({given_up}); {devices.NCCL_REMEDY}"
            )
            level = logging.WARNING
        if how != self._said and self._gpu is not None:
            logger.log(level, "%s", how)
        self._said = how

    def _note_outcome(
        self,
        ended: Epoch,
        backend: Backend,
        channel: Channel | None,
        failure: WeightChannelError | None,
        *,
        is_explained: bool,
    ) -> None:
        """Note what became of an attempt's backend. `failure` is why the weights were not sent; None if they were. `is_explained`: if the
        weights did not reach all, it is known why."""
        if is_explained:
            if ended.verified:
                self._backends.note_success(backend)
        elif membership.at_fault(ended):
            return  # the backend is not the cause
        elif channel is not None and channel.gathered:
            said = [ended.refused[member] for member in ended.interrupted if member in ended.refused]
            reasons = dict.fromkeys([*([str(failure)] if failure else []), *said])
            missed = set(ended.members).difference(ended.verified)  # the others won't be asked again
            self._backends.note_failure(backend, missed, "; ".join(reasons), formed=channel.formed)

    async def _judge_failure(
        self, failure: WeightChannelError, epoch: Epoch, rendezvous: Rendezvous, refit: _Refit
    ) -> tuple[_AttemptOutcome, dict[str, str]]:
        """Return the outcome of an attempt whose weights were not sent, and the members that held it up beyond its deadline, with the
        reason."""
        channel = refit.channel
        if not isinstance(failure, WeightChannelTimeout) or channel is None or not channel.formed:
            return _AttemptOutcome.INTERRUPTED, {}
        try:
            received = await asyncio.to_thread(channel.received)
        except WeightChannelError as error:  # another process has written there; the next group has another secret
            logger.warning("what each member has received can't be told: %s", error)
            return _AttemptOutcome.INTERRUPTED, {}
        ranks = {member: rendezvous.ranks_of(member, epoch.members) for member in epoch.members}
        late = {} if refit.late else membership.find_late(received, ranks)
        if late or self._backends.may_be_cause(rendezvous.backend, formed=True):
            whole = len(refit.manifest.buckets()) + 1  # the checksums come last
            return _AttemptOutcome.INTERRUPTED, {
                member: f"it had {count} of {whole} parts of the weights after {self._config.timeout_s:g} s, and others had more: it "
                "hangs, or the network is slow; then raise weight_channel.timeout_s"
                for member, count in late.items()
            }
        return _AttemptOutcome.TOO_SLOW, {}

    async def _transfer(
        self, epoch: Epoch, rendezvous: Rendezvous, refit: _Refit, deadline: float
    ) -> WeightChannelError | None:
        """Broadcast on a thread while watching the members. Return why not all were reached, with the channel closed; None if they
        were."""
        with refit.timed("transfer"):
            broadcast = asyncio.create_task(
                asyncio.to_thread(self._broadcast, epoch.members, rendezvous, refit, deadline)
            )
            try:
                while not broadcast.done():
                    await asyncio.wait((broadcast,), timeout=POLL_S)
                    if broadcast.done():
                        break
                    now = await self._current(epoch.id, "transfer")
                    if gone := membership.find_lost(now, await self._replay.replicas()):
                        logger.warning("the transfer of version %d lost %s", refit.version, sorted(gone))
                        self._channels.close()  # again in the next round, if it was not open yet
                await broadcast
            except WeightChannelError as error:
                logger.warning("the transfer of version %d failed: %s", refit.version, error)
                self._channels.close()
                return error
            except BaseException:
                # the thread must end before the next attempt opens its own channel: there can be only one
                while not broadcast.done():
                    self._channels.close()  # again, if it was not open yet
                    await asyncio.wait((broadcast,), timeout=POLL_S)
                broadcast.exception()  # retrieved, so that asyncio does not warn about it
                self._channels.close()
                raise
        return None

    def _broadcast(self, members: tuple[str, ...], rendezvous: Rendezvous, refit: _Refit, deadline: float) -> None:
        """Run on a thread: open a channel to the group unless one is open, then send."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a new thread's device is 0

        def keep(channel: Channel) -> None:
            self._channels.open = refit.channel = channel

        channel = self._channels.open
        if channel is not None and channel.membership.group_id == rendezvous.derive_group(members):
            refit.channel = channel
        else:
            self._channels.close()
            place = GroupRank(**rendezvous.place(0, members), device=self._device(rendezvous.backend))
            channel = Channel.lead(place, self._meeting, deadline, keep)
            self._members = members
        send(channel, refit.manifest, refit.source, deadline)

    async def _await_proofs(self, epoch: Epoch, refit: _Refit) -> _AttemptOutcome:
        """Wait until every member has verified, refused or died. The outcome is INTERRUPTED if the transfer did not reach all of them."""
        with refit.timed("verify") as started:
            while True:
                epoch, fleet = await self._current(epoch.id, "transfer"), await self._replay.replicas()
                if membership.dead(epoch, fleet):
                    self._channels.close()  # it may have died before it passed the bytes on; members that wait for them are freed
                left = started + self._config.timeout_s - time.monotonic()
                if left <= 0 or not membership.find_unsettled(epoch, fleet):
                    return _AttemptOutcome.INTERRUPTED if epoch.interrupted else _AttemptOutcome.SETTLED
                await self._replay.wait_epoch(min(left, POLL_S))

    async def _current(self, epoch_id: str, state: Literal["announced", "transfer"]) -> Epoch:
        epoch = await self._replay.epoch()
        if epoch is None or (epoch.id, epoch.state) != (epoch_id, state):
            raise _lost_epoch(epoch_id)
        return epoch

    def _device(self, backend: Backend) -> torch.device:
        if backend == "gloo":
            return torch.device("cpu")
        assert self._gpu is not None  # `nccl_problem` names a trainer without one
        return self._gpu


def host_towards(url: str) -> str:
    """Return the address at which replicas reach this machine; they reach the buffer's server at `url`. Raises `ServiceError`."""
    host = next(iter(parse_hosts(url)), LOOPBACK).strip("[]")
    try:
        own = own_address(host)
    except OSError as error:
        raise ServiceError(
            f"weight_channel.host is null, and there is no route to the buffer's server {host} ({error}); set it to an address of this "
            "machine that replicas can reach"
        ) from error
    if is_loopback(own) and not is_loopback(host):
        raise ServiceError(
            f"weight_channel.host is null, and {host} (replay.redis_url) resolves to {own} on this machine (/etc/hosts), which replicas on "
            f"other machines can't reach; set it to an address that they reach, or to {own} if all of them run on this machine"
        )
    return own


@contextlib.contextmanager
def _server_lost(epoch_id: str) -> Iterator[None]:
    """Turn refusals of calls that advance this epoch into `ReplayUnavailable`. A buffer that has the epoch refuses only another timeline.
    Any other refusal means that its server lost the epoch."""
    try:
        yield
    except WrongTimeline:
        raise
    except (Fenced, InvalidCall) as error:
        raise _lost_epoch(epoch_id) from error


def _lost_epoch(epoch_id: str) -> ReplayUnavailable:
    """Make the error for an epoch that the buffer no longer has. Only this trainer opens epochs of its timeline, so the server lost it. If
    another trainer has taken over the run, the next call is refused because of its timeline."""
    return ReplayUnavailable(f"the buffer's server lost epoch {epoch_id}; the weights are sent again")
