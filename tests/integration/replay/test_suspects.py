"""Groups whose replica died: any of them may have killed it, and only one that was alone with its replica is charged an attempt."""

from __future__ import annotations

import pytest

from headrace.replay import Lease, Limits, ReplayClient
from tests.support.buffer import (
    died,
    enqueue,
    group_of,
    healthy_replica,
    healthy_replicas,
    make_trajectory,
    missed,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    tighten,
)
from tests.support.waiting import eventually

POISON = "e0-train-37"

# 64 groups of one trajectory each are in flight
pytestmark = pytest.mark.limits(prompts_per_step=32, generations_per_prompt=1)


def ids(leases: list[Lease]) -> list[str]:
    return [lease.group.id for lease in leases]


async def failures(replay: ReplayClient, orders: range) -> int:
    return sum([(await replay.group(f"e0-train-{order}") or {})["failures"] for order in orders])


@pytest.mark.parametrize(
    ("groups", "deaths"),
    [(64, [64, 8, 1, 1, 1]), (130, [130, 16, 2, 1, 1, 1])],  # more than are taken back in one call
)
async def test_law_6_of_groups_of_a_killed_replica_only_the_killer_fails(
    replay: ReplayClient, limits: Limits, groups: int, deaths: list[int]
) -> None:
    await tighten(replay, limits, prompts_per_step=groups // 2)
    await enqueue(replay, range(groups), n=1)
    leased: list[list[str]] = []
    done: set[str] = set()
    while len(done) + (await replay.state()).counts.get("failed", 0) < groups:
        replica = await healthy_replica(replay)
        while leases := await replay.lease(replica, groups):
            leased.append(ids(leases))
            if POISON in leased[-1]:
                await replay.deregister(replica, died=True)
                break
            for lease in leases:
                await push_all(replay, lease)
            done.update(leased[-1])
    assert [len(together) for together in leased if POISON in together] == deaths
    assert len(done) == groups - 1
    group = await replay.group(POISON)
    assert group is not None
    assert "group alone (attempt 3 of 3)" in group["reason"]
    assert await failures(replay, range(groups)) == 3  # all of them the poison's
    assert (await replay.stats())["suspects"] == 0


async def test_law_6_rewinds_between_the_deaths_charge_nobody_else(replay: ReplayClient) -> None:
    """A rewind voids the leases, so that those who were suspected are generated again among others."""
    poison, together, done = "e0-train-5", [], set[str]()
    await enqueue(replay, range(16), n=1)
    while len(done) + (await replay.state()).counts.get("failed", 0) < 16:
        replica = await healthy_replica(replay)
        while leases := await replay.lease(replica, 8):
            if poison in ids(leases):
                together.append(len(leases))
                for _ in range(2):  # the network delivers it again
                    await replay.deregister(replica, died=True)
                if len(together) in (1, 3):
                    await rewind(replay, 0)
                break
            for lease in leases:
                await push_all(replay, lease)
            done.update(ids(leases))
    assert together == [8, 8, 1, 8, 1, 1]
    assert len(done) == 15
    assert await failures(replay, range(16)) == 3  # all of them the poison's


async def test_a_replica_killed_from_outside_charges_only_a_lone_group(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(20), n=1)
    sizes = []
    for _ in range(4):
        replica = await healthy_replica(replay)
        sizes.append(len(await replay.lease(replica, 20)))
        await died(replay, limits, replica)
    assert sizes == [20, 2, 1, 1]
    assert await failures(replay, range(20)) == 2  # of the one that was alone twice
    replica = await healthy_replica(replay)
    while leases := await replay.lease(replica, 20):
        for lease in leases:
            await push_all(replay, lease)
    assert (await replay.state()).counts["scoring"] == 20


async def test_what_ends_otherwise_than_by_a_death_is_no_suspect(replay: ReplayClient) -> None:
    await enqueue(replay, range(16), n=1)
    first, second = await healthy_replicas(replay, 2)
    await replay.lease(first, 16)
    await replay.deregister(first, died=True)
    cohort = await replay.lease(second, 16)
    assert len(cohort) == 2
    await replay.deregister(second)
    (third,) = await healthy_replicas(replay, 1)
    cohort = await replay.lease(third, 16)
    assert len(cohort) == 2  # the other suspects come first, and these two by themselves
    await rewind(replay, 0)
    assert (await replay.stats())["suspects"] == 0
    await refit(replay, 0, [third])
    assert await replay.lease(third, 16) == []  # it goes on with these two
    for lease in cohort:
        await push_all(replay, lease)
    assert len(await replay.lease(third, 16)) == 14


async def test_law_5_a_replica_drains_for_a_suspect_of_the_lowest_ticket(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, prompts_per_step=1, max_age=8)
    await enqueue(replay, range(9), n=1)
    dying, busy, other = await healthy_replicas(replay, 3)
    (before,) = await replay.lease(other, 1)
    (suspect,) = await replay.lease(dying, 1)
    (held,) = await replay.lease(busy, 1)
    await replay.deregister(dying, died=True)
    assert len(await replay.lease(busy, 1)) == 1  # the trainer waits for another group
    await push_all(replay, before)
    await score_all(replay)
    await reserve(replay, 0)
    assert await replay.lease(busy, 1) == []  # it drains
    assert ids(await replay.lease(other, 8)) == [suspect.group.id]  # which holds nothing
    assert await replay.lease(other, 8) == []
    assert len(await replay.lease(busy, 1)) == 1  # it need not drain any longer
    await replay.deregister(other, died=True)
    late, later = await healthy_replicas(replay, 2)
    await refit(replay, 0, [busy, late, later])
    assert await replay.lease(busy, 1) == []
    (again,) = await replay.lease(late, 8)
    assert (again.group.id, again.ticket, again.attempt) == (suspect.group.id, suspect.ticket, 1)
    assert len(await replay.lease(later, 1)) == 1
    await push_all(replay, again)
    await score_all(replay)
    assert (await reserve(replay, 1)).groups == (suspect.group.id,)
    assert held.ticket > suspect.ticket


async def test_one_replica_at_a_time_drains(replay: ReplayClient) -> None:
    await enqueue(replay, range(8), n=1)
    dying, first, second = await healthy_replicas(replay, 3)
    await replay.lease(dying, 1)
    for replica in (first, second):
        await replay.lease(replica, 1)
    await replay.deregister(dying, died=True)
    assert await replay.lease(first, 1) == []
    assert len(await replay.lease(second, 1)) == 1
    assert await replay.lease(first, 1) == []
    await replay.deregister(first)
    assert await replay.lease(second, 1) == []


async def test_law_6_while_a_suspect_waits_no_deadline_runs(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, range(2), n=1)
    first, second = await healthy_replicas(replay, 2)
    await tighten(replay, limits, group_deadline_s=0.3)
    (suspect,) = await replay.lease(first, 1)
    (silent,) = await replay.lease(second, 1)
    await replay.deregister(first, died=True)

    async def deadline_passed() -> bool:
        return (await replay.heartbeat(second, [silent.token])).lost == (silent.token,)

    await eventually(deadline_passed)
    assert (await replay.stats())["suspects"] == 2
    await tighten(replay, limits, group_deadline_s=20.0)
    (again,) = await replay.lease(second, 1)
    assert again.group.id == suspect.group.id
    assert again.expires_in_s > 15  # its deadline begins anew
    await replay.push(again, make_trajectory(again, 0))


async def test_scores_after_a_replicas_death_make_no_group_alone(replay: ReplayClient, limits: Limits) -> None:
    """Each group is started once more than it needs: the first score completes it while its replica is dead and not missed yet."""
    await tighten(replay, limits, redundant=1, replica_dead_s=1.0)
    await enqueue(replay, range(2), n=1)
    replica = await healthy_replica(replay)
    other, left = await replay.lease(replica, 2)
    await replay.push(other, make_trajectory(other, 0))
    await score_all(replay)
    assert (await group_of(replay, other))["state"] == "ready"
    await missed(replay, replica)
    assert (await group_of(replay, left))["failures"] == 0
