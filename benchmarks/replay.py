"""Trajectories a second through the buffer, beside raw pipelined SET and GET of the same bytes on the same server.

    python -m benchmarks.replay [--bytes N] [--steps N] [--batch GROUPSxTRAJECTORIES] [--redis-url URL]

The buffer takes each trajectory from a replica (push), hands it to a scorer and takes the score (take, score), hands it to the
trainer (reserve, read) and frees it (commit): one write and two reads of the payload, every law of the state machine checked.
The limit is what the same client and server do with the same bytes in pipelines of 64 and nothing else: SET, GET for the scorer,
GET for the trainer, UNLINK. Rounds of both alternate, so that a busy machine slows them alike; figures are medians.

The calls that are timed take and give records, raw commands take and give bytes. So there are two limits: raw commands and the codec
together, beside the buffer; and raw commands alone, beside the buffer less what the codec takes (and, stricter than like for
like, beside the whole).

Then the trainer's side of a large step (512 groups of 16): `reserve`, which checks every law for each group, and `read`, which gives
records, beside raw GETs of the same bytes, and beside the GETs with the codec.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.buffer import BYTES_A_TOKEN, group, limits, refit, server, verified_replica
from headrace.records.score import Score
from headrace.records.trajectory import Span, Trajectory
from headrace.replay import Lease, ReplayClient, Reservation
from headrace.replay.connection import open_redis
from headrace_services.replay import library

PROMPTS, GENERATIONS = 32, 8
PIPELINE = 64


class Stopwatch:
    """Seconds by name, one entry a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - start)

    def median(self, *names: str) -> float:
        return sum(statistics.median(self.seconds[name]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=16 * 1024, help="of one trajectory")
    parser.add_argument("--steps", type=int, default=20, help=f"rounds of {PROMPTS} groups of {GENERATIONS}")
    parser.add_argument("--batch", default="512x16", help="groups x trajectories of the large step; 0x0 leaves it out")
    parser.add_argument("--redis-url", help="a server of yours; without it one is started for the run")
    args = parser.parse_args()
    if args.redis_url is not None:
        asyncio.run(_compare(args.redis_url, args))
        return
    with server() as buffer:
        asyncio.run(_compare(buffer.url, args))


async def _compare(url: str, args: argparse.Namespace) -> None:
    async with open_redis(url) as redis:
        await library.load(redis)
        replay = ReplayClient(open_redis(url), f"benchmark-{secrets.token_hex(4)}")
        await replay.open_run(limits(PROMPTS, GENERATIONS))
        replica = await verified_replica(replay)
        watch = Stopwatch()
        payload_bytes = 0
        for step in range(args.steps):
            trajectories = await _buffer_round(replay, replica, step, args.bytes, watch)
            payload_bytes = len(trajectories[0].encode())
            await _raw_round(redis, trajectories, watch)
        await replay.aclose()
        _print(watch, payload_bytes)
        groups, generations = map(int, args.batch.split("x"))
        if groups:
            await _large_step(url, redis, groups, generations, args.bytes)


async def _buffer_round(replay: ReplayClient, replica: str, step: int, size: int, watch: Stopwatch) -> list[Trajectory]:
    timeline = (await replay.state()).timeline
    groups = [group(step * PROMPTS + i, GENERATIONS, size // BYTES_A_TOKEN) for i in range(PROMPTS)]
    with watch.time("enqueue"):
        await replay.enqueue(groups, timeline)
    with watch.time("lease"):
        leases = await replay.lease(replica, PROMPTS)
    items = [(lease, _trajectory(lease, index, size)) for lease in leases for index in range(GENERATIONS)]
    with watch.time("push"):
        errors = await replay.push_many(items)
    assert not any(errors)
    with watch.time("take"):
        jobs = await replay.take_scoring({"math": len(items)})
    scores = [(job, Score("SCORED", 1.0, {"exact": 1.0}, environment="math")) for job in jobs]
    with watch.time("score"):
        refusals = await replay.score_many(scores)
    assert len(refusals) == len(items)
    assert not any(refusals)
    with watch.time("reserve"):
        batch = await replay.reserve(step, timeline)
    assert isinstance(batch, Reservation)
    with watch.time("read"):
        pairs = await replay.read([t.key for t in batch.trajectories])
    assert len(pairs) == len(items)
    with watch.time("commit"):
        await replay.commit(step + 1, timeline)
    await refit(replay, step + 1, [replica])
    return [trajectory for _, trajectory in items]


async def _large_step(url: str, redis: Redis, groups: int, generations: int, size: int) -> None:
    """A step of `groups` x `generations`; five readings of it beside five of the same bytes by raw GETs, in turn."""
    replay = ReplayClient(open_redis(url), f"benchmark-{secrets.token_hex(4)}")
    timeline = (await replay.open_run(limits(groups, generations))).timeline
    replica = await verified_replica(replay)
    prompts = [group(i, generations, size // BYTES_A_TOKEN) for i in range(groups)]
    await replay.enqueue(prompts, timeline)
    while leases := await replay.lease(replica, 256):
        for lease in leases:
            await replay.push_many([(lease, _trajectory(lease, index, size)) for index in range(generations)])
    while jobs := await replay.take_scoring({"math": 256}):
        await replay.score_many([(job, Score("SCORED", 1.0)) for job in jobs])
    watch = Stopwatch()
    for _ in range(5):
        with watch.time("reserve"):  # from the second time on a repeat, which gives the same batch
            batch = await replay.reserve(0, timeline)
        assert isinstance(batch, Reservation)
        keys = [t.key for t in batch.trajectories]
        with watch.time("read"):
            pairs = await replay.read(keys)
        assert len(pairs) == groups * generations
        del pairs
        with watch.time("raw GET"):
            values = await _pipelined(redis, [("GET", key) for key in keys])
        with watch.time("decode"):
            for value in values:
                Trajectory.decode(value)
        del values
    await replay.aclose()
    first = watch.seconds["reserve"][0]
    whole, raw = first + watch.median("read"), watch.median("raw GET")
    table = Table(title=f"The trainer's batch: {groups} groups of {generations}, {size:,} bytes a trajectory")
    for column in ("what", "s", "of raw GETs"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, seconds in (
        ("raw GETs, pipelines of 64", raw),
        ("decode", watch.median("decode")),
        ("reserve", first),
        ("read", watch.median("read")),
        ("reserve and read", whole),
    ):
        table.add_row(name, f"{seconds:.3f}", f"{seconds / raw:.2f}")
    table.add_row("reserve and read, beside raw GETs and decode", "", f"{whole / (raw + watch.median('decode')):.2f}")
    Console(width=100).print(table)


async def _raw_round(redis: Redis, trajectories: Sequence[Trajectory], watch: Stopwatch) -> None:
    with watch.time("raw encode"):
        payloads = [trajectory.encode() for trajectory in trajectories]
    keys = [f"raw:{secrets.token_hex(8)}" for _ in payloads]
    with watch.time("raw SET"):
        await _pipelined(redis, [("SET", key, payload) for key, payload in zip(keys, payloads, strict=True)])
    for reader in ("scorer", "trainer"):
        with watch.time(f"raw GET {reader}"):
            values = await _pipelined(redis, [("GET", key) for key in keys])
    assert values == payloads
    with watch.time("raw decode"):
        for value in values:
            Trajectory.decode(value)
    with watch.time("raw UNLINK"):
        await _pipelined(redis, [("UNLINK", key) for key in keys])


async def _pipelined(redis: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies: list[Any] = []
    for start in range(0, len(commands), PIPELINE):
        pipe = redis.pipeline(transaction=False)
        for command in commands[start : start + PIPELINE]:
            pipe.execute_command(*command)
        replies += await pipe.execute()
    return replies


def _print(watch: Stopwatch, payload_bytes: int) -> None:
    count = PROMPTS * GENERATIONS
    phases = {
        name: watch.median(name) for name in ("enqueue", "lease", "push", "take", "score", "reserve", "read", "commit")
    }
    buffer = sum(phases.values())
    codec = watch.median("raw encode") + 2 * watch.median("raw decode")
    raw = {name: watch.median(f"raw {name}") for name in ("SET", "GET scorer", "GET trainer", "UNLINK")}
    limit = sum(raw.values())
    table = Table(title=f"{count} trajectories of {payload_bytes:,} bytes a step, groups of {GENERATIONS}")
    for column in ("what", "µs a trajectory", "trajectories/s", "share of the limit"):
        table.add_column(column, justify="left" if column == "what" else "right")

    def row(name: str, seconds: float, limit: float | None = None) -> None:
        share = "" if limit is None else f"{limit / seconds:.2f}"
        table.add_row(name, f"{seconds / count * 1e6:.1f}", f"{count / seconds:,.0f}", share)

    for name, seconds in phases.items():
        row(f"  {name}", seconds)
    for name, seconds in raw.items():
        row(f"  raw {name}", seconds)
    row("  encode, decode twice", codec)
    table.add_section()
    row("limit for records: raw and codec", limit + codec)
    row("buffer", buffer, limit + codec)
    table.add_section()
    row("limit for bytes: raw", limit)
    row("buffer less the codec", buffer - codec, limit)
    row("buffer", buffer, limit)
    Console(width=100).print(table)


def _trajectory(lease: Lease, index: int, size: int) -> Trajectory:
    """About `size` bytes: token ids, log-probabilities and mask, as a real one of that length carries them."""
    draft = Trajectory(
        group_id=lease.group.id,
        attempt=lease.attempt,
        index=index,
        prompt_token_ids=lease.group.prompt_token_ids,
        completion_token_ids=np.arange(1, dtype=np.int32),
        logprobs=np.full(1, -0.5, dtype=np.float32),
        loss_mask=np.ones(1, dtype=np.uint8),
        spans=(Span(lease.version, 0, 1),),
        finish_reason="stop",
        text="2",
        replica="replica",
    )
    tokens = max(1, (size - len(draft.encode())) // BYTES_A_TOKEN)
    return msgspec.structs.replace(
        draft,
        completion_token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        loss_mask=np.ones(tokens, dtype=np.uint8),
        spans=(Span(lease.version, 0, tokens),),
    )


if __name__ == "__main__":
    main()
