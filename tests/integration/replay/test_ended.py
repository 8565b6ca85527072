"""Groups that end untrained stay known when nothing else of them is left (law 1)."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, WrongStep
from headrace.replay import Ended, Limits, ReplayClient
from tests.support.buffer import (
    begin,
    enqueue,
    generate,
    healthy_replica,
    make_group,
    nonce,
    refill,
    refit,
    reserve,
    rewind,
    some,
    tighten,
    total,
)

DEAD_LETTERS = 1000


def orders_in(ended: Ended) -> list[int]:
    return [order for order in range(8 * len(ended.bitmap)) if ended.bitmap[order // 8] & (128 >> order % 8)]


async def test_law_1_conservation_the_ended_are_known_by_their_order(replay: ReplayClient) -> None:
    await enqueue(replay, range(20))
    assert await replay.read_ended() == Ended(0, 0, b"")
    replica = await healthy_replica(replay)
    for lease in await replay.lease(replica, 3):
        if lease.group.order in (0, 2):
            await replay.reject(lease, "prompt longer than the context")
    ended = await replay.read_ended()
    assert (ended.failed, ended.filtered, orders_in(ended)) == (2, 0, [0, 2])


async def test_law_1_conservation_a_failed_group_never_comes_back(replay: ReplayClient) -> None:
    """Not in a refill after a rewind behind the step that it would have been in, and not after a restore."""
    replica = await begin(replay, 8)
    (first,) = await replay.lease(replica, 1)
    await replay.reject(first, "never")
    await generate(replay, replica)
    assert (await rewind(replay, 0)).counts["failed"] == 1
    await refit(replay, 0, [replica])
    await generate(replay, replica)
    await reserve(replay, 0)
    await replay.commit(1, (await replay.state()).timeline)
    await rewind(replay, 0)
    assert await refill(replay, range(8)) == 2  # those of step 0; order 0 has ended, the others are held
    before = await replay.read_ended()
    assert orders_in(before) == [0]
    state = await replay.restore(0, nonce(), nonce(), 7, before)
    assert some(state.counts) == {"failed": 1}
    assert await replay.group(first.group.id) is None
    assert await refill(replay, range(8)) == 7
    assert await refill(replay, range(8)) == 0
    assert await total(replay) == 8
    assert await replay.read_ended() == before


async def test_law_1_conservation_an_ended_order_is_not_new_again(replay: ReplayClient) -> None:
    state = await replay.restore(0, nonce(), nonce(), -1, Ended(1, 1, b"\x30"))  # orders 2 and 3
    assert await replay.enqueue([make_group(order) for order in range(6)], state.timeline) == 4
    assert (await replay.state()).counts == {"failed": 1, "filtered": 1, "queued": 4}


async def test_the_newest_dead_letters_stay_readable(replay: ReplayClient, limits: Limits) -> None:
    """A thousand; of older ones nothing stays but the order."""
    extra = 3
    await tighten(replay, limits, max_age=1000)
    await enqueue(replay, range(DEAD_LETTERS + extra), n=1)
    replica = await healthy_replica(replay)
    leases = []
    while batch := await replay.lease(replica, 256):
        leases += batch
    for lease in leases:
        await replay.reject(lease, f"reason {lease.group.order}")
    assert len(leases) == DEAD_LETTERS + extra
    records = [key async for key in replay.redis.scan_iter(match=f"hr:{{{replay.run_id}}}:*:d:*", count=1000)]
    assert len(records) == DEAD_LETTERS
    gone = [order for order in range(DEAD_LETTERS + extra) if await replay.group(f"e0-train-{order}") is None]
    assert len(gone) == extra
    # those that ended in the same millisecond have no order among themselves
    assert max(gone) < DEAD_LETTERS
    assert len(orders_in(await replay.read_ended())) == DEAD_LETTERS + extra
    assert await refill(replay, range(DEAD_LETTERS + extra)) == 0
    assert (await replay.state()).counts["failed"] == DEAD_LETTERS + extra


async def test_an_order_that_no_bitmap_holds_is_refused(replay: ReplayClient) -> None:
    with pytest.raises(InvalidCall, match=r"order 4294967296 .* at most 2\^32"):
        await enqueue(replay, [2**32])
    with pytest.raises(WrongStep, match=r"4294967295.*next one is 0"):
        await enqueue(replay, [2**32 - 1])
