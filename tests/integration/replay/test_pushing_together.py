"""What finishes together is handed in together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.base.errors import LeaseLost, ReplayUnavailable
from headrace.replay import Lease, ReplayClient
from headrace.replay.connection import open_redis
from tests.support.buffer import begin, make_trajectory


async def leases(replay: ReplayClient, count: int = 2) -> list[Lease]:
    return await replay.lease(await begin(replay, count), count)


def away(replay: ReplayClient) -> ReplayClient:
    """A client of the same run on a server that isn't there."""
    return ReplayClient(open_redis("redis://127.0.0.1:1/0", retries=0), replay.run_id)


async def calls(replay: ReplayClient) -> int:
    """Of functions, until now."""
    return int((await replay.redis.info("commandstats"))["cmdstat_fcall"]["calls"])


async def test_what_finishes_together_is_pushed_in_one_call(replay: ReplayClient) -> None:
    first, second = await leases(replay)
    before = await calls(replay)
    together = [asyncio.create_task(replay.push(first, make_trajectory(first, index))) for index in range(2)]
    await asyncio.sleep(0)  # they wait
    await asyncio.sleep(0)  # their call is under way
    later = [asyncio.create_task(replay.push(second, make_trajectory(second, index))) for index in range(2)]
    await asyncio.gather(*together, *later)
    assert await calls(replay) - before == 2
    for lease in (first, second):
        for index in range(2):
            assert await replay.trajectory(lease.group.id, index) is not None


async def test_a_refusal_is_that_of_its_own_trajectory(replay: ReplayClient) -> None:
    good, gone = await leases(replay)
    await replay.release(gone, "drain", failed=False)
    lost, pushed = await asyncio.gather(
        *(replay.push(lease, make_trajectory(lease, 0)) for lease in (gone, good)), return_exceptions=True
    )
    assert isinstance(lost, LeaseLost)
    assert pushed is None
    assert await replay.trajectory(good.group.id, 0) is not None


async def test_what_is_cancelled_before_its_call_is_not_sent(replay: ReplayClient) -> None:
    lease, _ = await leases(replay)
    one, other = (asyncio.create_task(replay.push(lease, make_trajectory(lease, index))) for index in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await other
    with pytest.raises(asyncio.CancelledError):
        await one
    assert await replay.trajectory(lease.group.id, 0) is None
    assert await replay.trajectory(lease.group.id, 1) is not None


async def test_a_call_that_fails_fails_for_all_in_it_and_the_next_is_made(replay: ReplayClient) -> None:
    lease, _ = await leases(replay)
    async with contextlib.aclosing(away(replay)) as client:
        for _ in range(2):
            errors = await asyncio.gather(
                *(client.push(lease, make_trajectory(lease, index)) for index in range(2)), return_exceptions=True
            )
            assert [type(error) for error in errors] == [ReplayUnavailable, ReplayUnavailable]


async def test_closed_it_ends_a_call_that_is_under_way(replay: ReplayClient) -> None:
    lease, _ = await leases(replay)
    before = asyncio.all_tasks()
    async with contextlib.aclosing(away(replay)) as client:
        one = asyncio.create_task(client.push(lease, make_trajectory(lease, 0)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # its call is under way
        later = asyncio.create_task(client.push(lease, make_trajectory(lease, 1)))
        await asyncio.sleep(0)
    for each in (one, later):
        with pytest.raises(asyncio.CancelledError):
            await each
    assert asyncio.all_tasks() == before
