"""Faults that the model found, each as the shortest example of it."""

from __future__ import annotations

import pytest

from headrace.errors import LeaseLost
from headrace.replay import Ended
from headrace.trajectory import Score
from tests.properties.setting import Setting
from tests.properties.world import World
from tests.support.buffer import make_group, make_trajectory


@pytest.fixture
async def world(clocked_url: str, run_id: str) -> World:
    world = World(clocked_url, run_id)
    await world.open(Setting().limits())
    yield world
    await world.compare_all()
    await world.client.aclose()


async def verified_replica(world: World) -> None:
    await world.call("register", "replica", {})
    await world.call("open_epoch", "epoch", 0, world.model.timeline, {})
    await world.call("acknowledge", "replica", "epoch")
    await world.call("begin_epoch", "epoch", {})
    await world.call("verify", "replica", "epoch", 0.0, 1e-3)


async def test_law_1_a_repeated_enqueue_keeps_the_record_that_the_first_delivery_brought(world: World) -> None:
    """The reply was lost, and the connection sends the same commands again: the group is known, and its record is in use."""
    await world.call("enqueue", [make_group(0)], world.model.timeline, False, echo=True)


async def test_law_4_a_late_rewind_or_restore_never_begins_again_what_has_ended(world: World) -> None:
    """Taken for a new one, it would make the run forget what was trained, or all that it holds, since."""
    await world.call("enqueue", [make_group(0)], world.model.timeline, False)
    await world.call("rewind", 0, "first")
    await world.call("rewind", 0, "second")
    await world.deliver_again(1)
    assert world.model.timeline == "second"
    await world.call("restore", 0, "third", "one", 0, Ended())
    await world.call("restore", 0, "fourth", "two", 0, Ended())
    await world.deliver_again(1)
    await world.deliver_again(3)
    assert (world.model.timeline, world.model.incarnation) == ("fourth", "two")


async def test_law_4_a_late_save_leaves_what_an_earlier_delivery_of_it_saved(world: World) -> None:
    """The group was passed on meanwhile: the late call is refused, and the prefix that the next replica goes on from stays."""
    timeline = world.model.timeline
    await world.call("enqueue", [make_group(0)], timeline, False)
    await verified_replica(world)
    (lease,) = await world.call("lease", "replica", 1)
    await world.call("save_many", [(lease, make_trajectory(lease, 0))])
    saved = world.delivered[-1]
    await world.call("release", lease, "leaving", False)
    world.delivered.append(saved)
    await world.deliver_again(0)
    (again,) = await world.call("lease", "replica", 1)
    assert set(again.prefixes) == {0}


async def test_law_4_a_lease_and_a_taking_to_score_that_arrive_again_late_give_other_tokens(world: World) -> None:
    """The first delivery was lost in the network and comes after the group went back: the caller's nonce is the same, the lease is not."""
    timeline = world.model.timeline
    await world.call("enqueue", [make_group(0)], timeline, False)
    await verified_replica(world)
    (lease,) = await world.call("lease", "replica", 1)
    await world.call("release", lease, "leaving", True)
    (again,) = await world.deliver_again(1)
    assert again.token != lease.token
    assert isinstance(await world.call("release", lease, "leaving", True), LeaseLost)
    await world.call("push_many", [(again, make_trajectory(again, index)) for index in range(2)])
    jobs = await world.call("take_scoring", "scorer", {"math": 2})
    await world.call("score_many", [(job, Score("FAILED", message="no")) for job in jobs])
    await world.pass_time(1000)
    late = await world.deliver_again(1)
    assert {job.token for job in late}.isdisjoint({job.token for job in jobs})


async def test_law_6_a_group_that_is_passed_on_is_leased_no_longer_than_its_deadline_says(world: World) -> None:
    await world.call("enqueue", [make_group(0)], world.model.timeline, False)
    await verified_replica(world)
    (lease,) = await world.call("lease", "replica", 1)
    await world.pass_time(9_000)
    await world.call("heartbeat", "replica", [lease.token])
    await world.pass_time(9_000)
    await world.call("release", lease, "leaving", False)
    (again,) = await world.call("lease", "replica", 1)
    assert (lease.expires_in_s, again.expires_in_s) == (10.0, 7.0)


async def test_law_3_a_batch_whose_scores_end_a_group_answers_what_else_it_brings_of_it(
    clocked_url: str, run_id: str
) -> None:
    """The group is filtered, and forgotten, by the first; the failure of its surplus comes in the same call."""
    world = World(clocked_url, run_id)
    await world.open(Setting(n=1, redundant=1, filter=True).limits())
    await world.call("enqueue", [make_group(0, n=1)], world.model.timeline, False)
    await verified_replica(world)
    (lease,) = await world.call("lease", "replica", 1)
    await world.call("push_many", [(lease, make_trajectory(lease, index)) for index in range(2)])
    jobs = await world.call("take_scoring", "scorer", {"math": 2})
    scores = [Score("SCORED", 1.0), Score("FAILED", message="no")]
    none, lost = await world.call("score_many", list(zip(jobs, scores, strict=True)))
    assert none is None
    assert isinstance(lost, LeaseLost)
    await world.client.aclose()


async def test_law_4_a_score_that_comes_again_is_known_though_the_same_batch_ends_its_group(
    clocked_url: str, run_id: str
) -> None:
    """The group is filtered, and forgotten, by the last score; what was scored before the batch stays known."""
    world = World(clocked_url, run_id)
    await world.open(Setting(n=2, filter=True).limits())
    await world.call("enqueue", [make_group(0, n=2)], world.model.timeline, False)
    await verified_replica(world)
    (lease,) = await world.call("lease", "replica", 1)
    await world.call("push_many", [(lease, make_trajectory(lease, index)) for index in range(2)])
    first, last = await world.call("take_scoring", "scorer", {"math": 2})
    await world.call("score_many", [(first, Score("SCORED", 1.0))])
    said = [(first, Score("TIMED_OUT", message="no")), (last, Score("SCORED", 1.0))]
    assert await world.call("score_many", said) == [None, None]
    await world.client.aclose()


async def test_law_6_what_a_dead_replica_held_is_suspected_though_its_leases_are_over_too(
    clocked_url: str, run_id: str
) -> None:
    """Nobody called the buffer meanwhile, so that both are due at once."""
    world = World(clocked_url, run_id)
    await world.open(Setting(dead_s=8.0).limits())
    await world.call("enqueue", [make_group(order) for order in range(4)], world.model.timeline, False)
    await verified_replica(world)
    leases = await world.call("lease", "replica", 4)
    await world.pass_time(20_000)
    await world.call("heartbeat", "nobody", [lease.token for lease in leases])
    assert (await world.client.stats())["suspects"] == len(leases) == 4
    await world.client.aclose()
