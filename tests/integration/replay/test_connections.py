"""The client's connection pool."""

from __future__ import annotations

import asyncio

from headrace.replay import ReplayClient


async def test_calls_beyond_the_pool_wait_for_a_connection(replay: ReplayClient) -> None:
    states = await asyncio.gather(*(replay.state() for _ in range(1000)))
    assert {state.run_id for state in states} == {replay.run_id}
