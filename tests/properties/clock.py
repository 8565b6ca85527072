"""A real server with the real functions, whose clock is a key that the test sets: time passes when the test says so."""

from __future__ import annotations

from redis.asyncio import Redis

from services.replay import library

CLOCK = "clock"
# How the functions ask the server for the time (_run.lua), and what they ask here.
_ASKS = "local time = redis.call('TIME')\n  return time[1] * 1000 + math.floor(time[2] / 1000)"
_READS = f"return tonumber(redis.call('GET', '{CLOCK}'))"
# A time of day, so that sums are of the size they have in earnest.
START_MS = 1_800_000_000_000


def with_clock(source: str) -> str:
    """The library with the one place that reads the server's clock reading the key instead."""
    assert source.count(_ASKS) == source.count("'TIME'") == 1, (
        "the functions read the clock in another way: see server_ms"
    )
    return source.replace(_ASKS, _READS)


async def load(redis: Redis, source: str | None = None) -> None:
    await redis.set(CLOCK, START_MS)
    await redis.function_load(with_clock(source or library.source()), replace=True)
