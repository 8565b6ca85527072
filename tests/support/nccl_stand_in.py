"""Stand-ins for groups of NCCL, and a replica that believes it has a GPU, in this process or in one that NCCL kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.channel import Channel
from tests.support.forks import fork
from tests.support.small_replica import SmallReplica


class OnGpu(SmallReplica):
    """A replica that registers a GPU, and computes on the CPU."""

    async def run(self) -> None:
        register = self._replay.register

        async def with_gpu(id_: str, info: dict[str, Any], **how: Any) -> None:
            await register(id_, {**info, "gpus": "GPU-b"}, **how)

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


async def keep_up(url: str, run_id: str, model: Path, deaths: list[int]) -> None:
    """A replica as a process, which connecting by NCCL ends with SIGKILL. It is started again each time, until this is cancelled. Exit
    codes go to `deaths`."""
    while True:
        process = fork(_run, url, run_id, str(model))
        try:
            deaths.append(await asyncio.to_thread(process.wait))
        except asyncio.CancelledError:
            process.kill()
            raise


def _run(url: str, run_id: str, model: str) -> None:
    own = Channel._process_group

    def make(channel: Channel, seconds: float) -> Any:
        if channel.membership.backend == "gloo":
            return own(channel, seconds)
        return Group(lambda: os.kill(os.getpid(), signal.SIGKILL), None)

    Channel._process_group = make  # type: ignore[method-assign]
    asyncio.run(_take_part(url, run_id, Path(model)))


async def _take_part(url: str, run_id: str, model: Path) -> None:
    async with contextlib.aclosing(ReplayClient(open_redis(url), run_id)) as replay:
        await OnGpu(replay, model).run()
