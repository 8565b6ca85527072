"""A real server with the real functions, but for three things: its clock is a key that the test sets, so that time passes when the test
says so; its memory is another; and a call looks at fewer deadlines, and cohorts of suspects are larger, for the few groups of a test."""

from __future__ import annotations

from redis.asyncio import Redis

from headrace_services.replay import library
from tests.properties.model import COHORTS, SWEEP
from tests.properties.scoring import FIRST, MOST_RESCORED, WINDOW

CLOCK = "clock"
# How the functions ask the server for the time (_run.lua), and what they ask here.
_ASKS = "local time = redis.call('TIME')\n  return time[1] * 1000 + math.floor(time[2] / 1000)"
_READS = f"return tonumber(redis.call('GET', '{CLOCK}'))"
# Bytes that the server may still take (_memory.lua): all, unless the key says how many.
MEMORY = "memory"
_LOOKS = "local info = redis.call('INFO', 'memory')"
_SAYS = f"local left = redis.call('GET', '{MEMORY}')\n  if left then return tonumber(left) end\n  local info = ''"
_SWEEPS = "local SWEEP = 64"
_WINDOWS = "local WINDOW, FIRST = 32, 8"
_RESCORED = "MOST_RESCORED = 8\n"
_COHORTS = "local COHORTS = 8"
# A time of day, so that sums are of the size they have in earnest.
START_MS = 1_800_000_000_000


def for_test(source: str) -> str:
    """The library, its clock and memory the keys."""
    assert source.count(_ASKS) == source.count("'TIME'") == 1, (
        "the functions read the clock in another way: see server_ms"
    )
    assert source.count(_LOOKS) == source.count("'INFO'") == 1, (
        "the functions look at memory in another way: see room_left"
    )
    assert source.count(_SWEEPS) == 1, "the functions bound their sweeps in another way: see _due.lua"
    assert source.count(_WINDOWS) == 1, "the functions judge an environment in another way: see _scoring.lua"
    assert source.count(_RESCORED) == 1, "the functions bound changes of the build in another way: see _scoring.lua"
    assert source.count(_COHORTS) == 1, "the functions make cohorts of suspects in another way: see _group.lua"
    source = source.replace(_WINDOWS, f"local WINDOW, FIRST = {WINDOW}, {FIRST}")
    source = source.replace(_RESCORED, f"MOST_RESCORED = {MOST_RESCORED}\n")
    source = source.replace(_SWEEPS, f"local SWEEP = {SWEEP}").replace(_COHORTS, f"local COHORTS = {COHORTS}")
    return source.replace(_ASKS, _READS).replace(_LOOKS, _SAYS)


async def load(redis: Redis, source: str | None = None) -> None:
    await redis.set(CLOCK, START_MS)
    await redis.function_load(for_test(source or library.built_in().source()), replace=True)
