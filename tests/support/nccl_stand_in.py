"""Stand-ins for groups of NCCL, a trainer and replicas that believe they have GPUs, and replicas as processes that die at one moment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist

from headrace.records.trajectory import Float32, Int32
from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.channel import Channel
from tests.support.forks import Forked, fork, keep_forked
from tests.support.small_replica import SmallReplica
from tests.support.weight_trainer import Trainer

CPU = torch.device("cpu")

# When a member dies: it has said that it will come; all have come, and it connects; it has connected, and waits for the challenge; it has a
# part of the weights; it has all of them; they are verified.
Moment = Literal["acknowledged", "gathered", "connected", "receiving", "received", "verified"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class OnGpu(SmallReplica):
    """A replica that registers a GPU, and computes on the CPU."""

    def __init__(self, replay: ReplayClient, model: Path, gpu: str = "GPU-b") -> None:
        super().__init__(replay, model)
        self._gpu = gpu

    async def run(self) -> None:
        register = self._replay.register

        async def with_gpu(id_: str, info: dict[str, Any], **how: Any) -> None:
            await register(id_, {**info, "gpus": self._gpu}, **how)

        self._replay.register = with_gpu  # type: ignore[method-assign, assignment]
        await super().run()


class Group:
    """Of NCCL: `connect` is what connecting does; what it carries goes through `carrier`, a real group."""

    def __init__(self, connect: Callable[[], None], carrier: Any) -> None:
        self._connect, self._carrier = connect, carrier

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._carrier.broadcast(tensors, options)

    def abort(self) -> None:
        pass


class Nccl:
    """`fails`: what connecting does where it does not succeed, by backend and whether it is the trainer that connects."""

    def __init__(self) -> None:
        self.fails: dict[tuple[str, bool], Callable[[], None]] = {}
        self.tried: list[str] = []  # the backend of each group that the trainer made
        self.over = threading.Event()

    def hang(self) -> None:
        self.over.wait(60)

    def refuse(self) -> None:
        raise RuntimeError("NCCL Error 7: in progress")

    def make(self, own: Callable[[Channel, float], Any], channel: Channel, seconds: float) -> Any:
        """A group of the channel's backend; `own` makes one of gloo."""
        place = channel.membership
        if not place.rank:
            self.tried.append(place.backend)
        if place.backend == "gloo":
            return own(channel, seconds)
        if fails := self.fails.get((place.backend, not place.rank)):
            return Group(fails, None)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=seconds)
        carrier = dist.ProcessGroupGloo(channel._store, place.rank, place.world_size, options)
        return Group(lambda: None, carrier)


class GpuTrainer(Trainer):
    """A trainer that believes it has a GPU."""

    def __init__(self, replay: ReplayClient, model: Path, timeline: str, **channel: Any) -> None:
        super().__init__(replay, model, timeline, **channel)
        self.sender._gpu, self.sender._uuids = CPU, ["GPU-a"]


class _Doomed(OnGpu):
    """`dies_at`: the moment, and the number of the epoch, from 0."""

    def __init__(self, replay: ReplayClient, model: Path, dies_at: tuple[Moment, int]) -> None:
        super().__init__(replay, model, "GPU-c")
        self._dies_at = dies_at
        self._epochs: dict[str, int] = {}
        acknowledge, verify = replay.acknowledge, replay.verify

        async def acknowledged(replica: str, epoch: str) -> None:
            await acknowledge(replica, epoch)
            self._epochs.setdefault(epoch, len(self._epochs))
            self.reach("acknowledged")

        async def verified(*given: Any) -> Any:
            verdict = await verify(*given)
            self.reach("verified")
            return verdict

        replay.acknowledge, replay.verify = acknowledged, verified  # type: ignore[method-assign]

    def reach(self, moment: Moment) -> None:
        if self._dies_at == (moment, len(self._epochs) - 1):
            _die()

    def _prove(self, probe: Int32) -> Float32:
        self.reach("received")
        return super()._prove(probe)


def start_doomed(url: str, run_id: str, model: Path, moment: Moment, epoch: int, *, nccl_hangs: bool) -> Forked:
    """A replica as a process, which ends itself with SIGKILL at this moment of that epoch, counted from 0."""
    return fork(_run_doomed, url, run_id, str(model), moment, epoch, nccl_hangs)


def _run_doomed(url: str, run_id: str, model: str, moment: Moment, epoch: int, nccl_hangs: bool) -> None:
    replay = ReplayClient(open_redis(url), run_id)
    replica = _Doomed(replay, Path(model), (moment, epoch))
    nccl, own, answer, broadcasting = Nccl(), Channel._process_group, Channel._answer, Channel.broadcasting
    if nccl_hangs:
        nccl.fails = {(backend, False): nccl.hang for backend in ("nccl", "nccl-blocking")}
    buckets = itertools.count()

    def make(channel: Channel, seconds: float) -> Any:
        replica.reach("gathered")
        return nccl.make(own, channel, seconds)

    def connected(channel: Channel, deadline: float) -> None:
        replica.reach("connected")
        answer(channel, deadline)

    def received(channel: Channel, tensor: torch.Tensor, deadline: float) -> Any:
        if channel.formed and next(buckets):
            replica.reach("receiving")
        return broadcasting(channel, tensor, deadline)

    Channel._process_group, Channel._answer, Channel.broadcasting = make, connected, received  # type: ignore[method-assign]
    asyncio.run(_take_part(replica, replay))


async def keep_up(url: str, run_id: str, model: Path, deaths: list[int]) -> None:
    """A replica as a process, which connecting by NCCL ends with SIGKILL. It is started again each time, until this is cancelled. Exit
    codes go to `deaths`."""
    await keep_forked(deaths, _run, url, run_id, str(model))


def _run(url: str, run_id: str, model: str) -> None:
    own, nccl = Channel._process_group, Nccl()
    nccl.fails = {("nccl-blocking", False): _die}
    Channel._process_group = lambda channel, seconds: nccl.make(own, channel, seconds)  # type: ignore[method-assign]
    replay = ReplayClient(open_redis(url), run_id)
    asyncio.run(_take_part(OnGpu(replay, Path(model)), replay))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


async def _take_part(replica: OnGpu, replay: ReplayClient) -> None:
    async with contextlib.aclosing(replay):
        await replica.run()
