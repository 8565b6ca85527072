"""The trainer's end of a refit: announce an epoch, broadcast the weights to those who came, wait for their proofs.

A replica is never waited for past a deadline: one that does not acknowledge is left out, one that dies in the middle costs
another attempt without it. Every live replica takes part, those included that already hold the version: the buffer knows one
membership at a time, and a replica left out of it may not lease. One that holds the version only lets the bytes pass by, and is
neither drained nor paused for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, cast

import torch

from headrace.config import Config
from headrace.errors import (
    Fenced,
    InvalidCall,
    ReplayUnavailable,
    ServiceError,
    WeightChannelAborted,
    WeightChannelError,
    WrongTimeline,
)
from headrace.replay import Epoch, ReplayClient
from headrace.trajectory import Float32, Int32
from headrace.weights import membership
from headrace.weights.manifest import Manifest
from headrace.weights.rendezvous import Announcement, Rendezvous
from services.weight_channel.transport import Backend, Channel, GroupRank, RendezvousStore, send

logger = logging.getLogger(__name__)

# how often the members are looked at during a transfer: that one of them has died is told by nothing but the clock
GLANCE_S = 0.25


class WeightSource(Protocol):
    """What is sent. Iterated at most once per attempt, then always to its end, on another thread than the event loop's."""

    def metadata(self) -> Sequence[tuple[str, str, Sequence[int]]]:
        """(checkpoint name, type by torch's name, full shape) of what iteration yields, in its order."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclasses.dataclass(frozen=True)
class RefitReport:
    """What became of a refit. `seconds` by phase (acknowledge, transfer, verify), over all attempts.

    `members` are those of the last attempt; no members: no live replica came. `refused` holds each failed member's reason,
    of every attempt.
    """

    version: int
    members: tuple[str, ...]
    verified: tuple[str, ...]
    refused: dict[str, str]
    seconds: dict[str, float]
    nbytes: int
    attempts: int


@dataclasses.dataclass
class _Progress:
    """What the attempts at one refit have in common."""

    version: int
    timeline: str
    source: WeightSource
    manifest: Manifest
    probe_ids: Int32
    probe_logprobs: Float32
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    excluded: set[str] = dataclasses.field(default_factory=set)


class WeightSender:
    """Holds the meeting point and the group for as long as the trainer runs. Refits must not overlap.

    Raises `ServiceError` if `weight_channel.port` is busy.
    """

    def __init__(self, config: Config, replay: ReplayClient) -> None:
        self._config = config.weight_channel
        self._workers = config.policy.generation.vllm_cfg.tensor_parallel_size
        on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
        self._gpu = torch.device("cuda", torch.cuda.current_device()) if on_gpu else None
        self._replay = replay
        self._meeting = RendezvousStore(self._config.host, self._config.port)
        self._channel: Channel | None = None
        self._left: list[Channel] = []  # whose last calls may still run
        self._group = ("", ())  # type: tuple[str, tuple[str, ...]]

    @property
    def port(self) -> int:
        return self._meeting.port

    async def refit(
        self, version: int, timeline: str, source: WeightSource, probe_ids: Int32, probe_logprobs: Float32
    ) -> RefitReport:
        """Bring every live replica to `version`; they prove it on `probe_ids` [L] with `probe_logprobs` [L - 1] (temperature 1).

        Returns when each member has verified, refused or died, or a deadline has passed; whether that is good enough is the
        caller's to decide. Also the way to bring replicas that came late to the current version. Raises `WrongTimeline` and
        `ReplayUnavailable` from the buffer, the latter too if the buffer's server lost the epoch (another refit opens a new one),
        `ServiceError` if the backend can't be had here, `ValueError` if `source` does not yield what its metadata says.
        """
        manifest = Manifest.of(source.metadata(), self._config.bucket_bytes)
        progress = _Progress(version, timeline, source, manifest, probe_ids, probe_logprobs)
        for attempt in range(1, self._config.max_retries + 2):
            epoch, complete = await self._attempt(progress)
            if complete:
                break
            logger.warning("attempt %d to send version %d failed: %s", attempt, version, progress.refused)
        return RefitReport(
            version=version,
            members=epoch.members,
            verified=epoch.verified,
            refused=progress.refused,
            seconds=progress.seconds,
            nbytes=manifest.nbytes,
            attempts=attempt,
        )

    async def aclose(self) -> None:
        self._drop_group()
        for channel in self._left:
            await asyncio.to_thread(channel.join, self._config.timeout_s)

    async def _attempt(self, progress: _Progress) -> tuple[Epoch, bool]:
        """One epoch. Returns it and whether it ran to its end (True also when nobody came)."""
        epoch = await self._gather(progress)
        if not epoch.acknowledged:
            with _not_lost(epoch.id):
                ended = await self._replay.end_epoch(epoch.id, aborted=True)
            return dataclasses.replace(ended, members=(), verified=()), True
        rendezvous = await self._rendezvous(epoch, progress)
        with _not_lost(epoch.id):
            epoch = await self._replay.begin_epoch(epoch.id, rendezvous.encode())
        complete = await self._transfer(epoch, rendezvous, progress) and await self._await_proofs(epoch, progress)
        with _not_lost(epoch.id):
            ended = await self._replay.end_epoch(epoch.id, aborted=not complete)
        progress.refused.update(ended.refused)
        progress.excluded |= membership.at_fault(ended)
        if set(ended.verified) != set(ended.members):
            self._drop_group()  # some member may have left it
        return ended, complete

    async def _gather(self, progress: _Progress) -> Epoch:
        """Open an epoch and wait for acknowledgements."""
        started = time.monotonic()
        announcement = Announcement(tuple(sorted(progress.excluded))).encode()
        epoch = await self._replay.open_epoch(secrets.token_hex(8), progress.version, progress.timeline, announcement)
        while membership.awaited(epoch, await self._replay.replicas(), progress.excluded):
            left = started + self._config.timeout_s - time.monotonic()
            if left <= 0:
                break
            await self._replay.wait_epoch(min(left, GLANCE_S))
            epoch = await self._current(epoch.id, "announced")
        _add(progress.seconds, "acknowledge", started)
        return epoch

    async def _rendezvous(self, epoch: Epoch, progress: _Progress) -> Rendezvous:
        fleet = [replica for replica in await self._replay.replicas() if replica.id in epoch.acknowledged]
        devices = [str(replica.info.get("device", "cpu")) for replica in fleet]
        previous_group, previous_members = self._group if self._channel is not None else ("", ())
        return Rendezvous(
            group_id=epoch.id,
            previous_group=previous_group,
            previous_members=previous_members,
            backend=membership.choose_backend(
                self._config.backend, trainer_on_gpu=self._gpu is not None, devices=devices
            ),
            host=self._config.host,
            port=self._meeting.port,
            workers=self._workers,
            timeout_s=self._config.timeout_s,
            manifest=progress.manifest,
            probe_token_ids=progress.probe_ids,
            probe_logprobs=progress.probe_logprobs,
            tolerance=self._config.verify_tolerance,
        )

    async def _transfer(self, epoch: Epoch, rendezvous: Rendezvous, progress: _Progress) -> bool:
        """Broadcast on a thread while watching the members; False (and the group is gone) if it did not reach them all."""
        started = time.monotonic()
        task = asyncio.create_task(asyncio.to_thread(self._broadcast, epoch.members, rendezvous, progress))
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=GLANCE_S)
                if task.done():
                    break
                if gone := membership.lost(await self._current(epoch.id, "transfer"), await self._replay.replicas()):
                    logger.warning("the transfer of version %d lost %s", progress.version, sorted(gone))
                    self._drop_group()  # again at the next glance, if the group was not there yet
            await task
        except WeightChannelError as error:
            logger.warning("the transfer of version %d failed: %s", progress.version, error)
            self._drop_group()
            return False
        except BaseException:
            await self._give_up(task)
            raise
        finally:
            _add(progress.seconds, "transfer", started)
        return True

    async def _give_up(self, broadcast: asyncio.Task[None]) -> None:
        """Return once its thread has ended: the next attempt makes a group of its own, and there is room for one."""
        while not broadcast.done():
            self._drop_group()  # again, if the group was not there yet
            await asyncio.wait((broadcast,), timeout=GLANCE_S)
        broadcast.exception()  # of no use any more
        self._drop_group()

    def _broadcast(self, members: tuple[str, ...], rendezvous: Rendezvous, progress: _Progress) -> None:
        """On a thread: form the group unless it is the one there is, then send."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a thread starts on device 0, whatever the trainer's is
        deadline = time.monotonic() + rendezvous.timeout_s
        group = rendezvous.group_of(members)
        if self._channel is None or group != self._group[0]:
            self._drop_group()
            place = GroupRank(
                group_id=group,
                backend=cast(Backend, rendezvous.backend),
                host=rendezvous.host,
                port=rendezvous.port,
                rank=0,
                world_size=rendezvous.world_size(members),
                device=self._device(rendezvous.backend),
            )
            Channel.lead(place, self._meeting, deadline, self._opened)
            self._group = (group, members)
        channel = self._channel
        if channel is None:
            raise WeightChannelAborted("the transfer was given up")
        send(channel, progress.manifest, progress.source, deadline)

    async def _await_proofs(self, epoch: Epoch, progress: _Progress) -> bool:
        """Wait until every member has verified, refused or died; False if the transfer turns out not to have reached them all."""
        started = time.monotonic()
        while True:
            epoch, fleet = await self._current(epoch.id, "transfer"), await self._replay.replicas()
            if membership.dead(epoch, fleet):
                self._drop_group()  # it may have died before it passed the bytes on: free those who wait for them
            left = started + self._config.timeout_s - time.monotonic()
            if left <= 0 or not membership.unsettled(epoch, fleet):
                break
            await self._replay.wait_epoch(min(left, GLANCE_S))
        _add(progress.seconds, "verify", started)
        return not membership.interrupted(epoch)

    async def _current(self, epoch_id: str, state: Literal["announced", "transfer"]) -> Epoch:
        epoch = await self._replay.epoch()
        if epoch is None or (epoch.id, epoch.state) != (epoch_id, state):
            raise _lost(epoch_id)
        return epoch

    def _device(self, backend: str) -> torch.device:
        if backend == "gloo":
            return torch.device("cpu")
        if self._gpu is None:
            raise ServiceError("weight_channel.backend: nccl, but the trainer runs on a CPU; set it to auto or gloo")
        return self._gpu

    def _opened(self, channel: Channel) -> None:
        self._channel = channel

    def _drop_group(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._left = [*(channel for channel in self._left if not channel.join(0.0)), self._channel]
            self._channel = None


@contextlib.contextmanager
def _not_lost(epoch_id: str) -> Iterator[None]:
    """The body moves this epoch on: a buffer that knows it refuses only what is of another timeline."""
    try:
        yield
    except WrongTimeline:
        raise
    except (Fenced, InvalidCall) as error:
        raise _lost(epoch_id) from error


def _lost(epoch_id: str) -> ReplayUnavailable:
    """Nobody but this trainer opens epochs of its timeline. Where another has taken the run over, the next call names the timeline."""
    return ReplayUnavailable(f"its server lost what it was told of epoch {epoch_id}; the weights are sent again")


def _add(seconds: dict[str, float], phase: str, started: float) -> None:
    seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - started
