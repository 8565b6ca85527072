"""Faults that the model found, each as the shortest example of it."""

from __future__ import annotations

import pytest

from headrace.replay import Ended
from tests.integration.replay.helpers import make_group, make_trajectory
from tests.properties.machine import Setting
from tests.properties.world import World


@pytest.fixture
async def world(clocked_url: str, run_id: str) -> World:
    world = World(clocked_url, run_id)
    await world.open(Setting().limits())
    yield world
    await world.compare_all()
    await world.client.aclose()


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
    await world.call("register", "replica", {})
    await world.call("open_epoch", "epoch", 0, timeline, {})
    await world.call("acknowledge", "replica", "epoch")
    await world.call("begin_epoch", "epoch", {})
    await world.call("verify", "replica", "epoch", 0.0, 1e-3)
    (lease,) = await world.call("lease", "replica", 1)
    await world.call("save_many", [(lease, make_trajectory(lease, 0))])
    saved = world.delivered[-1]
    await world.call("release", lease, "leaving", False)
    world.delivered.append(saved)
    await world.deliver_again(0)
    (again,) = await world.call("lease", "replica", 1)
    assert set(again.prefixes) == {0}
