"""A broken environment pauses the run and fails no group: a real buffer, scorer and hub, and environments that break in every way."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import Environment, Sample
from headrace.base.errors import EnvironmentBroken
from headrace.env.server import serving
from headrace.records.score import Score
from headrace.records.trajectory import Group
from headrace.replay import EnvironmentLimits, EnvironmentState, Limits, ReplayClient
from tests.support.buffer import healthy_replica, make_group, make_trajectory, refit, reserve_later
from tests.support.judge_server import JudgeServer, said
from tests.support.ports import free_port
from tests.support.reward_hub import WAIT_S, scoring, start_environment, start_hub
from tests.support.waiting import eventually

GROUPS, N, STEPS = 4, 4, 3
ODD = Path(__file__).parents[2] / "support" / "odd_environment.py"

# no second chance: an attempt that is charged wrongly fails a group
pytestmark = pytest.mark.limits(prompts_per_step=GROUPS, generations_per_prompt=N, max_scoring_attempts=1, max_age=0)


class Scores(Environment):
    name = "told"

    def score(self, sample: Sample) -> float | Score:
        return float(sample.extra_env_info["answer"] != "")


class Misspelt(Environment):
    name = "told"

    def score(self, sample: Sample) -> float | Score:
        return float(sample.extra_env_info["anwser"] != "")


class Misnamed(Environment):
    name = "told"

    def score(self, sample: Sample) -> float | Score:
        return Score("INVALID", message="extra_env_info has no solution")


class Silent(Environment):
    """Begins, and never ends."""

    name = "slow"
    concurrency = 8

    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def score(self, sample: Sample) -> float:
        self.entered.set()
        return await asyncio.Event().wait()


def group(order: int, env_name: str = "told", **info: Any) -> Group:
    base = make_group(order, n=N, env_name=env_name)
    return msgspec.structs.replace(base, extra_env_info={**base.extra_env_info, **info})


async def enqueue(replay: ReplayClient, groups: list[Group]) -> None:
    await replay.enqueue(groups, (await replay.state()).timeline)


async def generate(replay: ReplayClient, replica: str, text: Callable[[Group, int], str] = lambda *_: "7") -> int:
    """Lease what the buffer gives, and push it; returns how many groups."""
    leases = await replay.lease(replica, GROUPS)
    for lease in leases:
        for index in lease.missing:
            trajectory = make_trajectory(lease, index)
            await replay.push(lease, msgspec.structs.replace(trajectory, text=text(lease.group, index)))
    return len(leases)


async def environment(replay: ReplayClient, name: str = "told") -> EnvironmentState:
    return next(each for each in await replay.environments() if each.name == name)


async def broken(replay: ReplayClient, name: str = "told", *, said: str = "") -> EnvironmentState:
    async def holds() -> bool:
        state = await environment(replay, name)
        return state.broken and said in state.message

    await eventually(holds)
    return await environment(replay, name)


@pytest.mark.parametrize(("breaks", "said"), [(Misspelt(), "KeyError: 'anwser' ("), (Misnamed(), "no solution")])
async def test_law_1_a_broken_environment_fails_no_group_until_repaired(
    replay: ReplayClient, breaks: Environment, said: str
) -> None:
    port = free_port()
    await enqueue(replay, [group(order) for order in range(GROUPS * STEPS)])
    async with start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub, scoring(replay, hub.port):
        replica = await healthy_replica(replay)
        async with serving(breaks, port=port):
            await generate(replay, replica)
            state = await broken(replay, said=said)  # a hub that is not connected yet says so first
            assert ("Traceback" in state.traceback) == isinstance(breaks, Misspelt)

            async def probed() -> bool:
                return (await environment(replay)).probes > 0

            await eventually(probed)
            assert await replay.lease(replica, GROUPS) == []
            counts = (await replay.state()).counts
            assert (counts.get("failed", 0), counts["scoring"]) == (0, GROUPS)
            assert (await replay.stats())["environments"][0]["broken"]
        async with serving(Scores(), port=port):
            for step in range(STEPS):
                batch = await reserve_later(replay, step)
                assert {trajectory.reward for trajectory in batch.trajectories} == {1.0}
                await refit(replay, step + 1, [replica])
                await generate(replay, replica)
    events = [fields for _, fields in await replay.events("0", 0.1) if fields["kind"] == "environment"]
    # a hub that was not connected yet may have opened it too, before
    assert len([fields for fields in events if fields["state"] == "broken" and said in fields["message"]]) == 1
    assert events[-1]["state"] == "works"


async def test_one_bad_problem_among_others_fails_alone(replay: ReplayClient) -> None:
    class Picky(Environment):
        name = "told"

        def score(self, sample: Sample) -> float:
            if sample.extra_env_info["answer"] == "":
                raise ValueError("no answer")
            return 1.0

    await enqueue(replay, [group(0, answer=""), *(group(order) for order in range(1, GROUPS))])
    async with serving(Picky()) as port, start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub:
        await generate(replay, await healthy_replica(replay))
        async with scoring(replay, hub.port):

            async def settled() -> bool:
                counts = (await replay.state()).counts
                return (counts.get("failed"), counts.get("ready")) == (1, GROUPS - 1)

            await eventually(settled)
    assert not (await environment(replay)).broken


@pytest.mark.parametrize("breaks", ["raises", "refuses"])
async def test_law_6_an_environment_left_with_bad_prompts_holds_nothing_up(replay: ReplayClient, breaks: str) -> None:
    """All that admission lets in are bad."""

    class Picky(Environment):
        name = "told"

        def score(self, sample: Sample) -> float | Score:
            if sample.extra_env_info["answer"] != "":
                return 1.0
            if breaks == "raises":
                raise ValueError("no answer")
            return Score("INVALID", message="no answer")

    bad, good = [group(order, answer="") for order in range(GROUPS)], [group(GROUPS + order) for order in range(GROUPS)]
    await enqueue(replay, bad + good)
    async with serving(Picky()) as port, start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub:
        replica = await healthy_replica(replay)
        await generate(replay, replica)
        async with scoring(replay, hub.port):
            await broken(replay, said="no answer")
            counts = (await replay.state()).counts
            assert (counts.get("failed", 0), counts["scoring"]) == (0, GROUPS)

            async def ready() -> bool:
                await generate(replay, replica)
                return (await replay.state()).counts.get("ready") == GROUPS

            await eventually(ready)
            batch = await reserve_later(replay, 0)
    assert batch.groups == tuple(each.id for each in good)
    assert {trajectory.reward for trajectory in batch.trajectories} == {1.0}
    for each in bad:
        assert "no answer" in (await replay.group(each.id) or {})["reason"]


async def test_a_slow_environment_takes_no_place_of_a_fast_one(replay: ReplayClient) -> None:
    slow = Silent()
    names = ["slow"] * (GROUPS // 2) + ["told"] * (GROUPS // 2)
    await enqueue(replay, [group(order, name) for order, name in enumerate(names)])
    async with serving(slow) as slow_port, serving(Scores()) as port:
        env = {"slow": {"target": f"127.0.0.1:{slow_port}"}, "told": {"target": f"127.0.0.1:{port}"}}
        async with start_hub(env) as hub, scoring(replay, hub.port):
            await generate(replay, await healthy_replica(replay))

            async def scored() -> bool:
                return (await replay.state()).counts.get("ready") == GROUPS // 2

            await eventually(scored)
            await asyncio.wait_for(slow.entered.wait(), WAIT_S)
            assert not (await environment(replay, "slow")).broken


async def test_an_environment_that_is_not_there_costs_nothing_and_is_named(replay: ReplayClient) -> None:
    port = free_port()
    await enqueue(replay, [group(order) for order in range(GROUPS)])
    async with start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub, scoring(replay, hub.port):
        await generate(replay, await healthy_replica(replay))
        state = await broken(replay)
        assert state.kind == "NOT_STARTED"
        assert f"env.told.target 127.0.0.1:{port} can't be reached" in state.message
        async with serving(Scores(), port=port):
            await reserve_later(replay, 0)


async def test_a_trajectory_that_kills_its_environment_is_charged_alone(replay: ReplayClient) -> None:
    """Sixteen are with the process when it dies; each is then sent alone. If a slow start makes the environment look broken until only the
    one that kills it is left, a new prompt shows that it works, as in a run that has more of them."""
    port = free_port()
    await enqueue(replay, [group(order, "odd") for order in range(2 * GROUPS)])

    def text(of: Group, index: int) -> str:
        return "die" if (of.order, index) == (1, 2) else "abc"

    async def keep_alive() -> None:
        while True:
            async with start_environment(ODD, port=port) as odd:
                await odd.process.wait()

    running = asyncio.create_task(keep_alive())
    try:
        async with start_hub({"odd": {"target": f"127.0.0.1:{port}"}}) as hub, scoring(replay, hub.port):
            await generate(replay, await healthy_replica(replay), text)

            async def settled() -> bool:
                if (await environment(replay, "odd")).broken:
                    # the first replica sends no heartbeat, so it may be gone by now
                    await generate(replay, await healthy_replica(replay), text)
                counts = (await replay.state()).counts
                return counts.get("failed") == 1 and counts.get("ready", 0) >= GROUPS - 1

            await eventually(settled)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    ((failed, _),) = [(g, s) async for g, s in replay.groups(["failed"])]
    assert failed == group(1).id
    assert "INTERRUPTED" in (await replay.group(failed) or {})["reason"]


async def test_give_up_after_ends_the_run_with_the_reason(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, environments={"told": EnvironmentLimits(give_up_after_s=0.001)}))
    await enqueue(replay, [group(order) for order in range(GROUPS)])
    async with (
        serving(Misspelt()) as port,
        start_hub({"told": {"target": f"127.0.0.1:{port}"}}) as hub,
        scoring(replay, hub.port),
    ):
        await generate(replay, await healthy_replica(replay))
        await broken(replay)
        with pytest.raises(EnvironmentBroken, match=r"told.*give_up_after.*KeyError: 'anwser'"):
            await replay.reserve(0, (await replay.state()).timeline)


async def test_a_judge_out_of_budget_pauses_the_run_and_fails_no_group(replay: ReplayClient) -> None:
    verdict = said({"reason": "", "score": 9})
    with JudgeServer(lambda _: verdict) as server:
        judge = {"base_url": server.base_url, "model": "judge"}
        env = {"type": "llm_judge", "judges": [judge], "rubric": "Is it polite?", "budget": 2}
        await enqueue(replay, [group(order) for order in range(GROUPS)])
        async with start_hub({"told": env}) as hub, scoring(replay, hub.port):
            await generate(replay, await healthy_replica(replay), lambda group, index: f"{group.id} {index}")
            await broken(replay, said="env.told.budget 2 is used up: the run has sent that many requests")
            counts = (await replay.state()).counts
        assert (counts.get("failed", 0), counts["scoring"]) == (0, GROUPS)
        assert len(server.requests) == 2
