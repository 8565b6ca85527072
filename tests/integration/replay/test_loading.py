"""A replica that loads its engine: known to come, and no more."""

from __future__ import annotations

import asyncio

import pytest

from headrace.base.errors import NotVerified
from headrace.config import Config
from headrace.replay import ReplayClient
from headrace_services.rollout.announcement import announced
from headrace_services.trainer.control.decisions import alive, is_loading
from tests.support.buffer import enqueue, nonce, refit


async def test_no_epoch_asks_a_replica_that_loads_and_it_leases_nothing(replay: ReplayClient) -> None:
    await enqueue(replay, range(2))
    await replay.register("there", {})
    await replay.register("loads", {"pid": 7}, loading=True)
    await refit(replay, 0, ["there"])
    epoch = await replay.open_epoch(nonce(), 1, (await replay.state()).timeline, {})
    assert epoch.members == ("there",)
    fleet = {replica.id: replica for replica in await replay.replicas()}
    assert (fleet["loads"].state, fleet["loads"].info) == ("LOADING", {"pid": 7})
    assert (await replay.heartbeat("loads", [])).state == "LOADING"
    with pytest.raises(NotVerified):
        await replay.lease("loads", 1)
    # it stays what it is until it leaves
    await replay.register("loads", {})
    assert [replica.id for replica in alive(await replay.replicas())] == ["there"]
    assert is_loading(await replay.replicas())
    await replay.deregister("loads")
    assert not is_loading(await replay.replicas())


async def test_while_an_engine_starts_the_fleet_is_told_and_no_longer(replay: ReplayClient, redis_url: str) -> None:
    config = Config.model_validate(
        {"run": {"id": replay.run_id}, "replay": {"redis_url": redis_url}, "rollout": {"heartbeat_s": 0.05}}
    )

    async def loading() -> str:
        async with asyncio.timeout(20):
            while not (found := [each.id for each in await replay.replicas() if each.state == "LOADING"]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # the heartbeat is what it waits for
        return found[0]

    with announced(config):
        first = await loading()
        # as if its heartbeats had been late
        await replay.deregister(first)
        assert await loading() != first
    assert await replay.replicas() == []
