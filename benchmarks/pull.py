"""What it takes to put a version of the weights into a store, and to pull it, beside a bare copy of the same bytes.

    python -m benchmarks.pull
    python -m benchmarks.pull --megabytes 4096 --store s3://bucket/benchmark
    python -m benchmarks.pull --megabytes 64 --pullers 8 --rate 100

By what has changed since the version before, numbers of a model in bfloat16 or whole blocks: the megabytes that are sent and fetched, and
the seconds of `send` (digests, blocks, patches, list) and of `fetch` (blocks or patches, digests, file), by the clock and of all cores,
each the median of the rounds.
`copy` is that of a file with all bytes, by one thread, without digests.

With several pullers, the seconds until the last of them has a version, and what the store sent, with and without those above them in the
tree. They have no engines and share this machine, each in a process of its own; the store is one of the tests, which sends at most `rate`
MB/s.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from headrace.config import Config
from headrace.run.object_store import RunStore
from headrace.run.weight_store import BLOCK_BYTES, PublishedWeights, PulledWeights
from headrace_services.rollout import peers
from tests.support.pullers import Buffer, Trainer, running
from tests.support.s3_server import s3_server

PART = 256 << 20  # a bucket of a GPU's


def measure(url: str, size: int, folder: Path, rounds: int) -> dict[str, tuple[float, ...]]:
    """By row: megabytes sent and fetched, seconds to send and to fetch, and CPU seconds for it."""
    random = np.random.default_rng(0)
    weights = random.integers(0, 256, size, np.uint8)
    published, pulled = PublishedWeights(RunStore(url), "benchmark"), PulledWeights(RunStore(url), folder / "weights")
    version, rows = 0, {}

    def change_numbers(share: float) -> None:
        numbers = weights.view(np.uint16)
        for begin in range(0, len(numbers), 1 << 20):
            part = numbers[begin : begin + (1 << 20)]
            part[random.random(len(part), np.float32) < share] += 1

    def change_blocks() -> None:
        for begin in random.permutation(range(0, size, BLOCK_BYTES))[: size // BLOCK_BYTES * 3 // 100]:
            weights[begin : begin + BLOCK_BYTES] += 1

    cases: dict[str, Callable[[], None]] = {
        "all numbers": lambda: change_numbers(1.0),
        "3 % of the numbers": lambda: change_numbers(0.03),
        "3 % of the blocks": change_blocks,
        "nothing": lambda: None,
    }
    for name, change in cases.items():
        samples = []
        for _ in range(rounds):
            weights = weights.copy()  # what was published stays as it is
            change()
            version += 1
            parts = [weights[begin : begin + PART].data for begin in range(0, size, PART)]
            began = _clocks()
            digest = published.publish(version, {}, [], parts)
            sent = _clocks()
            pulled.fetch(pulled.read_list("benchmark", version, digest))
            seconds = [sent - began, _clocks() - sent]
            moved = (published.sent_bytes / 1e6, pulled.fetched_bytes / 1e6)
            samples.append((*moved, *(clock for clocks in zip(*seconds, strict=True) for clock in clocks)))
            published.clean(0)
        rows[name] = tuple(statistics.median(column) for column in zip(*samples, strict=True))
    assert _digest(folder / "weights") == hashlib.sha256(weights.data).hexdigest()
    copies = []
    for _ in range(rounds):
        began = _clocks()
        shutil.copyfile(folder / "weights", folder / "copy")
        copies.append(_clocks() - began)
    clock, cpu = np.median(copies, axis=0)
    rows["copy"] = (size / 1e6, size / 1e6, clock, clock, cpu, cpu)
    return rows


def _clocks() -> NDArray[np.float64]:
    return np.array([time.perf_counter(), time.process_time()])


def measure_pullers(size: int, count: int, rate: float, folder: Path, tree: bool) -> dict[str, tuple[float, ...]]:
    """By row: megabytes that the store sent, seconds until the last puller had all, and milliseconds that the loop of a puller stood still
    at most."""
    random = np.random.default_rng(0)
    weights = random.integers(0, 256, size, np.uint8).view(np.uint16)
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as store:
        url = "s3://bucket/benchmark"
        rows: dict[str, tuple[float, ...]] = {}
        buffer = Buffer()
        trainer, context = Trainer(url, buffer), multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for place in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_pull, args=(theirs, place, url, folder / f"{tree}-{place}"), daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        urls = [pipe.recv() for pipe in pipes]
        for version, (name, share) in enumerate({"all numbers": 1.0, "3 % of the numbers": 0.03}.items(), 1):
            weights = weights.copy()
            weights[random.random(len(weights), np.float32) < share] += 1
            trainer.offer(version, weights)
            store.rate, store.sent_bytes = rate * 1e6, 0
            began = time.perf_counter()
            for pipe in pipes:
                pipe.send((buffer.offer, urls if tree else []))
            digest = hashlib.sha256(weights.data).hexdigest()
            told = [pipe.recv() for pipe in pipes]
            seconds = max(ended for ended, _, _ in told) - began
            assert {found for _, found, _ in told} == {digest}
            rows[name] = (store.sent_bytes / 1e6, seconds, 1e3 * max(still for _, _, still in told))
            store.rate = math.inf
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(None)
            process.join()
    return rows


def _pull(pipe: Connection, place: int, url: str, folder: Path) -> None:
    """The process of one puller."""
    asyncio.run(_pull_all(pipe, place, url, folder))


async def _pull_all(pipe: Connection, place: int, url: str, folder: Path) -> None:
    config, buffer = Config.model_validate({"replay": {"redis_url": "unix:///none"}}), Buffer()
    async with running(1, url, buffer, folder, config) as (replica,):
        replica.name = f"r{place}"
        pipe.send(replica.url)
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            buffer.offer, urls = told
            buffer.infos = {f"r{other}": {"url": one, peers.SERVES: one} for other, one in enumerate(urls)}
            still = asyncio.create_task(_stands_still())
            await replica.install()
            ended = time.perf_counter()
            still.cancel()
            # others may still fetch from this one
            pipe.send((ended, await asyncio.to_thread(_digest, replica.file), max(_STILL, default=0.0)))
            _STILL.clear()


def _digest(file: Path) -> str:
    with file.open("rb") as bytes_:
        return hashlib.file_digest(bytes_, "sha256").hexdigest()


_STILL: list[float] = []


async def _stands_still() -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.002)
        _STILL.append(time.perf_counter() - began - 0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--store", help="an object store; by default a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pullers", type=int)
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s that the store sends to the pullers, together")
    arguments = parser.parse_args()
    if arguments.pullers is not None:
        table = Table("changed", "from each other", "MB from the store", "s to the last", "loop stood still, ms")
        with tempfile.TemporaryDirectory() as place:
            for tree in (False, True):
                rows = measure_pullers(arguments.megabytes << 20, arguments.pullers, arguments.rate, Path(place), tree)
                for name, (megabytes, seconds, still) in rows.items():
                    table.add_row(name, "yes" if tree else "no", f"{megabytes:.0f}", f"{seconds:.2f}", f"{still:.0f}")
        Console().print(table)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = arguments.store or f"file://{folder}/store"
        rows = measure(f"{store}/{uuid.uuid4().hex[:8]}", arguments.megabytes << 20, folder, arguments.rounds)
    table = Table("changed", "MB sent", "MB fetched", "send, s", "fetch, s", "send, CPU s", "fetch, CPU s")
    for name, (sent, fetched, *clocks) in rows.items():
        table.add_row(name, f"{sent:.0f}", f"{fetched:.0f}", *(f"{each:.2f}" for each in clocks))
    Console().print(table)


if __name__ == "__main__":
    main()
