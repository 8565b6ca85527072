"""Beginning again on what there is: validation dropped, a restore, leftovers of the end, two trainers at once."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, LeaseLost, ReplayError, WrongTimeline
from headrace.replay import ReplayClient, Reservation
from tests.support.buffer import (
    begin,
    enqueue,
    generate,
    healthy_replica,
    make_group,
    make_trajectory,
    nonce,
    refit,
    reserve,
    rewind,
    score_all,
    some,
)


async def test_validation_is_dropped_with_its_leases(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    groups = [make_group(i, n=1, lane="validation", group_id=f"v{i}") for i in range(600)]
    assert await replay.enqueue(groups, timeline) == 600
    assert await replay.enqueue(groups, timeline) == 0
    replica = await healthy_replica(replay)
    pushed, leased = await replay.lease(replica, 2)
    await replay.push(pushed, make_trajectory(pushed, 0))
    await score_all(replay)
    await replay.drop_validation(timeline, 1)
    stats = await replay.stats()
    assert some(stats["counts"]["validation"]) == {"evaluated": 1, "unused": 599}
    assert (stats["bytes"], stats["leases"]) == (0, 0)
    with pytest.raises(LeaseLost):
        await replay.push(leased, make_trajectory(leased, 0))
    assert await replay.read_evaluated(["v0"]) == ([], {}, ["v0"])
    assert await replay.enqueue(groups[:1], timeline) == 0
    assert await replay.enqueue(groups[:1], timeline, validation=1) == 1
    await rewind(replay, 0)
    assert await replay.lease(await healthy_replica(replay), 2) == []


async def test_restore_starts_from_the_checkpoint_alone(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    await generate(replay, replica)
    await reserve(replay, 0)
    with pytest.raises(ReplayError, match="use restore"):
        await rewind(replay, 5)
    old = (await replay.state()).incarnation
    state = await replay.restore(5, nonce(), nonce(), enqueued=11)
    assert [key async for key in replay.redis.scan_iter(match=f"hr:{{{replay.run_id}}}:{old}:*")] == []
    # those the ledger does not hold come again, then new ones
    assert await replay.enqueue([make_group(10), make_group(11)], state.timeline) == 0
    assert await replay.enqueue([make_group(10), make_group(11)], state.timeline, refill=True) == 2
    assert await replay.enqueue([make_group(12)], state.timeline) == 1
    counts = (await replay.state()).counts
    assert some(counts) == {"trained": 10, "queued": 3}
    await replay.end_refill(state.timeline)
    replica = await healthy_replica(replay, version=5)
    await generate(replay, replica)
    assert (await reserve(replay, 5)).groups == ("e0-train-10", "e0-train-11")


async def test_leftovers_come_back_when_the_run_goes_on(replay: ReplayClient) -> None:
    await enqueue(replay, range(3))
    timeline = (await replay.state()).timeline
    await replay.close(timeline)
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    await replay.reserve(1, timeline)
    with pytest.raises(InvalidCall, match="closed"):
        await replay.enqueue([make_group(3)], timeline)
    state = await rewind(replay, 1)
    assert (state.closed, state.counts["queued"], state.counts["unused"]) == (False, 1, 0)
    await enqueue(replay, [3])
    await refit(replay, 1, [replica])
    await generate(replay, replica)
    assert isinstance(await replay.reserve(1, state.timeline), Reservation)


async def test_two_trainers_can_not_both_go_on(replay: ReplayClient, redis_url: str) -> None:
    other = await ReplayClient.connect(redis_url, replay.run_id)
    first, second = await rewind(replay, 0), await rewind(other, 0)
    with pytest.raises(WrongTimeline):
        await replay.reserve(0, first.timeline)
    await other.close(second.timeline)
    await other.aclose()
