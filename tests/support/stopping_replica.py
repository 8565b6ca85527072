"""A replica as a process that stops before each part of the weights, until someone lets it go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.refit.channel import Channel
from tests.support.forks import Forked, fork
from tests.support.small_replica import SmallReplica


def start_stopping(url: str, run_id: str, model: Path) -> Forked:
    """A replica that sends itself SIGSTOP before each broadcast that it takes, but the one in which its group is formed."""
    return fork(_run, url, run_id, str(model))


def is_stopped(pid: int) -> bool:
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


def _run(url: str, run_id: str, model: str) -> None:
    broadcasting = Channel.broadcasting

    def slow(channel: Channel, tensor: torch.Tensor, deadline: float) -> Any:
        if channel.formed:
            os.kill(os.getpid(), signal.SIGSTOP)
        return broadcasting(channel, tensor, deadline)

    Channel.broadcasting = slow  # type: ignore[method-assign]
    asyncio.run(_take_part(url, run_id, Path(model)))


async def _take_part(url: str, run_id: str, model: Path) -> None:
    async with contextlib.aclosing(ReplayClient(open_redis(url), run_id)) as replay:
        await SmallReplica(replay, model).run()
