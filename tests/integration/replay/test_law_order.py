"""Law 5: the order of prompts, and what a rewind leaves of it."""

from __future__ import annotations

from headrace.replay import End, Limits, ReplayClient
from tests.support.buffer import (
    begin,
    generate,
    make_group,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    tighten,
)


async def test_law_5_order_is_the_prompts_order_whoever_leases(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await replay.enqueue([make_group(order) for order in (3, 1, 2, 0)], timeline)
    first, second = nonce(), nonce()
    for replica in (first, second):
        await replay.register(replica, {})
    await refit(replay, 0, [first, second])
    leases = [(await replay.lease(replica, 1))[0] for replica in (first, second, first)]
    assert [lease.group.order for lease in leases] == [0, 1, 2]
    # finished in another order, trained in the order of tickets
    for lease in reversed(leases):
        await push_all(replay, lease)
        await score_all(replay)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")


async def test_law_5_order_a_requeued_group_goes_before_fresh_ones(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    first, second, third = await replay.lease(replica, 3)
    await replay.release(second, "engine died", failed=True)
    (again,) = await replay.lease(replica, 1)
    assert (again.group.order, again.ticket) == (1, 3)
    for lease in (first, third, again):
        await push_all(replay, lease)
    await score_all(replay)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-2")


async def test_law_5_order_a_step_that_survives_a_rewind_is_unchanged(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 12)
    await generate(replay, replica)
    before = [await reserve(replay, step) for step in (0, 1)]
    await replay.commit(1, timeline)
    state = await rewind(replay, 1)
    assert (state.next_step, state.committed) == (1, 1)
    assert await reserve(replay, 1) == before[1]
    state = await rewind(replay, 1)
    assert await reserve(replay, 1) == before[1]
    pairs = await replay.read([t.key for t in before[1].trajectories])
    assert [score.reward for _, score in pairs] == [t.reward for t in before[1].trajectories]


async def test_law_5_order_survivors_keep_their_step_and_holes_are_filled(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=4)
    replica = await begin(replay, 12)
    await generate(replay, replica, most=3)  # 0, 1 for step 0; 2 for step 1
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    await generate(replay, replica, most=1)  # 3 for step 1, written by version 1
    await generate(replay, replica, most=2, versions=[0, 0])  # 4, 5 for step 2
    for step in (1, 2):
        await reserve(replay, step)
    await generate(replay, replica, most=1, versions=[0])  # 6 waits in line, unreserved
    await rewind(replay, 0)
    assert (await replay.state()).counts["ready"] == 6  # all but 3
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")
    # the hole of step 1 is filled with the lowest ticket in line, step 2 stays as it was
    assert (await reserve(replay, 1)).groups == ("e0-train-2", "e0-train-6")
    assert (await reserve(replay, 2)).groups == ("e0-train-4", "e0-train-5")
    await refit(replay, 3, [replica])
    assert (await replay.lease(replica, 1))[0].group.order == 3

    # a hole that only a survivor of a later step can fill: the batch is in ticket order all the same
    state = await replay.state()
    await replay.redis.hset(f"hr:{{{replay.run_id}}}:{state.incarnation}:g:e0-train-2", "lost", 1)
    state = await rewind(replay, 1)
    await replay.close(state.timeline)
    await refit(replay, 1, [replica])
    while leases := await replay.lease(replica, 64):
        for lease in leases:
            await replay.reject(lease, "poison")
    assert (await reserve(replay, 1)).groups == ("e0-train-4", "e0-train-6")


async def test_law_5_order_when_prompts_end_survivors_fill_the_holes(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=4)
    replica = await begin(replay, 5)
    await generate(replay, replica, most=1)
    await generate(replay, replica, most=1)
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    await generate(replay, replica, most=1)
    await generate(replay, replica, most=2, versions=[0])
    await reserve(replay, 1)
    state = await rewind(replay, 0)
    await replay.close(state.timeline)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")
    await refit(replay, 1, [replica])
    # group 2 was written by the abandoned version 1, comes back, and can never be made
    (lease,) = await replay.lease(replica, 1)
    await replay.reject(lease, "poison")
    assert (await reserve(replay, 1)).groups == ("e0-train-3", "e0-train-4")
    assert await replay.reserve(2, state.timeline) == End(unused=0)


async def test_law_5_order_survivors_yield_when_nothing_can_fill_a_hole(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=4)
    replica = await begin(replay, 6)
    await generate(replay, replica)
    for step in range(3):
        await reserve(replay, step)
    # the payload of group 2 was evicted, and it can't be made again
    incarnation = (await replay.state()).incarnation
    await replay.redis.hset(f"hr:{{{replay.run_id}}}:{incarnation}:g:e0-train-2", "lost", 1)
    state = await rewind(replay, 0)
    await replay.close(state.timeline)
    await refit(replay, 0, [replica])
    (lease,) = await replay.lease(replica, 1)
    await replay.reject(lease, "poison")
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")
    assert (await reserve(replay, 1)).groups == ("e0-train-3", "e0-train-4")
    assert await replay.reserve(2, state.timeline) == End(unused=1)
