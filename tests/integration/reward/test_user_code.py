"""Whatever a user's code raises or returns ends its own sample as FAILED in a process of its own too, on each road to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace import Episode, Sample, Score
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.v1 import reward_pb2
from tests.support.reward_hub import WAIT_S, Hub, attach_environment, start_environment, start_hub
from tests.support.user_code import VALUES

MINE = Path(__file__).parents[2] / "support" / "user_code.py"


@contextlib.asynccontextmanager
async def attached() -> AsyncIterator[Hub]:
    dials = {"attached": True}
    async with start_hub({"scores": dials, "plays": {**dials, "episodes": True}}) as hub, attach_environment(MINE, hub):
        await hub.ready()
        yield hub


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Hub]:
    async with start_environment(MINE) as mine:
        target = {"target": mine.target}
        async with start_hub({"scores": target, "plays": {**target, "episodes": True}}) as hub:
            yield hub


@contextlib.asynccontextmanager
async def hosted() -> AsyncIterator[Hub]:
    play = {"type": "function", "function": "tests.support.user_code:play", "concurrency": 2}
    async with start_hub({"scores": {"target": f"{MINE}:Mine"}, "plays": play}) as hub:
        yield hub


async def score(hub: Hub, *asked: str) -> list[Score]:
    return await hub.score([Sample(each, environment="scores") for each in asked])


async def play(hub: Hub, *asked: str) -> list[Score]:
    async def one(each: str) -> Score:
        deadline = time.monotonic() + WAIT_S
        episode = Episode("http://127.0.0.1:1", "key", public={"do": each}, deadline=deadline, environment="plays")
        request = reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode))
        found = outcome_from_wire((await hub.stub.RunEpisode(request, timeout=WAIT_S)).outcome).score
        assert found is not None
        return found

    return list(await asyncio.gather(*map(one, asked)))


@pytest.mark.parametrize("start", [attached, served, hosted])
async def test_every_failure_is_one_samples_alone_and_frees_its_slot(
    start: Callable[[], contextlib.AbstractAsyncContextManager[Hub]],
) -> None:
    async with start() as hub:
        for ask in (score, play):
            (listed,) = await ask(hub, "list")
            said = {f"raise {number}": name for number, name in enumerate(listed.metadata["errors"])}
            assert len(said) > 100
            for asked in (*said, *(f"return {number}" for number in range(len(VALUES)))):
                bad, good = await ask(hub, asked, "good")
                assert (bad.status, bad.reward, good.reward) == ("FAILED", None, 1.0), (asked, bad)
                assert bad.message.startswith(said.get(asked, "")), asked
                assert not asked.startswith("raise") or f"{MINE}:" in bad.message, bad
                assert bad.message, asked
            assert [each.reward for each in await ask(hub, "good", "good")] == [1.0, 1.0]
        bad, good = await play(hub, "leave", "good")
        assert (bad.status, good.reward) == ("FAILED", 1.0), "a callback that it left in the loop ends its call alone"
        assert bad.message.startswith("SystemExit")
        assert f"{MINE}:" in bad.message
