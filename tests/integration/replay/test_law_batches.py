"""Laws 1 to 3, of what ends up in a batch: conservation, age, completeness."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, WrongStep
from headrace.records.score import Score
from headrace.replay import End, Limits, ReplayClient, Waiting
from tests.support.buffer import (
    begin,
    contents,
    enqueue,
    generate,
    healthy_replica,
    make_group,
    make_trajectory,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    some,
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
    (job, _) = await replay.take_scoring({"math": 2})
    await replay.score(job, Score("UNSENDABLE", message="no such task"))
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
    assert some(counts) == {"trained": 6, "failed": 2, "unused": 1}
    assert len(trained) == len(set(trained))
    assert (await replay.stats())["bytes"] == 0


async def test_law_1_a_commit_is_of_the_groups_that_were_trained(replay: ReplayClient) -> None:
    """One that says which they are is refused where the buffer's server has lost a step, and taken it again with others since."""
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 4)
    await generate(replay, replica)
    first, second = (await reserve(replay, 0)).groups, (await reserve(replay, 1)).groups
    before = await contents(replay)
    for trained in ({0: first, 1: first}, {0: first, 1: second[:1]}, {1: second}, {0: (*first, *second)}):
        with pytest.raises(WrongStep):
            await replay.commit(2, timeline, trained)
    assert await contents(replay) == before
    await replay.commit(1, timeline, {0: first[::-1]})
    await replay.commit(2, timeline, {1: second})
    await replay.commit(2, timeline, {1: second})
    assert some((await replay.state()).counts) == {"trained": 4}


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
    replica = await begin(replay, 8)
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
    replica = await begin(replay, 8)
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
    (lease, _) = await replay.lease(await begin(replay, 2), 2)
    before = await contents(replay)
    with pytest.raises(InvalidCall, match="newest weights are 0"):
        await replay.push(lease, make_trajectory(lease, 0, versions=[0, 1]))
    assert await contents(replay) == before


async def test_law_2_age_no_token_of_an_abandoned_timeline(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
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
async def test_law_2_age_admission_bounds_it_without_dropping(replay: ReplayClient, limits: Limits, ahead: int) -> None:
    """R + O < (v + A + 1) * P: whatever is leased is trained within its age, and nothing is requeued."""
    await tighten(replay, limits, max_age=ahead)
    replica = await begin(replay, 20)
    ages = []
    for step in range(6):
        await generate(replay, replica)
        batch = await reserve(replay, step)
        ages += [step - t.oldest_version for t in batch.trajectories]
        await refit(replay, step + 1, [replica])
    assert max(ages) == ahead
    assert (await replay.stats())["requeues"] == {}


async def test_law_3_completeness_n_distinct_indices_each_scored(replay: ReplayClient) -> None:
    leases = await replay.lease(await begin(replay, 2), 2)
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
    (job, other) = await replay.take_scoring({"math": 64})
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
    await generate(replay, await begin(replay, 2))
    group = await replay.group("e0-train-0")
    assert group is not None
    if damage == "payload":
        await replay.redis.delete(group["trajectories"][0]["key"])
    else:
        incarnation = (await replay.state()).incarnation
        await replay.redis.hset(f"hr:{{{replay.run_id}}}:{incarnation}:g:e0-train-0", damage, 1)
    assert isinstance(await replay.reserve(0, (await replay.state()).timeline), Waiting)
    assert (await replay.stats())["requeues"] == {cause: 1}
