"""Faults that the model found, each as the shortest example of it."""

from __future__ import annotations

import pytest

from tests.integration.replay.helpers import make_group
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
