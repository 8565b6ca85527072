"""A task that waits on the buffer stops when it is cancelled, whatever it was doing."""

from __future__ import annotations

import asyncio

import pytest

from headrace.replay import ReplayClient


async def forever(replay: ReplayClient, what: str) -> None:
    while True:
        if what == "call":
            await replay.state()
        else:
            await replay.wait_scoring(0.1)


@pytest.mark.parametrize("what", ["call", "wait"])
async def test_a_cancellation_is_never_lost(replay: ReplayClient, what: str) -> None:
    for turns in range(200):
        task = asyncio.create_task(forever(replay, what))
        for _ in range(turns):
            await asyncio.sleep(0)
        await replay.redis.publish(f"hr:{{{replay.run_id}}}:wake:scoring", "1")
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=30.0)
        assert done, f"cancelled after {turns} turns of the loop, it went on"
        assert task.cancelled()
