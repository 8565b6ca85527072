"""Replicas that wait share what there is to lease: adding one adds capacity, whoever asks first."""

from __future__ import annotations

import pytest

from headrace.replay import Lease, Limits, ReplayClient
from tests.support.buffer import enqueue, healthy_replicas, push_all, refit, reserve, score_all, tighten

ALL = 64  # groups that each replica asks for


@pytest.fixture
async def room(replay: ReplayClient, limits: Limits) -> int:
    """Train groups that admission lets be in work at a time."""
    await tighten(replay, limits, prompts_per_step=8, max_age=0)
    await enqueue(replay, range(80))
    return 8


async def train(replay: ReplayClient, replicas: list[str], held: dict[str, list[Lease]]) -> None:
    """What the replicas hold is generated and trained, and they get the next weights."""
    step = (await replay.state()).next_step
    for lease in (lease for leases in held.values() for lease in leases):
        await push_all(replay, lease)
    await score_all(replay)
    await reserve(replay, step)
    await refit(replay, step + 1, replicas)


async def test_law_6_each_waiting_replica_gets_its_share_in_any_order(replay: ReplayClient, room: int) -> None:
    first, second, third, fourth = replicas = await healthy_replicas(replay, 4)
    held = {replica: await replay.lease(replica, ALL) for replica in replicas}
    assert [len(leases) for leases in held.values()] == [room, 0, 0, 0]  # nobody waited when the first asked
    await train(replay, replicas, held)
    # asking again and again gets nothing more
    assert [len(await replay.lease(replica, ALL)) for replica in (first, second, first, second)] == [2, 2, 0, 0]
    # the share of those that have not asked yet stays theirs, and one that holds less has what is left
    assert [len(await replay.lease(replica, ALL)) for replica in (third, fourth, first)] == [2, 2, 0]


async def test_law_6_only_a_replica_that_waits_has_a_share(replay: ReplayClient, room: int) -> None:
    first, second, third = replicas = await healthy_replicas(replay, 3)
    held = {first: await replay.lease(first, ALL), second: await replay.lease(second, ALL)}
    assert (len(held[first]), len(held[second])) == (room, 0)
    await train(replay, replicas, held)
    assert len(await replay.lease(second, 1)) == 1  # which is all that it asked for
    assert len(await replay.lease(first, ALL)) == room - 1
    assert await replay.lease(third, ALL) == []


async def test_law_6_a_replica_that_has_left_has_no_share(replay: ReplayClient, room: int) -> None:
    first, second = replicas = await healthy_replicas(replay, 2)
    held = {replica: await replay.lease(replica, ALL) for replica in replicas}
    await train(replay, replicas, held)
    await replay.deregister(second)
    assert len(await replay.lease(first, ALL)) == room


async def test_of_a_large_fleet_only_what_can_be_leased_is_shared(replay: ReplayClient, room: int) -> None:
    """A lease that finds nothing, and one while nobody waits, cost as much among forty replicas as among a few."""
    replicas = await healthy_replicas(replay, 40)
    first, second, *others = replicas

    async def commands(replica: str) -> int:
        async def count() -> int:
            stats = await replay.redis.info("commandstats")
            return sum(
                stats[f"cmdstat_{name}"]["calls"] for name in ("hget", "hmget", "scard") if f"cmdstat_{name}" in stats
            )

        before = await count()
        await replay.lease(replica, room)
        return await count() - before

    assert await commands(first) < 40 + room * 10
    assert await commands(second) < 20
    for each in others:
        assert await replay.lease(each, ALL) == []
    assert await commands(second) < 20
