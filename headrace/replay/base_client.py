"""The base of the client's parts: payloads in batches, the run's state, the fleet and its newest epoch."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from headrace.base.errors import InvalidCall
from headrace.replay.connection import BufferConnection, WakeupSubscription
from headrace.replay.records import (
    EnvironmentState,
    Epoch,
    Replica,
    Runner,
    RunState,
    decode_epoch,
    decode_info,
    decode_run_state,
    unpack,
)

# BATCH: entries in one call of a batched function (BATCH in _args.lua). PAYLOADS: payloads that are read in one round trip.
BATCH = 256
PAYLOADS = 64
# Payloads that are written in one round trip, and their bytes. With fewer, round trips cost more. With more, the server is idle
# until the first are encoded, and they wait in the client's memory for the socket (`benchmarks.replay`).
WRITTEN = 32
WRITTEN_BYTES = 4 << 20
# Concurrent round trips with payloads.
READS, WRITES = 4, 2

T = TypeVar("T")
R = TypeVar("R")


class BufferClient:
    """One connection pool to the buffer of one run."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.run_id = run_id
        self.redis = redis
        self._connection = BufferConnection(redis, run_id)
        self._wakeups = WakeupSubscription(self._connection)
        self._incarnation: str | None = None
        self._reads, self._writes = asyncio.Semaphore(READS), asyncio.Semaphore(WRITES)
        self._epoch: Epoch | None = None  # the newest that a heartbeat brought
        # identify calls that change nothing when they arrive again, however late
        self._name, self._numbers = secrets.token_hex(8), itertools.count(1)

    async def aclose(self) -> None:
        await self._wakeups.aclose()
        await self.redis.aclose()

    async def state(self) -> RunState:
        return self._note(await self._connection.call("state"))

    async def replicas(self) -> list[Replica]:
        return await self._members("replicas", Replica)

    async def runners(self) -> list[Runner]:
        return await self._members("runners", Runner)

    async def _members(self, function: str, kind: type[T]) -> list[T]:
        found = await self._connection.call(function)
        return [msgspec.convert({**unpack(member), "info": decode_info(info)}, kind) for member, info in found]

    async def environments(self) -> list[EnvironmentState]:
        """Return the state of each environment of the groups enqueued so far, by name."""
        return msgspec.convert(unpack(await self._connection.call("environments")), list[EnvironmentState])

    async def epoch(self) -> Epoch | None:
        """Return the newest epoch."""
        reply = await self._connection.call("epoch")
        return None if reply is None else decode_epoch(reply)

    async def _fetch(self, keys: Sequence[Any]) -> list[bytes | None]:
        return await self._connection.command("MGET", *keys) if keys else []

    async def _held(self, keys: Sequence[Any]) -> list[bytes]:
        """Return values that must exist. Raises `InvalidCall` if one was freed since its key was read."""
        values = await self._fetch(keys)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                raise InvalidCall(f"{key!r} is no longer held; it was committed, dropped or rewound")
        return [value for value in values if value is not None]

    async def make_room(self, refused: int = 0, sheds: bool = True) -> int:
        """Maintain the buffer; called once a second. Its run time advances, what is due ends, and room is made if its server is at its
        memory limit. `refused` is the number of bytes that it did not accept from the caller; `sheds`: groups may be sent back. Returns the
        refused bytes that still don't fit, or 0."""
        return int(await self._connection.call("make_room", refused=refused, sheds=sheds))

    async def _until_done(self, function: str, **arguments: Any) -> None:
        """Call a function that does a bounded part of its work per call, and returns how much is left, until nothing is left."""
        while await self._connection.call(function, **arguments):
            pass

    def _number(self) -> dict[str, Any]:
        """Return arguments by which the buffer recognizes a repeated call of this client."""
        return {"client": self._name, "number": next(self._numbers)}

    def _note(self, reply: bytes) -> RunState:
        state = decode_run_state(reply)
        self._incarnation = state.incarnation
        return state

    async def _sweep_old_incarnations(self) -> None:
        """Delete the keys of incarnations that a restore has ended."""
        for old in await self._connection.command("SMEMBERS", f"{self._connection.key}:old"):
            pattern = f"{self._connection.key}:{old.decode()}:*"
            async for keys in self._scan(pattern):
                await self._connection.command("UNLINK", *keys)
            await self._connection.command("SREM", f"{self._connection.key}:old", old)

    async def _scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        cursor = 0
        while True:
            cursor, keys = await self._connection.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            if keys:
                yield keys
            if not int(cursor):
                return


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


async def transfer_all(
    transfer: Callable[[Sequence[T]], Awaitable[list[R]]], batches: Iterable[Sequence[T]], at_a_time: asyncio.Semaphore
) -> list[R]:
    """Read or write payloads, a few round trips at a time, so that one batch is encoded or decoded while the server works on another."""

    async def one(batch: Sequence[T]) -> list[R]:
        async with at_a_time:
            return await transfer(batch)

    results = await asyncio.gather(*map(one, batches))
    return [result for batch in results for result in batch]


def of_bounded_size(items: Sequence[T], size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Yield batches of at most `WRITTEN` items and `WRITTEN_BYTES`, or of one larger item."""
    start = written = 0
    for end, item in enumerate(items):
        nbytes = size(item)
        if end > start and (end - start == WRITTEN or written + nbytes > WRITTEN_BYTES):
            yield items[start:end]
            start, written = end, 0
        written += nbytes
    if items:
        yield items[start:]
