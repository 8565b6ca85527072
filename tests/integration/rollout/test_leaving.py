"""How a replica leaves the fleet: what it held is suspected if an error ends it, and passed on if it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from headrace.config import Config
from headrace.replay import Lease, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.rollout.worker import RolloutWorker
from tests.support.buffer import enqueue, refit


class EngineDied(Exception):
    pass


class Engine:
    def __init__(self, *, errored: bool) -> None:
        self.errored = errored
        self.dead_error = EngineDied("the engine died")

    async def get_weight_version(self) -> str:
        return "0"


class Leasing(ReplayClient):
    """Its replica is verified, and holds groups, as soon as it has registered."""

    leases: list[Lease]

    async def register(self, replica: str, info: Mapping[str, Any]) -> None:
        await super().register(replica, info)
        await refit(self, 0, [replica])
        self.leases = await self.lease(replica, 2)


@pytest.fixture
async def leasing(redis_url: str, replay: ReplayClient) -> AsyncIterator[Leasing]:
    client = Leasing(open_redis(redis_url), replay.run_id)
    yield client
    await client.aclose()


@pytest.mark.parametrize("errored", [True, False])
async def test_law_6_what_a_replica_held_whose_engine_died_is_suspected(leasing: Leasing, errored: bool) -> None:
    await enqueue(leasing, range(2))
    worker = RolloutWorker(Config(), Engine(errored=errored), leasing, {})  # type: ignore[arg-type]
    stop = asyncio.Event()
    if errored:
        with pytest.raises(EngineDied):
            await worker.run(stop)
    else:
        stop.set()
        await worker.run(stop)
    assert await leasing.replicas() == []
    assert (await leasing.stats())["suspects"] == (2 if errored else 0)
    for lease in leasing.leases:
        group = await leasing.group(lease.group.id)
        assert group is not None
        assert (group["state"], group["replica"], group["failures"]) == ("open", "", 0)
