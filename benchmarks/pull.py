"""What it takes to put a version of the weights into a store, and to pull it, beside a bare copy of the same bytes.

    python -m benchmarks.pull
    python -m benchmarks.pull --megabytes 4096 --store s3://bucket/benchmark

By what has changed since the version before, numbers of a model in bfloat16 or whole blocks: the megabytes that are sent and fetched, and
the seconds of `send` (digests, blocks, patches, list) and of `fetch` (blocks or patches, digests, file), each the median of the rounds.
`copy` is that of a file with all bytes, by one thread, without digests.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from headrace.run.object_store import RunStore
from headrace.run.weight_store import BLOCK_BYTES, PublishedWeights, PulledWeights

ROUNDS = 5
PART = 256 << 20  # a bucket of a GPU's


def measure(url: str, size: int, folder: Path) -> dict[str, tuple[float, ...]]:
    """By row: megabytes sent and fetched, seconds to send and to fetch."""
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
        for _ in range(ROUNDS):
            change()
            version += 1
            now = weights.copy()  # what was published stays as it is
            parts = [now[begin : begin + PART].data for begin in range(0, size, PART)]
            began = time.perf_counter()
            digest = published.publish(version, {}, [], parts)
            sent = time.perf_counter()
            pulled.fetch(pulled.read_list("benchmark", version, digest))
            ended = time.perf_counter()
            samples.append((published.sent_bytes / 1e6, pulled.fetched_bytes / 1e6, sent - began, ended - sent))
            published.clean(0)
        rows[name] = tuple(statistics.median(column) for column in zip(*samples, strict=True))
    assert (folder / "weights").read_bytes() == weights.tobytes()
    copies = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        shutil.copyfile(folder / "weights", folder / "copy")
        copies.append(time.perf_counter() - began)
    rows["copy"] = (size / 1e6, size / 1e6, statistics.median(copies), statistics.median(copies))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--store", help="an object store; by default a folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = arguments.store or f"file://{folder}/store"
        rows = measure(f"{store}/{uuid.uuid4().hex[:8]}", arguments.megabytes << 20, folder)
    table = Table("changed", "MB sent", "MB fetched", "send, s", "fetch, s")
    for name, (sent, fetched, send, fetch) in rows.items():
        table.add_row(name, f"{sent:.0f}", f"{fetched:.0f}", f"{send:.2f}", f"{fetch:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
