"""`math_multi_reward`: one reward component each for a correct answer, a whole number, and the requested format."""

from __future__ import annotations

import re

from headrace.config.environments import MathMultiRewardConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from .base import SandboxedEnvironment, shorten_answer

_FORMAT = re.compile(r"^<think>.*?</think>\n<answer>.*?</answer>$", re.DOTALL)
_NONE = {"correctness": 0.0, "format": 0.0, "integer": 0.0}


class MathMultiReward(SandboxedEnvironment[MathMultiRewardConfig]):
    """Rewards a correct answer, an integer, and the format. `extra_env_info` is `{"answer": …}`, text or a number. The components are each
    0 or 1, by the rules of NeMo RL's environment of this name. The reward is their sum.

    - correctness: the content of the last `<answer>…</answer>`, or without such a tag the whole completion, equals the expected answer,
      character by character.
    - integer: that content consists only of digits.
    - format: the completion is `<think>…</think>`, a new line, and a single `<answer>…</answer>`.
    """

    def __init__(self, name: str, env: MathMultiRewardConfig) -> None:
        super().__init__(name, env)
        self.description = "correctness, integer and format of an answer, as components"

    def quick_score(self, sample: Sample) -> Score | None:
        cut_off = super().quick_score(sample)
        return cut_off and Score("SCORED", reward=0.0, components=_NONE, metadata=cut_off.metadata)

    def judge(self, sample: Sample) -> float | Score:
        expected = sample.extra_env_info.get("answer")
        if isinstance(expected, bool) or not isinstance(expected, str | int | float) or not str(expected).strip():
            return Score(
                "INVALID",
                message=f"extra_env_info.answer is {expected!r:.80}; math_multi_reward needs text or a number",
            )
        answer = sample.completion.split("<answer>")[-1].split("</answer>")[0].strip()
        tags = sample.completion.count("<answer>"), sample.completion.count("</answer>")
        components = {
            "correctness": float(answer == str(expected).strip()),
            "format": float(tags == (1, 1) and _FORMAT.search(sample.completion) is not None),
            "integer": float(answer.isdigit()),
        }
        return Score(
            "SCORED",
            reward=sum(components.values()),
            components=components,
            metadata={"answer": shorten_answer(answer)},
        )
