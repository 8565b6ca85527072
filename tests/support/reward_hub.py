"""A hub and environments for tests: real gRPC, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from headrace import Sample
from headrace.config import Config
from headrace.env.wire import sample_to_wire, score_from_wire
from headrace.net import rpc
from headrace.net.credentials import Credentials
from headrace.records.score import Score
from headrace.replay import ReplayClient
from headrace.v1 import reward_pb2, reward_pb2_grpc
from headrace_services.replay.scorer import run_scorer
from headrace_services.reward import attached, served
from headrace_services.reward.main import Running, running
from tests.support.processes import started
from tests.support.waiting import STALL_S

WAIT_S = 60.0


def credit_wait(seconds: float) -> Any:
    """How long the hubs of this process wait in all for credit of attached processes."""
    return mock.patch.object(attached, "_CREDIT_WAIT_S", seconds)


def hurried(seconds: float) -> Any:
    """For how long the hubs of this process work on a call, whose caller waits for longer than any machine stands still."""
    return mock.patch.object(rpc, "time_before", lambda deadline_s, most_s=1.0: min(deadline_s, seconds))


def told(seconds: float) -> Any:
    """What the hubs of this process tell attached processes of their deadline, and likewise wait for longer."""
    work = attached._work
    return mock.patch.object(attached, "_work", lambda name, timeout_s: work(name, min(timeout_s, seconds)))


class Hub:
    """A running hub, as a caller sees it."""

    def __init__(self, service: Running, channel: Any) -> None:
        self.port, self.http_port = service.port, service.http_port
        self.channel = channel
        self.stub = reward_pb2_grpc.RewardServiceStub(channel)

    async def score(self, samples: Sequence[Sample], timeout_s: float = WAIT_S) -> list[Score]:
        request = reward_pb2.ScoreRequest(trajectories=[sample_to_wire(sample) for sample in samples])
        response = await self.stub.Score(request, timeout=timeout_s)
        return [score_from_wire(result) for result in response.results]

    async def environments(self) -> dict[str, Any]:
        answer = await self.stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest(), timeout=WAIT_S)
        return {environment.name: environment for environment in answer.environments}

    async def attached(self, name: str, capacity: int) -> None:
        """Return when processes with this capacity in all are attached as `name`."""
        async with asyncio.timeout(WAIT_S):
            while (await self.environments())[name].description.capacity != capacity:  # noqa: ASYNC110  # as in `eventually`
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        """Return when every environment can score or play."""
        async with asyncio.timeout(WAIT_S):
            while not all(each.ready for each in (await self.environments()).values()):  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def start_hub(
    env: dict[str, Any], credentials: Path | None = None, tls_ca: Path | None = None, **reward: Any
) -> AsyncIterator[Hub]:
    """With `credentials`, a file, its caller is the scorer of that file. One worker has the built-in environments unless `reward` says
    otherwise: each takes a second of a core to start. An environment describes itself even if the machine stands still meanwhile."""
    given = {"credentials": credentials, "tls_ca": tls_ca}
    security = {name: str(file) for name, file in given.items() if file is not None}
    config = Config.model_validate({"env": env, "reward": {"port": 0, "workers": 1, **reward}, "security": security})
    token = None if credentials is None else Credentials(credentials).make_token_source("scorer")
    with mock.patch.object(served, "_DESCRIBE_TIMEOUT_S", STALL_S):
        async with running(config) as service, rpc.channel(f"127.0.0.1:{service.port}", token=token) as channel:
            yield Hub(service, channel)


@contextlib.asynccontextmanager
async def scoring(
    replay: ReplayClient, port: int, folder: Path | None = None, **reward: Any
) -> AsyncIterator[asyncio.Task[None]]:
    """A scorer between the buffer and the hub at `port`. `folder` is that of the runs; without it no completion is kept."""
    run = {"run": {"id": "run", "dir": str(folder)}, "logger": {"keep_step_data": None if folder else 0}}
    config = Config.model_validate({"reward": {"address": f"127.0.0.1:{port}", **reward}, **run})
    stop = asyncio.Event()
    task = asyncio.create_task(run_scorer(config, replay, stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


class Process:
    """A user's environment in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process, self.port = process, port
        self.target = f"127.0.0.1:{port}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


@contextlib.asynccontextmanager
async def attach_environment(
    path: Path, hub: Hub, *arguments: str, program: str = sys.executable, **pipes: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a file of Python, or of `program`, that attaches an environment to `hub`; ends it by SIGKILL if the test did not."""
    argv = [program, str(path), "--attach", f"127.0.0.1:{hub.port}", *arguments]
    async with started(*argv, **pipes) as process:
        yield process


@contextlib.asynccontextmanager
async def start_environment(
    path: Path, *arguments: object, port: int = 0, program: str = sys.executable
) -> AsyncIterator[Process]:
    """Starts a file of Python, or of `program`, that serves an environment and logs where; ends it by SIGKILL if the test did not."""
    async with started(program, path, "--port", port, *arguments, stderr=asyncio.subprocess.PIPE) as process:
        port = await asyncio.wait_for(_logged_port(process), WAIT_S)
        assert process.stderr is not None
        reading = asyncio.create_task(process.stderr.read())  # so that it can log as much as it likes
        try:
            yield Process(process, port)
        finally:
            reading.cancel()


async def _logged_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    lines = []
    while line := (await process.stderr.readline()).decode():
        lines.append(line)
        if "listens on" in line:
            return int(line.rsplit(":", 1)[1])
    raise AssertionError(f"the environment ended: {''.join(lines)}")
