"""Everything that waits for something else, at once: nothing waits for ever (acceptance 7)."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from headrace.net import rpc
from headrace.net.replica_client import ReplicaFenced, SampleRequest
from headrace.replay import Limits
from headrace_services.agents.program_starter import HubPrograms
from tests.integration.agents.stage import N, Stage
from tests.support.buffer import make_group, refit, reserve_later
from tests.support.nested_program import CALLS
from tests.support.reward_hub import attach_environment, scoring, start_hub
from tests.support.waiting import eventually

NESTED = Path(__file__).parents[2] / "support" / "nested_program.py"
SLOTS = N + 1  # a group with the one episode that is started beyond it
MOST_BYTES = 64 * 1024  # of an episode
STEPS = 3


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.nightly)])  # at age 0 there is most to wait for
def limits(limits: Limits, request: pytest.FixtureRequest) -> Limits:
    """The memory of one group, and a little for those that are done."""
    return dataclasses.replace(
        limits,
        redundant=SLOTS - N,
        max_age=request.param,
        max_episode_bytes=MOST_BYTES,
        max_bytes=2 * SLOTS * MOST_BYTES + MOST_BYTES,
    )


class Refits:
    """Of a replica that takes no call from the announcement of a refit to its end, and takes part once it has answered those before."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._under_way = False
        stage.toy.before = self._before

    async def _before(self, request: SampleRequest) -> None:
        if self._under_way:
            raise ReplicaFenced("refit", "the replica takes no calls until its refit is over")
        await asyncio.sleep(0.01)

    async def to(self, version: int) -> None:
        toy = self._stage.toy
        self._under_way = True
        await eventually(lambda: toy.sampling == 0)
        await refit(self._stage.replay, version, [toy.policy.replica])
        toy.policy.version = version
        self._under_way = False


async def train(stage: Stage, prompts_per_step: int) -> None:
    """Steps, each with a validation that the refit behind it waits for."""
    replay, refits = stage.replay, Refits(stage)
    timeline = (await replay.state()).timeline
    await stage.enqueue(*range(STEPS * prompts_per_step))
    for step in range(STEPS):
        validation = f"v{step}-0"
        group = make_group(0, n=1, lane="validation", group_id=validation, env_name="talk")
        await replay.enqueue([group], timeline, validation=step)
        await reserve_later(replay, step)

        async def validated(group_id: str = validation) -> bool:
            done, failed, _ = await replay.read_evaluated([group_id])
            assert not failed
            return bool(done)

        await eventually(validated)
        await refits.to(step + 1)
        await replay.commit(step + 1, timeline)


async def test_calls_refits_validations_and_graders_do_not_wait_in_a_circle(stage: Stage, limits: Limits) -> None:
    env = {"talk": {"attached": True, "episodes": True, "grader": "judge"}, "judge": {"attached": True}}
    stage.config = type(stage.config).model_validate({**stage.config.model_dump(exclude_unset=True), "env": env})
    async with (
        start_hub(env) as hub,
        attach_environment(NESTED, hub, "--capacity", str(SLOTS)),
        rpc.channel(f"127.0.0.1:{hub.port}", keep_alive=True) as channel,
        scoring(stage.replay, hub.port),
        stage.runner(HubPrograms([channel]), slots=SLOTS, max_episode_bytes=MOST_BYTES) as (runner, _, _),
    ):
        await hub.ready()
        async with asyncio.timeout(limits.max_attempts * stage.config.agents.episode_s):
            await train(stage, limits.prompts_per_step)
        counts = await stage.counts()
        assert counts == {"trained": STEPS * limits.prompts_per_step}
        # no clock had to end anything, and no episode began anew
        ended = {outcome for outcome, count in runner.status.outcomes.items() if count}
        assert ended <= {"graded", "surplus"}
        assert len(stage.toy.policy.asked) >= CALLS * N * STEPS * limits.prompts_per_step
