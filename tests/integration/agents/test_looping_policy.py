"""A policy that loops is trained out of it: episodes that their limit ends earn what `agents.on_limit` says."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.base.errors import ChatError
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net.replica_client import Sampled, SampleRequest
from headrace.records.score import Score
from headrace.records.trajectory import Message, Span
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from tests.integration.agents.stage import Played, Stage, scored
from tests.integration.trainer.learner_cases import config
from tests.support.buffer import refit, reserve_later
from tests.support.toy_policy import ASSISTANT, BOS, END, USER, ToyPolicy
from tests.support.trainer import batch

DONE = 8  # a multiple of it ends an episode; after any other token the policy is asked again
CALLS = 3
PROMPTS, EPISODES, STEPS = 2, 8, 4

pytestmark = pytest.mark.limits(prompts_per_step=PROMPTS, generations_per_prompt=EPISODES, max_age=0)


@dataclasses.dataclass
class Trained(ToyPolicy):
    """Says one token, drawn from the model that is trained, as a number."""

    learner: Learner | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, answered: bool) -> list[int]:
        tokens = [BOS]
        for message in messages:
            tokens += [ASSISTANT, int(message["content"])] if message["role"] == "assistant" else [USER]
            tokens.append(END)
        return tokens if answered else [*tokens, ASSISTANT]

    def sample(self, request: SampleRequest) -> Sampled:
        assert self.learner is not None
        with torch.no_grad():
            logits = self.learner.policy.model(torch.tensor([request.token_ids])).logits[0, -1]
        logprobs = logits.log_softmax(-1).tolist()
        chance = random.Random(f"{request.token_ids} {request.seed}")
        (drawn,) = chance.choices(range(len(logprobs)), [math.exp(logprob) for logprob in logprobs])
        return Sampled(
            token_ids=[drawn],
            logprobs=[logprobs[drawn]],
            spans=(Span(self.version, 0, 1),),
            finish_reason="stop",
            stop_reason=drawn,
            timeline=self.timeline,
            version=self.version,
            replica=self.replica,
        )

    def derender(self, sampled: Sampled, tools: Sequence[Mapping[str, Any]]) -> Message:
        return {"role": "assistant", "content": str(sampled.token_ids[0])}


async def asks_until_done(episode: Episode) -> EpisodeOutcome:
    """It would go on for ever, and what it earns does not say how long it took."""
    messages = list(episode.messages)
    try:
        while True:
            said = await episode.chat(messages)
            if int(said["content"]) % DONE == 0:
                return scored(1.0)
            messages += [said, {"role": "user", "content": "go on"}]
    except ChatError as refused:
        return EpisodeOutcome(Score("FAILED", message=str(refused)))


async def test_a_policy_that_loops_is_trained_out_of_it(stage: Stage, tiny_model: Path) -> None:
    algorithm: dict[str, Any] = {"num_prompts_per_step": PROMPTS, "num_generations_per_prompt": EPISODES}
    learner = Learner(config(tiny_model, grpo=algorithm, policy={"optimizer": {"kwargs": {"lr": 1e-2}}}))
    replay, replica = stage.replay, stage.toy.policy.replica
    timeline = (await replay.state()).timeline
    stage.toy.policy = Trained(version=0, timeline=timeline, replica=replica, learner=learner)
    looped = []
    await stage.enqueue(*range(PROMPTS * STEPS), n=EPISODES)
    async with stage.runner(Played(asks_until_done), max_rollout_turns=CALLS, on_limit=0.0):
        for step in range(STEPS):
            taken = await reserve_later(replay, step)
            pairs = await replay.read([each.key for each in taken.trajectories])
            rewards = [float(score.reward or 0) for _, score in pairs]
            looped.append(sum(trajectory.truncated for trajectory, _ in pairs))
            assert rewards == [float(not trajectory.truncated) for trajectory, _ in pairs]
            train_step(learner, batch([trajectory for trajectory, _ in pairs], rewards, step=step))
            stage.toy.policy.version = step + 1
            await refit(replay, step + 1, [replica])
            await replay.commit(step + 1, timeline)
    assert looped[0] > PROMPTS * EPISODES / 2
    assert looped[-1] == 0
