"""The seven laws of the buffer, each by its name."""

from __future__ import annotations

import pytest

from headrace.errors import Fenced, InvalidCall, LeaseLost, NotVerified, WrongStep, WrongTimeline
from headrace.replay import End, Limits, ReplayClient, Waiting
from headrace.trajectory import Score
from tests.integration.replay.helpers import (
    contents,
    enqueue,
    eventually,
    generate,
    healthy_replica,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refit,
    refusals,
    reserve,
    rewind,
    score_all,
    tighten,
    total,
)


async def test_law_1_conservation_every_group_ends_once(replay: ReplayClient, limits: Limits) -> None:
    """Groups that are trained, released, rejected, failed in scoring, given back by a dead replica, rewound and left over."""
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(9))
    assert await enqueue(replay, range(9)) == 0  # enqueuing again changes nothing
    replica = await healthy_replica(replay)

    first, second, third, fourth = await replay.lease(replica, 64)
    await replay.release(first, "shutdown", failed=False)
    await replay.reject(second, "prompt longer than the context")
    await push_all(replay, third)
    (job, _) = await replay.take_scoring("scorer", 2)
    await replay.score(job, Score("INVALID", message="no such task"))
    await replay.release(fourth, "engine died", failed=True)
    assert await total(replay) == 9
    assert (await replay.state()).counts == {"queued": 6, "open": 1, "scoring": 0, "failed": 2}

    for step in range(2):
        await refit(replay, step, [replica])
        await generate(replay, replica)
        await reserve(replay, step)
        assert await total(replay) == 9
    await rewind(replay, 1)
    assert await total(replay) == 9
    timeline = (await replay.state()).timeline
    await refit(replay, 1, [replica])
    await replay.close(timeline)
    step = 1
    trained: list[str] = []
    while True:
        await generate(replay, replica)
        batch = await replay.reserve(step, timeline)
        if isinstance(batch, End):
            break
        assert not isinstance(batch, Waiting)
        trained += batch.groups
        step += 1
        await replay.commit(step, timeline)
        await refit(replay, step, [replica])
    counts = (await replay.state()).counts
    assert {state: count for state, count in counts.items() if count} == {"trained": 6, "failed": 2, "unused": 1}
    assert len(trained) == len(set(trained))
    assert (await replay.stats())["bytes"] == 0


async def test_law_1_conservation_enqueue_knows_ids_and_the_watermark(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    assert await enqueue(replay, [0, 1, 2, 3]) == 4
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    await replay.commit(1, timeline)
    # the groups of step 0 are freed and known by the watermark alone
    assert await enqueue(replay, range(6)) == 2
    assert (await replay.state()).enqueued == 5
    held = [make_group(order) for order in (2, 3)]
    assert await replay.enqueue(held, timeline, refill=True) == 0
    # nor does a refill that arrives when none is wanted any more
    assert await replay.enqueue([make_group(0)], timeline, refill=True) == 0
    assert (await replay.state()).enqueued == 5


async def test_law_2_age_a_group_over_age_is_requeued_not_handed_out(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=3)
    await enqueue(replay, range(8))
    replica = await healthy_replica(replay)
    await generate(replay, replica)  # four steps ahead, tokens of version 0
    await reserve(replay, 0)
    await tighten(replay, limits, max_age=0)
    timeline = (await replay.state()).timeline
    assert await replay.reserve(1, timeline) == Waiting(ready=0, needed=2)
    assert (await replay.stats())["requeues"] == {"over_age": 2}
    await refit(replay, 1, [replica])
    await replay.reserve(1, timeline)
    await replay.reserve(1, timeline)
    await generate(replay, replica)
    batch = await reserve(replay, 1)
    assert batch.groups == ("e0-train-2", "e0-train-3")
    assert {t.oldest_version for t in batch.trajectories} == {1}


async def test_law_2_age_counts_from_the_oldest_token(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    for step in (0, 1):
        await reserve(replay, step)
        await refit(replay, step + 1, [replica])
    # in-flight refits: one token of version 0 makes the whole trajectory two steps old
    await generate(replay, replica, most=1, versions=[0, 1, 2])
    await generate(replay, replica, most=1, versions=[1, 2])
    assert await replay.reserve(2, (await replay.state()).timeline) == Waiting(ready=1, needed=2)
    await generate(replay, replica)
    batch = await reserve(replay, 2)
    assert {(t.oldest_version, t.newest_version) for t in batch.trajectories} == {(1, 2), (2, 2)}


async def test_law_2_age_a_token_newer_than_any_weights_is_refused(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    (lease, _) = await replay.lease(await healthy_replica(replay), 2)
    before = await contents(replay)
    with pytest.raises(InvalidCall, match="newest weights are 0"):
        await replay.push(lease, make_trajectory(lease, 0, versions=[0, 1]))
    assert await contents(replay) == before


async def test_law_2_age_no_token_of_an_abandoned_timeline(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    assert len(await generate(replay, replica)) == 2  # written by version 1 of a timeline that will end
    await rewind(replay, 0)
    requeued = (await replay.stats())["requeues"]
    assert requeued == {"rewind": 2}
    batch = await reserve(replay, 0)
    assert {t.newest_version for t in batch.trajectories} == {0}


@pytest.mark.parametrize("ahead", [0, 1, 2])
async def test_law_2_age_admission_bounds_the_age_without_dropping(
    replay: ReplayClient, limits: Limits, ahead: int
) -> None:
    """R + O < (v + A + 1) * P: whatever is leased is trained within its age, and nothing is requeued."""
    await tighten(replay, limits, max_age=ahead)
    await enqueue(replay, range(20))
    replica = await healthy_replica(replay)
    ages = []
    for step in range(6):
        await generate(replay, replica)
        batch = await reserve(replay, step)
        ages += [step - t.oldest_version for t in batch.trajectories]
        await refit(replay, step + 1, [replica])
    assert max(ages) == ahead
    assert (await replay.stats())["requeues"] == {}


async def test_law_3_completeness_n_distinct_indices_each_scored(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    leases = await replay.lease(await healthy_replica(replay), 2)
    timeline = leases[0].timeline
    for lease in leases:
        await replay.push(lease, make_trajectory(lease, 0))
        await replay.push(lease, make_trajectory(lease, 0))  # the same index is no second trajectory
        with pytest.raises(InvalidCall, match="index 2"):
            await replay.push(lease, make_trajectory(lease, 2))
    await score_all(replay)
    assert await replay.reserve(0, timeline) == Waiting(0, 2)
    for lease in leases:
        await replay.push(lease, make_trajectory(lease, 1))
    assert await replay.reserve(0, timeline) == Waiting(0, 2)
    (job, other) = await replay.take_scoring("scorer", 64)
    await replay.score(job, Score("SCORED", 1.0))
    assert await replay.reserve(0, timeline) == Waiting(1, 2)
    await replay.score(other, Score("SCORED", 1.0))
    batch = await reserve(replay, 0)
    assert [(t.group_id, t.index) for t in batch.trajectories] == [
        (lease.group.id, index) for lease in leases for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("damage", "cause"), [("payload", "payload_missing"), ("scored", "incomplete"), ("pushed", "incomplete")]
)
async def test_law_3_completeness_is_checked_whatever_happened_to_the_store(
    replay: ReplayClient, damage: str, cause: str
) -> None:
    await enqueue(replay, range(2))
    await generate(replay, await healthy_replica(replay))
    group = await replay.group("e0-train-0")
    assert group is not None
    if damage == "payload":
        await replay.redis.delete(group["trajectories"][0]["key"])
    else:
        incarnation = (await replay.state()).incarnation
        await replay.redis.hset(f"hr:{{{replay.run_id}}}:{incarnation}:g:e0-train-0", damage, 1)
    assert isinstance(await replay.reserve(0, (await replay.state()).timeline), Waiting)
    assert (await replay.stats())["requeues"] == {cause: 1}


async def test_law_4_fencing_an_expired_lease_may_not_push(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    await tighten(replay, limits, lease_s=0.05)
    (lease,) = await replay.lease(replica, 1)
    await eventually(lambda: _is_queued(replay, lease.group.id))
    before = await contents(replay)
    for call in (
        replay.push(lease, make_trajectory(lease, 0)),
        replay.release(lease, "late", failed=True),
        replay.reject(lease, "late"),
    ):
        with pytest.raises(LeaseLost):
            await call
    assert await contents(replay) == before
    assert (await refusals(replay))["HR_LEASE_LOST"] == 3


async def _is_queued(replay: ReplayClient, group_id: str) -> bool:
    await replay.heartbeat("nobody", [])  # any call ends what is due
    group = await replay.group(group_id)
    return group is not None and group["state"] == "queued"


async def test_law_4_fencing_a_second_lease_ends_the_first(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease(replica, 1)
    await replay.push(lease, make_trajectory(lease, 0))
    await replay.release(lease, "engine died", failed=True)
    (again,) = await replay.lease(replica, 1)
    assert (again.group.id, again.attempt) == (lease.group.id, 2)
    before = await contents(replay)
    with pytest.raises(LeaseLost):
        await replay.push(lease, make_trajectory(lease, 0))
    assert await contents(replay) == before
    with pytest.raises(InvalidCall, match="attempt"):
        await replay.push(again, make_trajectory(lease, 0))


async def test_law_4_fencing_another_timeline(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    replica = await healthy_replica(replay)
    leases = await replay.lease(replica, 3)
    await push_all(replay, leases[0])
    (job, _) = await replay.take_scoring("scorer", 64)
    old = leases[0].timeline
    epoch = nonce()
    await replay.open_epoch(epoch, 0, old, {})
    await rewind(replay, 0)
    before = await contents(replay)
    for call, error in (
        (replay.push(leases[1], make_trajectory(leases[1], 0)), WrongTimeline),
        (replay.release(leases[1], "drain", failed=True), WrongTimeline),
        (replay.score(job, Score("SCORED", 1.0)), LeaseLost),
        (replay.reserve(0, old), WrongTimeline),
        (replay.commit(0, old), WrongTimeline),
        (replay.enqueue([make_group(9)], old), WrongTimeline),
        (replay.close(old), WrongTimeline),
        (replay.drop_validation(old), WrongTimeline),
        (replay.open_epoch(nonce(), 0, old, {}), WrongTimeline),
        (replay.acknowledge(replica, epoch), WrongTimeline),
        (replay.lease(replica, 1), NotVerified),
    ):
        with pytest.raises(error):
            await call
    after = await contents(replay)
    # a record staged for a refused enqueue goes by its time to live
    assert {key: value for key, value in after.items() if key in before} == before
    assert all(value[1] > 0 for key, value in after.items() if key not in before)  # type: ignore[index]
    assert sum((await refusals(replay)).values()) == 11


async def test_law_4_fencing_another_incarnation(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease(replica, 1)
    state = await replay.restore(3, nonce(), nonce(), enqueued=3)
    assert (state.next_step, state.committed, state.enqueued, state.counts) == (3, 3, 3, {"trained": 6})
    before = await contents(replay)
    for call in (replay.push(lease, make_trajectory(lease, 0)), replay.release(lease, "drain", failed=False)):
        with pytest.raises(WrongTimeline):
            await call
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    assert await contents(replay) == before
    assert (await replay.heartbeat(replica, [lease.token])).state == "DEAD"


async def test_law_4_fencing_steps_are_reserved_and_committed_in_turn(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(8))
    await generate(replay, await healthy_replica(replay))
    before = await contents(replay)
    for call in (
        replay.reserve(1, timeline),
        replay.commit(1, timeline),
        replay.rewind(1, nonce()),
    ):
        with pytest.raises(WrongStep):
            await call
    assert await contents(replay) == before
    first = await reserve(replay, 0)
    assert await reserve(replay, 0) == first  # the reply was lost: the same batch again
    await reserve(replay, 1)
    with pytest.raises(WrongStep, match="the next step is 2"):
        await replay.reserve(0, timeline)
    await replay.commit(2, timeline)
    with pytest.raises(WrongStep):
        await replay.reserve(1, timeline)
    assert (await refusals(replay))["HR_STEP"] == 5


async def test_law_4_fencing_only_a_verified_replica_leases(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    replica, late = nonce(), nonce()
    timeline = (await replay.state()).timeline
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    await replay.register(replica, {})
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    epoch = nonce()
    await replay.open_epoch(epoch, 0, timeline, {})
    await replay.register(late, {})
    with pytest.raises(Fenced):
        await replay.acknowledge(late, epoch)
    with pytest.raises(Fenced):
        await replay.verify(replica, epoch, 0.0, 1e-3)  # not begun
    await replay.acknowledge(replica, epoch)
    await replay.begin_epoch(epoch, {})
    for bad in (2e-3, float("nan"), float("inf")):
        assert not await replay.verify(replica, epoch, bad, 1e-3)
        with pytest.raises(Fenced):
            await replay.verify(replica, epoch, 0.0, 1e-3)  # torn out: the next epoch
        with pytest.raises(NotVerified):
            await replay.lease(replica, 1)
        await replay.end_epoch(epoch, aborted=False)
        epoch = nonce()
        await replay.open_epoch(epoch, 0, timeline, {})
        await replay.acknowledge(replica, epoch)
        await replay.begin_epoch(epoch, {})
    assert await replay.verify(replica, epoch, 1e-4, 1e-3)
    assert len(await replay.lease(replica, 1)) == 1
    await replay.register(replica, {})  # started again: new to the fleet
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)


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
    await enqueue(replay, range(8))
    replica = await healthy_replica(replay)
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
    await enqueue(replay, range(12))
    replica = await healthy_replica(replay)
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


async def test_law_5_order_survivors_keep_their_step_and_holes_are_filled_by_ticket(
    replay: ReplayClient, limits: Limits
) -> None:
    await tighten(replay, limits, max_age=4)
    await enqueue(replay, range(12))
    replica = await healthy_replica(replay)
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


async def test_law_5_order_when_prompts_end_later_survivors_fill_the_holes(
    replay: ReplayClient, limits: Limits
) -> None:
    await tighten(replay, limits, max_age=4)
    await enqueue(replay, range(5))
    replica = await healthy_replica(replay)
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


async def test_law_5_order_survivors_give_up_their_step_when_nothing_else_can_fill_a_hole(
    replay: ReplayClient, limits: Limits
) -> None:
    await tighten(replay, limits, max_age=4)
    await enqueue(replay, range(6))
    replica = await healthy_replica(replay)
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


async def test_law_6_liveness_heartbeats_renew_a_lease(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease(replica, 1)
    leases = f"hr:{{{replay.run_id}}}:{lease.incarnation}:leases"
    before = await replay.redis.zscore(leases, lease.group.id)

    async def renewed() -> bool:
        assert (await replay.heartbeat(replica, [lease.token])).lost == ()
        return await replay.redis.zscore(leases, lease.group.id) > before

    await eventually(renewed)
    # another replica's heartbeat does not
    assert (await replay.heartbeat(nonce(), [lease.token])).lost == (lease.token,)


async def test_law_6_liveness_no_heartbeat_renews_past_the_absolute_deadline(
    replay: ReplayClient, limits: Limits
) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    await tighten(replay, limits, lease_s=3600.0, group_deadline_s=0.5)
    (lease,) = await replay.lease(replica, 1)

    async def lost() -> bool:
        return (await replay.heartbeat(replica, [lease.token])).lost == (lease.token,)

    await eventually(lost)
    assert (await replay.stats())["requeues"] == {"deadline": 1}
    assert (await replay.group(lease.group.id) or {})["failures"] == 1


async def test_law_6_liveness_a_poison_group_ends_as_failed(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(3))
    replica = await healthy_replica(replay)
    for attempt in (1, 2, 3):
        (lease,) = await replay.lease(replica, 1)
        assert (lease.group.order, lease.attempt) == (0, attempt)
        await replay.release(lease, "the engine refused it", failed=True)
    stats = await replay.stats()
    assert stats["failed"] == [
        {"group": "e0-train-0", "lane": "train", "reason": "the engine refused it (attempt 3 of 3)"}
    ]
    await generate(replay, replica)
    assert (await reserve(replay, 0)).groups == ("e0-train-1", "e0-train-2")


async def test_law_6_liveness_giving_back_costs_no_attempt(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    replica = await healthy_replica(replay)
    for _ in range(5):
        (lease,) = await replay.lease(replica, 1)
        await replay.release(lease, "drain", failed=False)
        assert (await replay.group(lease.group.id) or {})["failures"] == 0
    assert (await replay.state()).counts == {"queued": 1, "open": 1}


async def test_law_6_liveness_a_dead_replica_gives_its_groups_back(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(4))
    await tighten(replay, limits, replica_dead_s=0.3)
    replica = await healthy_replica(replay)
    leases = await replay.lease(replica, 3)
    await replay.push(leases[0], make_trajectory(leases[0], 0))

    async def dead() -> bool:
        await replay.heartbeat("nobody", [])
        return (await replay.replicas())[0].state == "DEAD"

    await eventually(dead)
    assert (await replay.state()).counts == {"queued": 1, "open": 3}
    reply = await replay.heartbeat(replica, [lease.token for lease in leases])
    assert reply.state == "DEAD"
    assert reply.lost == tuple(lease.token for lease in leases)
    with pytest.raises(NotVerified):
        await replay.lease(replica, 1)
    assert {lease.group.id for lease in await replay.lease(await healthy_replica(replay), 3)} == {
        lease.group.id for lease in leases
    }


async def test_law_6_liveness_a_hung_scorer_costs_an_attempt_and_then_the_group(
    replay: ReplayClient, limits: Limits
) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    await tighten(replay, limits, scoring_deadline_s=0.05)
    attempts = []

    async def failed() -> bool:
        jobs = await replay.take_scoring("hung", 64)
        attempts.extend(job.scoring_attempt for job in jobs if job.trajectory.index == 0)
        return (await replay.state()).counts.get("failed") == 1

    await eventually(failed)
    assert attempts == [1, 2, 3]
    assert "no answer from the scorer" in (await replay.stats())["failed"][0]["reason"]


async def test_law_6_liveness_leases_wait_for_memory_and_a_checkpoint_is_reached(
    replay: ReplayClient, limits: Limits
) -> None:
    await enqueue(replay, range(20))
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease(replica, 1)
    worst = (await replay.stats())["bytes"]
    await tighten(replay, limits, max_bytes=max(int(2.5 * worst), 1))
    assert len(await replay.lease(replica, 64)) == 1  # the third would not fit
    await push_all(replay, lease)  # complete: the unused part of its reservation is free again
    assert (await replay.stats())["bytes"] < 2 * worst
    await rewind(replay, 0)
    await tighten(replay, limits, max_bytes=int(2.01 * worst))
    # trained but uncommitted payloads fill the bound; the oldest go, so that the run reaches its checkpoint
    for step in range(7):
        await refit(replay, step, [replica])
        while isinstance(await replay.reserve(step, (await replay.state()).timeline), Waiting):
            assert await generate(replay, replica)
    events = [fields["kind"] for _, fields in await replay.events("0", 0.1)]
    assert "evicted" in events
    # a rewind has them made again
    await rewind(replay, 0)
    assert await total(replay) == 20
    await refit(replay, 0, [replica])
    await generate(replay, replica)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")


@pytest.mark.parametrize("status", ["FAILED", "TIMED_OUT"])
async def test_law_7_failure_is_not_zero_tried_again_then_failed(replay: ReplayClient, status: str) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    await replay.score((await replay.take_scoring("scorer", 1))[0], Score("SCORED", 1.0))
    for attempt in (1, 2, 3):
        (job,) = await replay.take_scoring("scorer", 64)
        assert job.scoring_attempt == attempt
        await replay.score(job, Score(status, message="the sandbox is down"))  # type: ignore[arg-type]
    assert await replay.take_scoring("scorer", 64) == []
    group = await replay.group("e0-train-0")
    assert group is not None
    assert (group["state"], group["trajectories"]) == ("failed", [])
    assert "the sandbox is down" in group["reason"]
    with pytest.raises(LeaseLost):
        await replay.score(job, Score("SCORED", 1.0))


async def test_law_7_failure_is_not_zero_invalid_fails_at_once(replay: ReplayClient) -> None:
    groups = [make_group(0, n=1, lane="validation", group_id="e0-validation-v0-0"), make_group(0)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    for lease in await replay.lease(await healthy_replica(replay), 2):
        await push_all(replay, lease)
    for job in await replay.take_scoring("scorer", 64):
        if job.trajectory.index == 0:
            await replay.score(job, Score("INVALID", message="no such task"))
    assert (await replay.state()).counts["failed"] == 1
    done, failed, pending = await replay.evaluated(["e0-validation-v0-0"])
    assert (done, pending) == ([], 0)
    assert failed == {"e0-validation-v0-0": "scoring refused: INVALID: no such task"}


async def test_law_7_failure_is_not_zero_unreadable_bytes_fail_the_group(replay: ReplayClient) -> None:
    await enqueue(replay, [0])
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    await push_all(replay, lease)
    group = await replay.group(lease.group.id)
    assert group is not None
    await replay.redis.set(group["trajectories"][1]["key"], b"\x00garbage")
    jobs = await replay.take_scoring("scorer", 64)
    assert [job.trajectory.index for job in jobs] == [0]
    group = await replay.group(lease.group.id)
    assert group is not None
    assert group["state"] == "failed"
    assert "trajectory" in group["reason"]
