"""A judge that compares the completions of a group: over a real buffer, scorer and hub, and a real HTTP judge."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from headrace import Environment, Sample
from headrace.env.server import serving
from headrace.records.score import Score
from headrace.records.trajectory import Group
from headrace.replay import Lease, Limits, ReplayClient
from headrace_services.replay import scorer
from tests.support.buffer import healthy_replica, make_group, make_trajectory
from tests.support.judge_server import JudgeServer, judged, said
from tests.support.reward_hub import scoring, start_hub
from tests.support.waiting import eventually

N = 3

pytestmark = pytest.mark.limits(prompts_per_step=1, generations_per_prompt=N)


def by_length(request: dict[str, Any]) -> tuple[int, bytes]:
    """Scores by length, up to 10; of two the longer is better."""
    completions = judged(request)["completions"]
    if "better" in request["response_format"]["json_schema"]["schema"]["properties"]:
        first, second = len(completions["1"]), len(completions["2"])
        return said({"reason": "long", "better": "tie" if first == second else "1" if first > second else "2"})
    return said({"reason": "long", "scores": {number: len(text) for number, text in completions.items()}})


def env_of(server: JudgeServer, compare: str, **env: Any) -> dict[str, Any]:
    judges = [{"base_url": server.base_url, "model": "small"}]
    return {"type": "llm_judge", "judges": judges, "rubric": "Long?", "scale": [0, 10], "compare": compare} | env


def members(*texts: str, **more: Any) -> list[Sample]:
    group = dict(enumerate(texts))
    return [
        Sample(text, environment="judge", group_id="g", index=index, group_completions=group, **more)
        for index, text in group.items()
    ]


async def scored(server: JudgeServer, compare: str, samples: list[Sample], **env: Any) -> list[Score]:
    async with start_hub({"judge": env_of(server, compare, **env)}) as hub:
        return await hub.score(samples)


async def test_a_group_is_judged_by_one_request() -> None:
    with JudgeServer(by_length) as server:
        scores = await scored(server, "group", members("a" * 2, "a" * 9, "a" * 5, "a" * 2))
    assert [score.reward for score in scores] == pytest.approx([0.2, 0.9, 0.5, 0.2])
    (request,) = server.requests
    assert set(judged(request)["completions"].values()) == {"a" * 2, "a" * 9, "a" * 5}
    assert scores[0].metadata == {"judge_0": "long"}


async def test_a_repetition_shows_the_same_order_and_another_group_another() -> None:
    texts = [str(number) * 3 for number in range(8)]
    with JudgeServer(by_length) as server:
        for group_id in ("g", "g", "h"):
            samples = [dataclasses.replace(each, group_id=group_id) for each in members(*texts)]
            await scored(server, "group", samples)
    first, again, other = (list(judged(request)["completions"].values()) for request in server.requests)
    assert first == again != other


async def test_pairs_give_the_share_of_wins_with_ties_a_half() -> None:
    with JudgeServer(by_length) as server:
        scores = await scored(server, "pairs", members("a", "bb", "cc", "ddd"), opponents=3)
    assert [score.reward for score in scores] == pytest.approx([0, 0.5, 0.5, 1])
    assert len(server.requests) == 6


async def test_a_reference_is_compared_without_being_given_away() -> None:
    row = {"extra_env_info": {"answer": "bb"}}
    samples = [Sample(text, environment="judge", group_id="g", **row) for text in ("a", "bb", "ccc")]
    with JudgeServer(by_length) as server:
        scores = await scored(server, "reference", samples)
        (without,) = await scored(server, "reference", [Sample("a", environment="judge")])
    assert [score.reward for score in scores] == [0, 0.5, 1]
    assert [set(judged(request)) for request in server.requests] == [{"prompt", "completions"}] * 2
    assert (without.status, without.reward) == ("INVALID", None)


async def test_a_group_of_one_is_scored_alone_or_against_its_reference() -> None:
    alone = members("aaaa")
    with JudgeServer(by_length) as server:
        (absolute,) = await scored(server, "group", alone)
        (pair,) = await scored(server, "pairs", alone)
        (referred,) = await scored(server, "pairs", members("aaaa", extra_env_info={"answer": "a"}))
    assert (absolute.reward, referred.reward) == (pytest.approx(0.4), 1)
    assert (pair.status, pair.reward) == ("INVALID", None)


async def test_law_7_failure_is_not_zero_a_group_half_judged_is_not() -> None:
    with JudgeServer(lambda _: said({"reason": "", "scores": {"1": 5}})) as server:
        scores = await scored(server, "group", members("a", "b"), retries=0)
        (alone,) = await scored(server, "group", [Sample("a", environment="judge")])
    assert {(score.status, score.reward) for score in scores} == {("FAILED", None)}
    assert (alone.status, alone.reward) == ("INVALID", None)  # it came without its group


async def test_equal_completions_tie() -> None:
    with JudgeServer(by_length) as server:
        scores = await scored(server, "pairs", members("a", "a"))
    assert ([score.reward for score in scores], server.requests) == ([0.5, 0.5], [])


async def begin(replay: ReplayClient) -> Lease:
    group: Group = msgspec.structs.replace(make_group(0, n=N, env_name="judge"), extra_env_info={})
    await replay.enqueue([group], (await replay.state()).timeline)
    (lease,) = await replay.lease(await healthy_replica(replay), 1)
    return lease


async def push(replay: ReplayClient, lease: Lease, index: int, text: str) -> None:
    await replay.push(lease, msgspec.structs.replace(make_trajectory(lease, index), text=text))


async def rewards(replay: ReplayClient, lease: Lease) -> dict[int, float]:
    """The rewards of the group, once all are there."""

    async def is_scored() -> bool:
        held = await replay.group(lease.group.id)
        return held is not None and held["state"] == "ready"

    await eventually(is_scored)
    held = await replay.read_held(lease.group.id)
    assert held is not None
    return {
        each.index: score.reward for each, score in held.trajectories if score is not None and score.reward is not None
    }


async def nothing(*_: object) -> AsyncIterator[tuple[str, str]]:
    for group in ():
        yield group


@pytest.mark.parametrize(("part", "listed"), [(False, True), (True, True), (False, False)])
async def test_a_judge_sees_a_group_once_it_is_complete(
    replay: ReplayClient, part: bool, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is part of a `combine`, and where the list of open groups misses one that moves meanwhile."""
    if not listed:
        monkeypatch.setattr(replay, "groups", nothing)
    with JudgeServer(by_length) as server:
        env: dict[str, Any] = {"judge": env_of(server, "group")}
        if part:
            env = {"judge": {"type": "combine", "parts": {"part": 1.0}}, "part": env["judge"]}
        async with start_hub(env) as hub, scoring(replay, hub.port):
            lease = await begin(replay)
            await push(replay, lease, 0, "a")
            await push(replay, lease, 1, "bb")

            await taken(replay, 2)
            assert server.requests == []
            await push(replay, lease, 2, "cccc")
            assert await rewards(replay, lease) == pytest.approx({0: 0.1, 1: 0.2, 2: 0.4})
    assert len(server.requests) == 1


async def test_a_group_is_judged_without_the_member_that_failed(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, redundant=1))
    with JudgeServer(by_length) as server:
        async with start_hub({"judge": env_of(server, "group")}) as hub, scoring(replay, hub.port):
            lease = await begin(replay)
            for index, text in ((0, "a"), (1, "bb"), (3, "ccc")):
                await push(replay, lease, index, text)
            await replay.abandon(lease, 2, "the engine refused it")
            assert await rewards(replay, lease) == pytest.approx({0: 0.1, 1: 0.2, 3: 0.3})
    assert [set(judged(request)["completions"].values()) for request in server.requests] == [{"a", "bb", "ccc"}]


class Noted(Environment):
    """Rewards each completion by its length, one at a time, and notes what it is sent."""

    build = "1"
    concurrency = 1

    def __init__(self, whole_groups: bool) -> None:
        self.whole_groups = whole_groups
        self.seen: list[Sample] = []

    async def score(self, sample: Sample) -> float:
        self.seen.append(sample)
        await asyncio.sleep(0.02)
        return float(len(sample.completion))


@contextlib.asynccontextmanager
async def judging(replay: ReplayClient, **noted: Noted) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        ports = {name: await stack.enter_async_context(serving(env)) for name, env in noted.items()}
        hub = await stack.enter_async_context(
            start_hub({name: {"target": f"127.0.0.1:{port}"} for name, port in ports.items()})
        )
        await stack.enter_async_context(scoring(replay, hub.port))
        yield


async def taken(replay: ReplayClient, count: int) -> None:
    async def is_taken() -> bool:
        return (await replay.stats())["scoring"]["taken"] == count

    await eventually(is_taken)


async def lease_all(replay: ReplayClient, *groups: Group) -> list[Lease]:
    await replay.enqueue(list(groups), (await replay.state()).timeline)
    return list(await replay.lease(await healthy_replica(replay), len(groups)))


@pytest.mark.limits(prompts_per_step=2, generations_per_prompt=4)
async def test_law_6_liveness_a_complete_group_is_no_overload(replay: ReplayClient) -> None:
    """All at once would be more than the environment starts, and look as if it had broken."""
    refused = {"environment": "judge", "status": "NOT_STARTED"}
    before = REGISTRY.get_sample_value("headrace_reward_results_total", refused)
    judge = Noted(whole_groups=True)
    async with judging(replay, judge=judge):
        leases = await lease_all(replay, *(make_group(order, n=4, env_name="judge") for order in range(2)))
        for index in range(3):
            for place, lease in enumerate(leases):
                await push(replay, lease, index, "a" * index)
                await taken(replay, 2 * index + place + 1)
        for lease in leases:
            await push(replay, lease, 3, "aaa")
        for lease in leases:
            assert await rewards(replay, lease) == {index: index for index in range(4)}
    assert REGISTRY.get_sample_value("headrace_reward_results_total", refused) == before
    assert "broken" not in [fields.get("state") for _, fields in await replay.events("0", 0.1)]
    assert sorted(sample.index for sample in judge.seen) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.limits(prompts_per_step=4, generations_per_prompt=2)
async def test_law_6_liveness_incomplete_groups_keep_none_waiting(
    replay: ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "_MOST_IN_FLIGHT", 2)
    async with judging(replay, judge=Noted(whole_groups=True), alone=Noted(whole_groups=False)):
        first, second, third, other = await lease_all(
            replay, *(make_group(order, env_name="alone" if order == 3 else "judge") for order in range(4))
        )
        for place, lease in enumerate((first, second, third)):
            await push(replay, lease, 0, "a")
            await taken(replay, place + 1)
        for index in range(2):
            await push(replay, other, index, "bb")
        assert await rewards(replay, other) == {0: 2, 1: 2}
        for lease in (first, second, third):
            await push(replay, lease, 1, "ccc")
            assert await rewards(replay, lease) == {0: 1, 1: 3}


@pytest.mark.limits(prompts_per_step=1, generations_per_prompt=2)
async def test_what_was_generated_before_its_group_went_back_is_not_judged(replay: ReplayClient) -> None:
    judge = Noted(whole_groups=True)
    async with judging(replay, judge=judge):
        (lease,) = await lease_all(replay, make_group(0, env_name="judge"))
        await push(replay, lease, 0, "former")
        await taken(replay, 1)
        await replay.abandon(lease, 1, "the engine refused it")
        (again,) = await replay.lease(await healthy_replica(replay), 1)
        for index, text in enumerate(("a", "bb")):
            await push(replay, again, index, text)
        assert await rewards(replay, again) == {0: 1, 1: 2}
    assert [sample.group_completions for sample in judge.seen] == [{0: "a", 1: "bb"}] * 2


async def test_law_6_liveness_the_failure_that_completes_wakes(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, redundant=1))
    lease = await begin(replay)
    for index in (0, 1, 3):
        await push(replay, lease, index, "a")
    async with replay.redis.pubsub() as wakes, asyncio.timeout(30):
        await wakes.subscribe(f"hr:{{{replay.run_id}}}:wake:scoring")
        await wakes.get_message(timeout=None)  # it is subscribed
        await replay.abandon(lease, 2, "the engine refused it")
        assert (await wakes.get_message(timeout=None))["type"] == "message"


@pytest.mark.limits(prompts_per_step=1, generations_per_prompt=2, max_scoring_attempts=1)
async def test_a_group_too_large_for_a_message_fails_with_the_key(replay: ReplayClient) -> None:
    """Each trajectory goes out with the completions of its whole group."""
    async with serving(Noted(whole_groups=True)) as port:
        env = {"judge": {"target": f"127.0.0.1:{port}"}}
        async with start_hub(env, max_message_bytes=65536) as hub, scoring(replay, hub.port, max_message_bytes=65536):
            (lease,) = await lease_all(replay, make_group(0, env_name="judge"))
            for index in range(2):
                await push(replay, lease, index, "x" * 25_000)

            async def has_failed() -> bool:
                held = await replay.group(lease.group.id)
                return held is not None and held["state"] == "failed"

            await eventually(has_failed)
    held = await replay.group(lease.group.id)
    assert held is not None
    assert re.search(r"its whole group.* \d+ bytes; raise reward\.max_message_bytes \(65536\)", held["reason"])
