"""Two hubs, each with processes of its own attached: a real buffer and scorer share the work among them, and lose one under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from headrace.config import Config
from headrace.replay import ReplayClient
from headrace_services.replay.scorer import run_scorer
from tests.support.buffer import healthy_replica, make_group, push_all, refit, reserve_later
from tests.support.ports import free_port
from tests.support.reward_hub import WAIT_S, Hub, attach_environment, start_hub
from tests.support.waiting import eventually

GROUPS, N = 8, 4
ATTACHED = {"mine": {"attached": True}}
SCRIPT = """
import argparse, asyncio, headrace


class Mine(headrace.Environment):
    async def score(self, sample):
        await asyncio.sleep(0.05)
        return headrace.Score("SCORED", 1.0, metadata={"hub": arguments.attach})

parser = argparse.ArgumentParser()
parser.add_argument("--attach")
arguments = parser.parse_args()
headrace.attach(arguments.attach, Mine(), "mine", capacity=4)
"""

# no second chance: an attempt that is charged fails its group
pytestmark = pytest.mark.limits(prompts_per_step=GROUPS, generations_per_prompt=N, max_scoring_attempts=1)


@contextlib.asynccontextmanager
async def scoring(replay: ReplayClient, ports: Sequence[int]) -> AsyncIterator[None]:
    reward = {"address": [f"127.0.0.1:{port}" for port in ports]}
    config = Config.model_validate({"run": {"id": "run"}, "reward": reward, "logger": {"keep_step_data": 0}})
    stop = asyncio.Event()
    task = asyncio.create_task(run_scorer(config, replay, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


async def generate(replay: ReplayClient, step: int, replica: str) -> None:
    if step:
        await refit(replay, step, [replica])
    groups = [make_group(step * GROUPS + place, n=N, env_name="mine") for place in range(GROUPS)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    for lease in await replay.lease(replica, GROUPS):
        await push_all(replay, lease)


async def scored_by(replay: ReplayClient, step: int) -> set[str]:
    """The hubs whose processes scored the batch of `step`, once it is complete: each trajectory once, with a reward of 1."""
    batch = await reserve_later(replay, step)
    read = await replay.read([one.key for one in batch.trajectories])
    assert [score.reward for _, score in read] == [1.0] * GROUPS * N
    return {score.metadata["hub"] for _, score in read}


async def at_work(hub: Hub) -> bool:
    return bool((await hub.environments())["mine"].in_hand)


def of(*hubs: Hub) -> set[str]:
    return {f"127.0.0.1:{hub.port}" for hub in hubs}


async def test_law_1_conservation_two_hubs_and_a_restart_under_load(replay: ReplayClient, tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(SCRIPT)
    ports = free_port(), free_port()
    async with start_hub(ATTACHED, port=ports[0]) as staying, contextlib.AsyncExitStack() as leaving:
        other = await leaving.enter_async_context(start_hub(ATTACHED, port=ports[1]))
        async with attach_environment(script, staying) as process, attach_environment(script, other):
            await staying.attached("mine", 4)
            await other.attached("mine", 4)
            async with scoring(replay, ports):
                replica = await healthy_replica(replay)
                await generate(replay, 0, replica)
                assert await scored_by(replay, 0) == of(staying, other)

                await generate(replay, 1, replica)
                await eventually(lambda: at_work(other))
                await leaving.aclose()
                assert await scored_by(replay, 1) >= of(staying)

                async with start_hub(ATTACHED, port=ports[1]) as again:
                    await asyncio.wait_for(again.channel.channel_ready(), WAIT_S)
                    await again.attached("mine", 4)
                    process.kill()
                    await staying.attached("mine", 0)
                    await generate(replay, 2, replica)
                    assert await scored_by(replay, 2) == of(again)
        counts = {state: count for state, count in (await replay.state()).counts.items() if count}
        assert counts == {"reserved": 3 * GROUPS}
