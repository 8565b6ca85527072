"""How a replica leaves the fleet, or loses groups: what it held is suspected if an error ends it, and passed on if it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import Config
from headrace.replay import Lease, ReplayClient, leases
from headrace.replay.connection import open_redis
from headrace_services.rollout.decisions import Abort
from headrace_services.rollout.worker import RolloutWorker
from tests.support.buffer import enqueue, refit


class EngineDied(Exception):
    pass


class Engine:
    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=3))

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


class Silent(ReplayClient):
    """Its buffer answers nothing after the registration."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked = asyncio.Event()

    async def heartbeat(self, *_: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def deregister(self, *_: Any, **__: Any) -> None:
        await asyncio.Event().wait()


async def test_law_6_liveness_a_silent_buffer_keeps_no_replica_from_leaving(
    redis_url: str, replay: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PARTING_S", 0.05)
    client = Silent(open_redis(redis_url), replay.run_id)
    worker, stop = RolloutWorker(Config(), Engine(errored=False), client, {}), asyncio.Event()  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run(stop))
    await client.asked.wait()
    stop.set()
    await running
    assert [it.id for it in await replay.replicas()] == [worker.replica]
    await client.aclose()


async def test_a_group_refused_before_the_heartbeat_is_lost_once(leasing: Leasing) -> None:
    await enqueue(leasing, range(2))
    worker = RolloutWorker(Config(), Engine(errored=False), leasing, {})  # type: ignore[arg-type]
    await leasing.register(worker.replica, {})
    first, second = leasing.leases

    async def refused() -> None:
        worker.status.groups["lost"] += 1

    async def runs() -> None:
        await asyncio.Event().wait()

    ended, running = asyncio.create_task(refused()), asyncio.create_task(runs())
    await ended
    worker._groups = {first.token: (first, ended), second.token: (second, running)}
    await worker._act(Abort(frozenset({first.token, second.token})))
    assert worker.status.groups == {"lost": 2, "complete": 0}
    assert running.cancelled()
    assert not worker.held


async def test_a_trajectory_without_a_slot_is_not_begun_when_leaving(leasing: Leasing) -> None:
    await enqueue(leasing, range(2))
    worker = RolloutWorker(Config(), Engine(errored=False), leasing, {})  # type: ignore[arg-type]
    await leasing.register(worker.replica, {})
    async with worker.slots.take(worker.slots.count):
        waiting = asyncio.create_task(worker._generate_one(leasing.leases[0], 0))
        while not worker.slots.waiting:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0)
        worker._leaving = True
    await waiting  # the engine here can't generate
