"""Run time: the server's clock may be set, another server take over, the server freeze or be full, and no deadline runs out for it."""

from __future__ import annotations

import pytest

from headrace.replay import Lease
from tests.properties.setting import DEADLINE_S, LEASE_S, Setting
from tests.properties.world import World
from tests.support.buffer import make_group, make_trajectory

TEN_MINUTES_MS = 600_000


@pytest.fixture
async def world(world: World) -> World:
    await world.open(Setting(attempts=1).limits())
    await world.call("enqueue", [make_group(0)], world.model.timeline, False)
    await world.call("register", "replica", {})
    await world.refit()
    return world


async def leased(world: World) -> Lease:
    (lease,) = await world.call("lease", "replica", 1)
    return lease


async def go_on(world: World, lease: Lease) -> None:
    """The lease is as good as it was, and what is pushed under it is scored."""
    reply = await world.call("heartbeat", "replica", [lease.token])
    assert (reply.state, reply.lost) == ("HEALTHY", ())
    assert await world.call("push_many", [(lease, make_trajectory(lease, 0))]) == [None]
    (job,) = await world.call("take_scoring", {"math": 2})
    assert job.group.id == lease.group.id


@pytest.mark.parametrize("by", [TEN_MINUTES_MS, -TEN_MINUTES_MS])
async def test_law_6_a_clock_that_jumps_ends_no_lease_and_holds_nothing_up(world: World, by: int) -> None:
    lease = await leased(world)
    await world.jump(by)
    await go_on(world, lease)
    # and what nobody renews still ends in its time
    await world.jump(-by)
    await world.call("make_room")
    await world.pass_time(round(1000 * LEASE_S))
    await world.call("make_room")
    assert (await world.client.group(lease.group.id) or {})["replica"] == ""  # passed on


async def test_law_6_a_server_that_was_frozen_or_down_ends_no_lease(world: World) -> None:
    lease = await leased(world)
    await world.jump(round(1000 * (Setting().dead_s + DEADLINE_S)))
    await go_on(world, lease)


async def test_law_6_the_time_at_the_limit_of_memory_is_charged_to_nobody(world: World) -> None:
    """Nobody renews anything, and the deadline of the group would pass as well."""
    lease = await leased(world)
    await world.has_room(100)
    assert await world.call("make_room", 4000, False) == 4000
    for _ in range(3):
        await world.pass_time(round(1000 * (Setting().dead_s + DEADLINE_S)))
    await world.has_room(None)
    assert await world.call("make_room") == 0
    await go_on(world, lease)


async def test_law_6_time_counts_again_once_the_server_takes_something(world: World) -> None:
    lease = await leased(world)
    await world.has_room(100)
    await world.call("make_room", 4000, False)
    await world.call("push_many", [(lease, make_trajectory(lease, 0))])
    await world.pass_time(round(1000 * LEASE_S))
    await world.call("make_room")
    assert (await world.client.group(lease.group.id) or {})["replica"] == ""  # passed on
