"""A judge that compares the completions of a group: over a real buffer, scorer and hub, and a real HTTP judge."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from headrace import Sample
from headrace.records.score import Score
from headrace.records.trajectory import Group
from headrace.replay import Lease, Limits, ReplayClient
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


@pytest.mark.parametrize("part", [False, True])
async def test_a_judge_sees_a_group_once_it_is_complete(replay: ReplayClient, part: bool) -> None:
    """Also where it is part of a `combine`."""
    with JudgeServer(by_length) as server:
        env: dict[str, Any] = {"judge": env_of(server, "group")}
        if part:
            env = {"judge": {"type": "combine", "parts": {"part": 1.0}}, "part": env["judge"]}
        async with start_hub(env) as hub, scoring(replay, hub.port):
            lease = await begin(replay)
            await push(replay, lease, 0, "a")
            await push(replay, lease, 1, "bb")

            async def is_held() -> bool:
                return (await replay.stats())["scoring"]["taken"] == 2

            await eventually(is_held)
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
