"""Attached environments, a part of `benchmarks.reward`: batches of 64 trajectories from a caller to the hub, on to a process that has
dialled in, and their results back. Each of the three is a process of its own, and the scoring itself takes no time.

The limit is one bidirectional stream of gRPC between two processes with the same bytes there, and as many back as the results have: one
hop in the place of two, and nobody looks at the bytes. The same stream with the codec at its far end, which makes samples of the bytes
and results of the scores, is the limit for records. Of each, as many batches are under way as the scorer has with such an environment.

Then the time of one score with nothing else under way: with one and with a hundred streams attached, whose other ends score nothing and
share a process (`benchmarks.light_attached`); and of an environment alone, and beside one that takes a second for a trajectory and always
has some. Rounds of all alternate, so that a busy machine slows them alike; figures are medians of the rounds', of p99 too.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.bare_stream import BATCH, BYTES, RECORDS
from benchmarks.peer import TIMEOUT_S, free_port, process
from headrace import Sample
from headrace.env.wire import sample_to_wire
from headrace.net import rpc
from headrace.v1 import reward_pb2 as pb
from headrace.v1 import reward_pb2_grpc as pb_grpc
from headrace.v1 import trajectory_pb2

_UNDER_WAY = 4  # batches
_SIZES = {"1 KB": 1024, "64 KB": 64 * 1024}
# name: seconds that a score takes
_ENVIRONMENTS = {"fast": 0.0, "slow": 1.0}
# name: streams
_LIGHT = {"one": 1, "many": 100}
_HUB, _BYTES, _RECORDS = "hub and attached environment", "bare stream of bytes", "bare stream of records"
_ONE, _MANY = "one light stream", "100 light streams"
_ALONE, _BESIDE = "an environment alone", "the same beside one of 1 s a score"
_BASE = {_MANY: _ONE, _BESIDE: _ALONE}  # what they are times of
# The goals: of the bare stream's speed at least; of one stream's time at most, p99 and p50.
_SHARE, _TIMES, _UNCHANGED = 0.5, 2.0, 1.1


@dataclasses.dataclass(frozen=True)
class _Round:
    seconds: float
    latencies_ms: Sequence[float]  # of its calls


# Does so many calls.
_Road = Callable[[int], Awaitable[_Round]]


async def measure(rounds: int, batches: int, scores: int) -> None:
    """Print both tables. A round has so many batches of each size, and so many single scores."""
    with _processes() as (hub, bare):
        async with rpc.channel(hub) as channel, rpc.channel(bare) as bare_channel:
            stub = pb_grpc.RewardServiceStub(channel)
            while not await _all_attached(stub):  # noqa: ASYNC110  # what happens in another process sets no event
                await asyncio.sleep(0.1)
            for name, size in _SIZES.items():
                await _print_batches(stub, bare_channel, name, _request("fast", size), rounds, batches)
            await _print_scores(stub, rounds, scores)


@contextlib.contextmanager
def _processes() -> Iterator[tuple[str, str]]:
    """Addresses of a hub with all environments, and of the bare stream. gRPC is not in use yet: it would be in the way of forks."""
    ports = free_port(), free_port()
    hub, bare = (f"127.0.0.1:{port}" for port in ports)
    env = {name: {"attached": True} for name in (*_ENVIRONMENTS, *_LIGHT)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-"))
        config = Path(folder) / "hub.yaml"
        config.write_text(
            yaml.safe_dump({"run": {"id": "hub", "dir": folder}, "env": env, "reward": {"port": ports[0]}})
        )
        for words in (
            ["headrace.cli", "reward", "--config", str(config)],
            ["benchmarks.bare_stream", str(ports[1])],
            *(["benchmarks.attached_environment", hub, name, str(took)] for name, took in _ENVIRONMENTS.items()),
            *(["benchmarks.light_attached", hub, name, str(streams)] for name, streams in _LIGHT.items()),
        ):
            stack.enter_context(process([sys.executable, "-m", *words]))
        yield hub, bare


async def _all_attached(stub: Any) -> bool:
    listed = await stub.ListEnvironments(pb.ListEnvironmentsRequest(), wait_for_ready=True, timeout=TIMEOUT_S)
    return all(len(each.processes) == _LIGHT.get(each.name, 1) for each in listed.environments)


def _request(environment: str, size: int, count: int = BATCH) -> pb.ScoreRequest:
    """`count` trajectories of `size` bytes as they travel: token ids, and about four characters for each."""
    tokens = size // 7
    ids = tuple((np.arange(tokens) * 7919 % 50_000).tolist())
    sample = Sample("", {"answer": "42"}, ({"role": "user", "content": "6 * 7 ="},), ids, "stop", environment)
    room = size - sample_to_wire(sample).ByteSize() - 4  # of the completion, without its tag and length
    trajectory = sample_to_wire(dataclasses.replace(sample, completion="x" * room))
    return pb.ScoreRequest(trajectories=[trajectory] * count)


async def _score(stub: Any, request: pb.ScoreRequest) -> pb.ScoreResponse:
    """Raises `RuntimeError` unless all are scored."""
    response = await stub.Score(request, timeout=TIMEOUT_S)
    for result in response.results:
        if result.status != trajectory_pb2.STATUS_SCORED:
            raise RuntimeError(f"not scored: {result}")
    return response


def _scoring(stub: Any, request: pb.ScoreRequest, under_way: int) -> _Road:
    async def road(calls: int) -> _Round:
        room = asyncio.Semaphore(under_way)

        async def call() -> float:
            async with room:
                started = time.perf_counter()
                await _score(stub, request)
                return 1000 * (time.perf_counter() - started)

        began = time.perf_counter()
        latencies = await asyncio.gather(*(call() for _ in range(calls)))
        return _Round(time.perf_counter() - began, latencies)

    return road


def _streaming(stream: Any, batch: bytes | pb.ScoreRequest) -> _Road:
    """One stream, whose answers come in the order of what was sent."""

    async def road(calls: int) -> _Round:
        room = asyncio.Semaphore(_UNDER_WAY)
        sent: deque[float] = deque()
        latencies = []

        async def write() -> None:
            for _ in range(calls):
                await room.acquire()
                sent.append(time.perf_counter())
                await stream.write(batch)

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
    payload = request.SerializeToString()
    coded = bare.stream_stream(RECORDS, pb.ScoreRequest.SerializeToString, pb.ScoreResponse.FromString)
    roads = {
        _HUB: _scoring(stub, request, _UNDER_WAY),
        _BYTES: _streaming(bare.stream_stream(BYTES)(wait_for_ready=True), payload),
        _RECORDS: _streaming(coded(wait_for_ready=True), request),
    }
    found = await _alternating(roads, rounds, batches)
    seconds = {row: statistics.median(each.seconds for each in found[row]) / batches for row in roads}
    table = Table(
        title=f"Batches of {BATCH} trajectories of {name}, {_UNDER_WAY} under way ({batches} a round, {rounds} rounds)"
    )
    for column in ("", "trajectories/s", "MB/s", "batch p50, ms", "p99, ms", "share of bytes", "of records"):
        table.add_column(column, justify="left" if not column else "right")
    for row, took in seconds.items():
        shares = [f"{seconds[limit] / took:.2f}" for limit in (_BYTES, _RECORDS)]
        cells = f"{BATCH / took:,.0f}", f"{len(payload) / took / 1e6:,.1f}"
        table.add_row(row, *cells, *(f"{_quantile(found[row], percent):.2f}" for percent in (50, 99)), *shares)
    met = {limit: _verdict(seconds[limit] / seconds[_HUB] >= _SHARE) for limit in (_BYTES, _RECORDS)}
    table.caption = f"goal: at least {_SHARE} of the {_BYTES}: {met[_BYTES]}; of the {_RECORDS}: {met[_RECORDS]}"
    Console(width=120).print(table)


async def _print_scores(stub: Any, rounds: int, scores: int) -> None:
    size = _SIZES["1 KB"]
    named = {_ONE: "one", _MANY: "many", _ALONE: "fast"}
    roads = {row: _scoring(stub, _request(name, size, 1), 1) for row, name in named.items()}

    async def beside(calls: int) -> _Round:
        working = asyncio.create_task(_forever(stub, _request("slow", size)))
        try:
            return await roads[_ALONE](calls)
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # what else has ended it is raised
                await working

    found = await _alternating({**roads, _BESIDE: beside}, rounds, scores)
    table = Table(title=f"One score of 1 KB at a time ({scores} a round, {rounds} rounds)")
    for column in ("", "p50, ms", "p99, ms", "p50, times", "p99, times"):
        table.add_column(column, justify="left" if not column else "right")
    times: dict[str, list[float]] = {}
    for row in found:
        both, base = ([_quantile(found[each], percent) for percent in (50, 99)] for each in (row, _BASE.get(row, row)))
        times[row] = [it / of for it, of in zip(both, base, strict=True)]
        table.add_row(row, *(f"{it:.2f}" for it in both), *(f"{it:.2f}" for it in times[row]))
    many, slow = times[_MANY][1], times[_BESIDE][0]
    table.caption = (
        f"goals: p99 of {_MANY} at most {_TIMES} times one's: {_verdict(many <= _TIMES)};\n"
        f"p50 beside a slow environment at most {_UNCHANGED} times that of one alone: {_verdict(slow <= _UNCHANGED)}"
    )
    Console(width=120).print(table)


async def _forever(stub: Any, request: pb.ScoreRequest) -> None:
    while True:
        await _score(stub, request)


async def _alternating(roads: Mapping[str, _Road], rounds: int, calls: int) -> dict[str, list[_Round]]:
    """By road; what its first call costs is in no round."""
    found: dict[str, list[_Round]] = defaultdict(list)
    for road in roads.values():
        await road(1)
    for _ in range(rounds):
        for row, road in roads.items():
            found[row].append(await road(calls))
    return found


def _quantile(rounds: Sequence[_Round], percent: int) -> float:
    return statistics.median(float(np.percentile(each.latencies_ms, percent)) for each in rounds)


def _verdict(good: bool) -> str:
    return "met" if good else "missed"
