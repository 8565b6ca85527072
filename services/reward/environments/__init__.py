"""Built-in environments: their base class, and which one a `type` in the configuration names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from headrace.config.data import DataSourceConfig, EnvConfig
from headrace.environment import Environment, Sample
from headrace.trajectory import Score

Extract = Literal["none", "last_number", "answer_tag", "answer_line"]

# Commas may group digits, as in 1,234,567; a minus directly after a digit or letter is an operator ("5-3" ends in 3).
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\d+(?:\.\d+)?")
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


_PATTERNS = {"last_number": _NUMBER, "answer_tag": _TAG, "answer_line": _LINE}
ANSWER_TAIL = 300  # characters, as in DAPO
_SHOWN = 1000


class BuiltInEnvironment(Environment):
    """Base of built-in environments, configured by `env.<name>`. Subclasses score a complete answer in `judge`."""

    def __init__(self, name: str, env: EnvConfig) -> None:
        self.name = name
        self.env = env

    def score(self, sample: Sample) -> float | Score:
        found = self.at_sight(sample)
        return self.judge(sample) if found is None else found

    def at_sight(self, sample: Sample) -> Score | None:
        """The score of a sample that takes no more than a comparison, `judge`'s to the letter; None for all others. A worker needs no
        child for it, which would cost a hundred times as much: nothing of the completion is parsed."""
        if self.env.require_stop and sample.finish_reason == "length":
            return Score("SCORED", reward=0.0, metadata={"rule": "require_stop: the completion was cut off"})
        return None

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        """Load what its scores need, in a worker that has scored nothing yet; `sources` are the run's data sets that name it.
        Raises `ConfigError` for one that it can't score."""

    def judge(self, sample: Sample) -> float | Score:
        raise NotImplementedError


def extract_answer(completion: str, how: Extract) -> str | None:
    """The answer in `completion`, or None if there is none.

    "last_number" is the last number, without the commas that group its digits; "answer_tag" the text in the last
    `<answer>…</answer>`; "answer_line" the rest of the line after the last `Answer:`, in the last 300 characters; "none" all of
    the completion.
    """
    if how == "none":
        return completion.strip()
    where = completion[-ANSWER_TAIL:] if how == "answer_line" else completion
    found = _PATTERNS[how].findall(where)
    if not found:
        return None
    answer: str = found[-1].strip()
    return answer.replace(",", "") if how == "last_number" else answer


def shown(answer: str | None) -> str | None:
    """As much of an answer as a score's metadata keeps."""
    return answer and answer[:_SHOWN]


def make(name: str, env: EnvConfig) -> BuiltInEnvironment:
    """Create the built-in environment of `env.<name>`. Raises `ImportError` if its library is not installed."""
    kind = env.type or name
    if kind == "math":
        from headrace_services.reward.environments.math import Math

        return Math(name, env)
    if kind == "math_multi_reward":
        from headrace_services.reward.environments.math_multi_reward import MathMultiReward

        return MathMultiReward(name, env)
    from headrace_services.reward.environments.reasoning_gym import ReasoningGym

    return ReasoningGym(name, env)
