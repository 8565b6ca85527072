"""The client's connections: the pool, what is missing at the other end, and what ends a wait."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from headrace.base.errors import ConfigError, ReplayUnavailable
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from tests.support.buffer import enqueue, nonce, push_all, refit, score_all
from tests.support.waiting import eventually


async def test_calls_beyond_the_pool_wait_for_a_connection(replay: ReplayClient) -> None:
    states = await asyncio.gather(*(replay.state() for _ in range(1000)))
    assert {state.run_id for state in states} == {replay.run_id}


async def test_connect_says_what_is_missing(redis_url: str, replay: ReplayClient) -> None:
    with pytest.raises(ReplayUnavailable, match="no run nowhere"):
        await ReplayClient.connect(redis_url, "nowhere", timeout_s=0.2)
    with pytest.raises(ReplayUnavailable, match="can't be reached"):
        await ReplayClient.connect("redis://127.0.0.1:1/0", "x", timeout_s=0.2)
    with pytest.raises(ConfigError, match="can't be used"):
        await ReplayClient.connect("http://127.0.0.1", "x", timeout_s=0.2)
    client = await ReplayClient.connect(redis_url)
    assert client.run_id == replay.run_id
    await client.aclose()


async def test_a_wake_up_ends_a_wait(replay: ReplayClient, redis_url: str, limits: Limits) -> None:
    """Waits end by the call that makes them worthwhile; a second's poll alone would make these four take four."""
    other = ReplayClient(open_redis(redis_url), replay.run_id)
    await other.open_run(limits)
    for wait in (other.wait_work, other.wait_ready, other.wait_scoring, other.wait_epoch):
        await wait(5.0)  # opens the subscription and drains what it brought
        await wait(0.01)
    replica = nonce()

    async def woken(channel: str) -> None:
        await asyncio.wait_for(other._wakeups._events[channel].wait(), 30)
        other._wakeups._events[channel].clear()

    await replay.register(replica, {})
    await woken("epoch")
    await refit(replay, 0, [replica])
    await enqueue(replay, [0])
    await woken("work")
    (lease,) = await replay.lease(replica, 1)
    await push_all(replay, lease)
    await woken("scoring")
    await score_all(replay)
    await woken("ready")
    await other.aclose()


async def test_a_subscription_to_a_server_that_is_gone_is_made_anew(redis_url: str) -> None:
    async with open_redis(redis_url) as redis, redis.pubsub() as pubsub:
        await pubsub.subscribe("wake")
        await pubsub.get_message(timeout=5)
        connection: Any = pubsub.connection
        connection._reader.set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
        told = await eventually(lambda: pubsub.get_message(timeout=1))
        assert {"type": "subscribe"}.items() <= told.items()
