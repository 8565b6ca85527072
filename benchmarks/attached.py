"""Attached environments, a part of `benchmarks.reward`: batches of 64 trajectories from a caller to the hub, on to a process that has
dialled in, and their results back. Each of the three is a process of its own, and the scoring itself takes no time.

The limit is one bidirectional stream of gRPC between two processes with the codec at its far end, which makes samples of the bytes and
results of the scores: one hop in the place of two. Of each, as many batches are under way as the scorer has with such an environment.
Rounds of both alternate, so that a busy machine slows them alike; figures are medians of the rounds', of p99 too.

    python -m benchmarks.attached HUB          is the process that dials in
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

import headrace
from benchmarks import bare_stream
from benchmarks.processes import TIMEOUT_S, process
from headrace.env.wire import sample_to_wire
from headrace.net import rpc
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.v1 import trajectory_pb2
from tests.support.ports import free_port

_BATCH, _UNDER_WAY = 64, 4  # trajectories of a batch, batches
_SIZES = {"1 KB": 1024, "64 KB": 64 * 1024}
_NAME = "length"
_HUB, _BARE = "hub and attached environment", "bare stream"
_SHARE = 0.5  # the goal: of the bare stream's speed at least


class Length(headrace.Environment):
    concurrency = _BATCH * _UNDER_WAY

    async def score(self, sample: headrace.Sample) -> float:
        return float(len(sample.completion))


@dataclasses.dataclass(frozen=True)
class _Round:
    seconds: float
    latencies_ms: Sequence[float]  # of its calls


# Does so many calls.
_Road = Callable[[int], Awaitable[_Round]]


async def measure(rounds: int, batches: int) -> None:
    """Print a table for each size. A round has so many batches."""
    with _processes() as (hub, bare):
        async with rpc.channel(hub) as channel, rpc.channel(bare) as bare_channel:
            stub = pb_grpc.RewardServiceStub(channel)
            while not await _is_attached(stub):  # noqa: ASYNC110  # what happens in another process sets no event
                await asyncio.sleep(0.1)
            for name, size in _SIZES.items():
                await _print_batches(stub, bare_channel, name, _request(size), rounds, batches)


@contextlib.contextmanager
def _processes() -> Iterator[tuple[str, str]]:
    """Addresses of a hub with the environment, and of the bare stream. gRPC is not in use yet: it would be in the way of forks."""
    ports = free_port(), free_port()
    hub, bare = (f"127.0.0.1:{port}" for port in ports)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-"))
        config = Path(folder) / "hub.yaml"
        run = {"id": "hub", "dir": folder}
        config.write_text(
            yaml.safe_dump({"run": run, "env": {_NAME: {"attached": True}}, "reward": {"port": ports[0]}})
        )
        for words in (
            ["headrace.cli", "reward", "--config", str(config)],
            ["benchmarks.bare_stream", str(ports[1])],
            ["benchmarks.attached", hub],
        ):
            stack.enter_context(process([sys.executable, "-m", *words]))
        yield hub, bare


async def _is_attached(stub: Any) -> bool:
    listed = await stub.ListEnvironments(pb.ListEnvironmentsRequest(), wait_for_ready=True, timeout=TIMEOUT_S)
    return bool(listed.environments[0].processes)


def _request(size: int) -> pb.ScoreRequest:
    """A batch of trajectories of `size` bytes as they travel: token ids, and about four characters for each."""
    tokens = size // 7
    ids = tuple((np.arange(tokens) * 7919 % 50_000).tolist())
    sample = headrace.Sample("", {"answer": "42"}, ({"role": "user", "content": "6 * 7 ="},), ids, "stop", _NAME)
    room = size - sample_to_wire(sample).ByteSize() - 4  # of the completion, without its tag and length
    trajectory = sample_to_wire(dataclasses.replace(sample, completion="x" * room))
    return pb.ScoreRequest(trajectories=[trajectory] * _BATCH)


def _scoring(stub: Any, request: pb.ScoreRequest) -> _Road:
    async def road(calls: int) -> _Round:
        room = asyncio.Semaphore(_UNDER_WAY)

        async def call() -> float:
            async with room:
                started = time.perf_counter()
                for result in (await stub.Score(request, timeout=TIMEOUT_S)).results:
                    if result.status != trajectory_pb2.STATUS_SCORED:
                        raise RuntimeError(f"not scored: {result}")
                return 1000 * (time.perf_counter() - started)

        began = time.perf_counter()
        latencies = await asyncio.gather(*(call() for _ in range(calls)))
        return _Round(time.perf_counter() - began, latencies)

    return road


def _streaming(stream: Any, request: pb.ScoreRequest) -> _Road:
    """One stream, whose answers come in the order of what was sent."""

    async def road(calls: int) -> _Round:
        room = asyncio.Semaphore(_UNDER_WAY)
        sent: deque[float] = deque()
        latencies = []

        async def write() -> None:
            for _ in range(calls):
                await room.acquire()
                sent.append(time.perf_counter())
                await stream.write(request)

        began = time.perf_counter()
        writing = asyncio.create_task(write())
        for _ in range(calls):
            await stream.read()
            latencies.append(1000 * (time.perf_counter() - sent.popleft()))
            room.release()
        await writing
        return _Round(time.perf_counter() - began, latencies)

    return road


async def _print_batches(stub: Any, bare: Any, name: str, request: pb.ScoreRequest, rounds: int, batches: int) -> None:
    method = f"/{bare_stream.SERVICE}/{bare_stream.METHOD}"
    stream = bare.stream_stream(method, pb.ScoreRequest.SerializeToString, pb.ScoreResponse.FromString)
    roads = {_HUB: _scoring(stub, request), _BARE: _streaming(stream(wait_for_ready=True), request)}
    found: dict[str, list[_Round]] = defaultdict(list)
    for road in roads.values():
        await road(1)  # what the first call costs is in no round
    for _ in range(rounds):
        for row, road in roads.items():
            found[row].append(await road(batches))
    seconds = {row: statistics.median(each.seconds for each in found[row]) / batches for row in roads}
    table = Table(
        title=f"Batches of {_BATCH} trajectories of {name}, {_UNDER_WAY} under way ({batches} a round, {rounds} rounds)"
    )
    for column in ("", "trajectories/s", "MB/s", "batch p50, ms", "p99, ms"):
        table.add_column(column, justify="left" if not column else "right")
    for row, took in seconds.items():
        cells = f"{_BATCH / took:,.0f}", f"{request.ByteSize() / took / 1e6:,.1f}"
        table.add_row(row, *cells, *(f"{_quantile(found[row], percent):.2f}" for percent in (50, 99)))
    share = seconds[_BARE] / seconds[_HUB]
    table.caption = f"the hub's share: {share:.2f}; goal: at least {_SHARE}: {'met' if share >= _SHARE else 'missed'}"
    Console(width=120).print(table)


def _quantile(rounds: Sequence[_Round], percent: int) -> float:
    return statistics.median(float(np.percentile(each.latencies_ms, percent)) for each in rounds)


if __name__ == "__main__":
    headrace.attach(sys.argv[1], Length(), _NAME)
