"""Failed groups that are retried: law 1 says that failed is final until then."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, WrongTimeline
from headrace.replay import End, Limits, ReplayClient, Waiting
from tests.support.buffer import (
    begin,
    contents,
    enqueue,
    generate,
    make_group,
    nonce,
    push_all,
    refill,
    refit,
    reserve,
    rewind,
    score_all,
    some,
    tighten,
    total,
)


async def fail(replay: ReplayClient, replica: str, *orders: int) -> None:
    for lease in await replay.lease(replica, 64):
        if lease.group.order in orders:
            await replay.reject(lease, "the prompt is too long")
        else:
            await push_all(replay, lease)
    await score_all(replay)


async def test_law_1_a_failed_group_that_is_retried_is_trained(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    await fail(replay, replica, 1)
    assert (await replay.read_ended()).failed_orders() == [1]
    assert await replay.retry({1: 0, 2: 0}) == 1  # the other has not failed
    state = await replay.state()
    assert (some(state.counts), state.wanted) == ({"ready": 3}, 1)
    ended = await replay.read_ended()
    assert (ended.failed, ended.failed_orders(), ended.retries) == (0, [], {1: 1})
    assert await replay.group("e0-train-1") is None
    assert (await replay.stats())["failed"] == []
    assert await replay.lease(replica, 64) == []
    assert await replay.read_wanted() == [1]
    assert await enqueue(replay, range(4)) == 0  # a feeder that does not know of it
    assert await refill(replay, [0, 1, 2]) == 1
    assert await refill(replay, [1]) == 0
    assert await replay.read_wanted() == []
    assert await generate(replay, replica) == ["e0-train-1"]
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-2")
    assert "e0-train-1" in (await reserve(replay, 1)).groups
    assert await total(replay) == 4


async def test_law_4_a_late_retry_does_nothing_to_a_later_failure(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    await fail(replay, replica, 1)
    assert await replay.retry({1: 0}) == 1
    before = await contents(replay)
    assert await replay.retry({1: 0}) == 0
    assert await contents(replay) == before
    await refill(replay, [1])
    await fail(replay, replica, 1)
    before = await contents(replay)
    assert await replay.retry({1: 0}) == 0
    assert await contents(replay) == before
    assert await replay.retry({1: 1}) == 1


async def test_law_4_a_retry_of_a_lost_incarnation_is_refused(replay: ReplayClient) -> None:
    await fail(replay, await begin(replay, 4), 1)
    ended = await replay.read_ended()
    old = replay._incarnation
    await replay.restore(0, nonce(), nonce(), 3, ended)
    replay._incarnation = old
    with pytest.raises(WrongTimeline):
        await replay.retry({1: 0})
    await replay.state()
    # its record is gone, and that it failed is known
    assert await replay.group("e0-train-1") is None
    assert await replay.retry({1: 0}) == 1
    assert await replay.read_wanted() == [1]


async def test_a_retry_of_what_was_never_taken_changes_nothing(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    assert await replay.retry({9: 0, 10**13: 0}) == 0
    with pytest.raises(InvalidCall, match="2 orders, and 1"):
        await replay._connection.call("retry", incarnation=replay._incarnation, orders=[1, 2], retries=[0])


async def test_a_closed_queue_waits_for_what_is_retried_and_takes_it(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    await fail(replay, replica, 1)
    timeline = (await replay.state()).timeline
    await replay.close(timeline)
    await replay.retry({1: 0})
    await reserve(replay, 0)
    assert await replay.reserve(1, timeline) == Waiting(1, 2)  # not END: one is to come
    with pytest.raises(InvalidCall, match="after the queue was closed"):
        await replay.enqueue([make_group(4)], timeline, refill=True)
    assert await refill(replay, [1]) == 1
    await generate(replay, replica)
    await reserve(replay, 1)
    assert isinstance(await replay.reserve(2, timeline), End)


async def test_law_1_a_rewind_keeps_a_retry(replay: ReplayClient, limits: Limits) -> None:
    """To before the step that trained it, too: it is refilled then, as any other."""
    await tighten(replay, limits, max_age=3)
    replica = await begin(replay, 4)
    await fail(replay, replica, 1)
    await replay.retry({1: 0})
    await rewind(replay, 0)
    assert await replay.read_wanted() == [1]
    await refill(replay, [1])
    for step in range(2):
        await refit(replay, step, [replica])
        await generate(replay, replica)
        await reserve(replay, step)
    await replay.commit(2, (await replay.state()).timeline)
    state = await rewind(replay, 0)
    assert state.refill
    assert (await replay.read_ended()).failed_orders() == []
    assert await refill(replay, range(4)) == 4
