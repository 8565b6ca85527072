"""What a judge's answer means, and the reward of several. No I/O."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from headrace.config.environments import LLMJudgeConfig

SAID = 300  # characters of a judge's answer that a message shows


# What a judge is asked: to score one completion, to score all of a group, or which of two is better.
Kind = Literal["one", "group", "pair"]


class NoVerdict(Exception):
    """Raised when the judge's answer is not a verdict."""


class Verdict(msgspec.Struct, frozen=True):
    """A judge's answer: its reason, and the score of each thing that it was asked about, in order."""

    reason: str
    scores: tuple[int | float, ...]


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    score: int | float


class _GroupAnswer(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    scores: dict[str, int | float]


class _PairAnswer(msgspec.Struct, forbid_unknown_fields=True):
    reason: str
    better: Literal["1", "2", "tie"]


_ANSWERS: dict[Kind, type[_Answer | _GroupAnswer | _PairAnswer]] = {
    "one": _Answer,
    "group": _GroupAnswer,
    "pair": _PairAnswer,
}
# What a pair's first completion gets.
_WINS = {"1": 1.0, "tie": 0.5, "2": 0.0}


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class Usage(msgspec.Struct):
    """The tokens of a request, by the endpoint's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatCompletion(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


@dataclasses.dataclass(frozen=True)
class Scale:
    """The scores that a judge may give. Between two whole numbers they are whole numbers."""

    lowest: int | float
    highest: int | float

    @property
    def is_whole(self) -> bool:
        return isinstance(self.lowest, int) and isinstance(self.highest, int)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a score."""
        kind = "integer" if self.is_whole else "number"
        return {"type": kind, "minimum": self.lowest, "maximum": self.highest}

    def check(self, score: int | float) -> int | float:
        """Return the score. Raises `NoVerdict` if it is not on the scale."""
        if self.is_whole and not isinstance(score, int):
            raise NoVerdict(f"gave an invalid verdict (score {score} is not a whole number)")
        if not self.lowest <= score <= self.highest:  # NaN is not on any
            raise NoVerdict(
                f"gave the score {score!r:.40}, which is not on the scale from {self.lowest} to {self.highest}"
            )
        return score

    def worth(self, score: int | float) -> float:
        """Return the score as a number from 0 to 1."""
        return (score - self.lowest) / (self.highest - self.lowest)


def read_completion(body: bytes) -> ChatCompletion:
    """Return the body of a response. Raises `NoVerdict`."""
    try:
        return msgspec.json.decode(body, type=ChatCompletion)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NoVerdict(f"gave an invalid verdict ({error}): {excerpt(body)}") from error


def verdict_in(completion: ChatCompletion, scale: Scale, kind: Kind = "one", count: int = 1) -> Verdict:
    """Return the verdict in a judge's answer about `count` completions. Raises `NoVerdict`."""
    content = completion.choices[0].message.content if completion.choices else None
    if content is None:
        raise NoVerdict("answered without text; it may have refused")
    try:
        answer = msgspec.json.decode(content, type=_ANSWERS[kind])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise NoVerdict(f"gave an invalid verdict ({error}): {excerpt(content.encode(errors='replace'))}") from error
    if isinstance(answer, _PairAnswer):
        return Verdict(answer.reason, (_WINS[answer.better],))
    if isinstance(answer, _Answer):
        return Verdict(answer.reason, (scale.check(answer.score),))
    numbers = [str(number) for number in range(1, count + 1)]
    if sorted(answer.scores) != sorted(numbers):
        scored = excerpt(", ".join(answer.scores).encode(errors="replace")) if answer.scores else "nothing"
        raise NoVerdict(f"scored {scored} of the completions 1 to {count}")
    return Verdict(answer.reason, tuple(scale.check(answer.scores[number]) for number in numbers))


def excerpt(body: bytes) -> str:
    return repr(body[:SAID].decode(errors="replace"))


def compute_reward(worth: Sequence[float], env: LLMJudgeConfig) -> float:
    """Return the reward of all verdicts on a completion, each 0 to 1."""
    votes = worth if env.threshold is None else [float(value >= env.threshold) for value in worth]
    if env.vote == "majority":
        return float(sum(votes) * 2 > len(votes))
    return statistics.median(votes) if env.vote == "median" else statistics.fmean(votes)


def compute_agreement(worth: Sequence[float], env: LLMJudgeConfig) -> dict[str, float]:
    """Return how far several verdicts agree: their standard deviation, and the share that gave the most frequent one. {} for a single
    verdict."""
    if len(worth) < 2:
        return {}
    votes = worth if env.threshold is None else [float(value >= env.threshold) for value in worth]
    most = collections.Counter(votes).most_common(1)[0][1]
    return {"spread": statistics.pstdev(worth), "agreement": most / len(votes)}
