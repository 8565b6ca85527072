"""Answers that no message holds: each ends its own sample as FAILED with both sizes, and the environment can be reached afterwards."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from headrace import Environment, Episode, Sample, Score
from headrace.env.server import serving
from headrace.env.wire import episode_to_wire, outcome_from_wire
from headrace.net import rpc
from headrace.v1 import reward_pb2
from tests.support.reward_hub import WAIT_S, Hub, start_hub

MOST = 1 << 20


class Hoarder(Environment):
    """Returns metadata of as many bytes as its sample's completion says."""

    def score(self, sample: Sample) -> Score:
        return Score("SCORED", 1.0, metadata={"kept": "x" * int(sample.completion)})


class HoardingBatches(Environment):
    max_batch_size = 8

    def score_batch(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score("SCORED", 1.0, metadata={"kept": "x" * int(sample.completion)}) for sample in samples]


class HoardingProgram(Environment):
    episodes = 1

    async def episode(self, e: Episode) -> float:
        e.artifacts["kept"] = "x" * int(str(e.messages[0]["content"]))
        return 1.0


async def played(hub: Hub, size: int) -> Score:
    episode = Episode("http://127.0.0.1:1", "", messages=({"role": "user", "content": str(size)},), environment="mine")
    answer = await hub.stub.RunEpisode(reward_pb2.RunEpisodeRequest(episode=episode_to_wire(episode)), timeout=WAIT_S)
    score = outcome_from_wire(answer.outcome).score
    assert score is not None
    return score


@pytest.mark.parametrize("environment", [Hoarder, HoardingBatches])
@pytest.mark.parametrize("size", [rpc.MAX_MESSAGE_BYTES, 2 * MOST])
async def test_metadata_that_no_message_holds_fails_its_own_sample(environment: type[Environment], size: int) -> None:
    """Also if the hub's messages are smaller than the environment's."""
    most = MOST if size == 2 * MOST else rpc.MAX_MESSAGE_BYTES
    async with serving(environment()) as port:
        env = {"mine": {"target": f"127.0.0.1:{port}"}}
        async with start_hub(env, max_message_bytes=most) as hub:
            samples = [Sample(str(each), environment="mine") for each in (1, size, 2)]
            first, large, last = await hub.score(samples)
            assert [each.reward for each in (first, last)] == [1, 1], (first, last)
            assert large.status == "FAILED"
            assert len(re.findall(r"\d{6,}", large.message)) == 2, large.message
            (again,) = await hub.score(samples[:1])
            assert again.reward == 1


async def test_metadata_that_only_together_is_too_large_fails_no_small_one() -> None:
    async with serving(Hoarder()) as port:
        env = {"mine": {"target": f"127.0.0.1:{port}", "max_batch_size": 1}}
        async with start_hub(env, max_message_bytes=MOST) as hub:
            share = MOST // 4
            scores = await hub.score([Sample(str(each), environment="mine") for each in (1, *[share] * 5, 2)])
    assert [scores[0].reward, scores[-1].reward] == [1, 1]
    assert {each.status for each in scores[1:-1]} == {"FAILED"}
    assert all(len(re.findall(r"\d{6,}", each.message)) == 2 for each in scores[1:-1]), scores[1].message


@pytest.mark.parametrize("size", [rpc.MAX_MESSAGE_BYTES, 2 * MOST])
async def test_artifacts_that_no_message_holds_fail_their_own_episode(size: int) -> None:
    most = MOST if size == 2 * MOST else rpc.MAX_MESSAGE_BYTES
    async with serving(HoardingProgram()) as port:
        env = {"mine": {"target": f"127.0.0.1:{port}", "episodes": True}}
        async with start_hub(env, max_message_bytes=most) as hub:
            large = await played(hub, size)
            assert large.status == "FAILED"
            assert len(re.findall(r"\d{6,}", large.message)) == 2, large.message
            assert (await played(hub, 1)).reward == 1
