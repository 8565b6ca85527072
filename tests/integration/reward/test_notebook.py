"""A reward in a notebook: cells of a real Jupyter kernel attach it while a real buffer, scorer and hub score, and edit it on the way."""

from __future__ import annotations

import pytest

from headrace.replay import ReplayClient
from tests.support.buffer import healthy_replica, make_group, push_all, refit, reserve_later
from tests.support.notebook import Notebook, notebook
from tests.support.reward_hub import scoring, start_hub
from tests.support.waiting import eventually

GROUPS, N = 2, 4
CAPACITY = 4
REWARD = """
import asyncio, headrace


class Mine(headrace.Environment):
    async def score(self, sample):
        if sample.index >= {only}:
            await asyncio.sleep(3600)
        return {reward}
"""

# no second chance: an attempt that is charged fails its group
pytestmark = pytest.mark.limits(prompts_per_step=GROUPS, generations_per_prompt=N, max_scoring_attempts=1)


async def generate(replay: ReplayClient, first: int, replica: str) -> None:
    groups = [make_group(first + place, n=N, env_name="mine") for place in range(GROUPS)]
    await replay.enqueue(groups, (await replay.state()).timeline)
    for lease in await replay.lease(replica, GROUPS):
        await push_all(replay, lease)


async def reserve(replay: ReplayClient, step: int) -> tuple[set[float], set[str]]:
    """The rewards and the builds of the step's batch, once it is there."""
    batch = await reserve_later(replay, step)
    read = await replay.read([one.key for one in batch.trajectories])
    assert len(read) == GROUPS * N
    return {one.reward for one in batch.trajectories}, {score.build for _, score in read}


async def test_law_3_one_build_a_reward_edited_in_a_cell_is_never_mixed(replay: ReplayClient) -> None:
    # A trajectory goes to it in each call, so that those that hang keep no other's score.
    environments: dict[str, object] = {"mine": {"attached": True, "max_batch_size": 1}}
    async with start_hub(environments) as hub, scoring(replay, hub.port), notebook() as cells:
        attach = f'headrace.attach("127.0.0.1:{hub.port}", Mine(), name="mine", capacity={CAPACITY}'

        async def scored_in_part() -> bool:
            groups = [await replay.group(f"e0-train-{order}") for order in (GROUPS, GROUPS + 1)]
            return all(group is not None and group["scored"] == 2 for group in groups)

        replica = await healthy_replica(replay)
        await generate(replay, 0, replica)
        await cells.run(REWARD.format(only=N, reward=1.0))
        attached = cells.run(f"{attach})")
        rewards, first = await reserve(replay, 0)
        assert (rewards, len(first)) == ({1.0}, 1)
        await until_shown(cells, f"attached to 127.0.0.1:{hub.port}: 0 at work, {GROUPS * N} scored, 0 failed")
        await cells.interrupt()
        assert "environment mine, attached" in await attached  # and it ended without an error

        # it hangs on half of each group, and is edited; attaching again takes its place
        await refit(replay, 1, [replica])
        await cells.run(REWARD.format(only=2, reward=2.0))
        await cells.run(f"{attach}, wait=False)\nNone")
        await hub.attached("mine", CAPACITY)
        await generate(replay, GROUPS, replica)
        await eventually(scored_in_part)
        await cells.run(REWARD.format(only=N, reward=3.0))
        await cells.run(f"{attach}, wait=False)\nNone")
        rewards, last = await reserve(replay, 1)
        assert (rewards, len(last)) == ({3.0}, 1)
        assert last != first
        counts = {state: count for state, count in (await replay.state()).counts.items() if count}
        assert counts == {"reserved": 2 * GROUPS}


async def until_shown(cells: Notebook, line: str) -> None:
    async def shown() -> bool:
        return line in cells.printed()

    await eventually(shown)
