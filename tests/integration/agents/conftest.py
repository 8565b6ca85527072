"""A stage for each test (stage.py): two episodes a group, one replica."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from headrace.config import Config
from headrace.replay import EnvironmentLimits, Limits, ReplayClient
from tests.integration.agents.stage import N, Stage
from tests.support.buffer import keep_alive, nonce, refit
from tests.support.gateways import ToyReplica
from tests.support.toy_policy import ToyPolicy


@pytest.fixture
def base_limits(base_limits: Limits) -> Limits:
    return dataclasses.replace(
        base_limits, generations_per_prompt=N, environments={"talk": EnvironmentLimits(episodes=True)}, max_attempts=2
    )


@pytest.fixture
async def stage(replay: ReplayClient) -> AsyncIterator[Stage]:
    replica = nonce()
    await replay.register(replica, {"url": "toy"})
    await refit(replay, 0, [replica])
    timeline = (await replay.state()).timeline
    toy = ToyReplica(ToyPolicy(version=0, timeline=timeline, replica=replica))
    config = Config.model_validate(
        {
            "run": {"id": replay.run_id},
            "env": {"talk": {"attached": True, "episodes": True, "public": ["hint"]}},
            "rollout": {"heartbeat_s": 0.1},
            "grpo": {"num_generations_per_prompt": N},
            "agents": {"slots": 16},
        }
    )
    beating = asyncio.create_task(keep_alive(replay, replica))
    yield Stage(replay, config, toy)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
