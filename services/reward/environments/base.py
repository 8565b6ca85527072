"""Built-in environments: their base class, and which one a `type` in the configuration names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.config.data import DataSourceConfig, EnvConfig, Extract
from headrace.environment import Environment, Sample
from headrace.trajectory import Score
from headrace_services.reward.build import build_of

# Commas may group digits, as in 1,234,567; a minus directly after a digit or letter is an operator ("5-3" ends in 3).
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\d+(?:\.\d+)?")
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = "\\boxed{"
# A capital after "answer", in a box or in a tag, perhaps in parentheses or bold; or nothing but one.
_CHOICE = re.compile(
    r"(?:\b[Aa]nswer(?:\s+is)?\s*:?|\bANSWER\s*:|\\boxed\{|<answer>)[\s*(]{0,8}(?:\\text\{)?([A-Z])(?![A-Za-z])"
)
_LETTER = re.compile(r"[\s*(]*([A-Z])[\s*).]*")

_PATTERNS = {"last_number": _NUMBER, "answer_tag": _TAG, "answer_line": _LINE}
ANSWER_TAIL = 300  # characters, as in DAPO
_SHOWN = 1000


class BuiltInEnvironment(Environment):
    """Base of built-in environments, configured by `env.<name>`. Subclasses score a complete answer in `judge`, with `software` besides
    what is here."""

    def __init__(self, name: str, env: EnvConfig, *software: str) -> None:
        self.name = name
        self.env = env
        self.build = build_of(name, env, *software)

    def score(self, sample: Sample) -> float | Score:
        found = self.quick_score(sample)
        return self.judge(sample) if found is None else found

    def quick_score(self, sample: Sample) -> Score | None:
        """The score of a sample that takes no more than a comparison, `judge`'s to the letter; None for all others. A worker needs no
        child for it, which would cost a hundred times as much: nothing of the completion is parsed."""
        return cut_off(self.env, sample)

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        """Load what its scores need, in a worker that has scored nothing yet; `sources` are the run's data sets that name it.
        Raises `ConfigError` for one that it can't score."""

    def observe(self, sample: Sample, deadline: float) -> Score | None:
        """Find out, in the worker, what `judge` needs of a sample and its child can't, by `deadline` on the monotonic clock. A score if
        that is the end of it."""
        return None

    def judge(self, sample: Sample) -> float | Score:
        raise NotImplementedError


def cut_off(env: EnvConfig, sample: Sample) -> Score | None:
    """The score of a completion that has no end, where one is required."""
    if env.require_stop and sample.finish_reason == "length":
        return Score("SCORED", reward=0.0, metadata={"rule": "require_stop: the completion was cut off"})
    return None


def extract_answer(completion: str, how: Extract) -> str | None:
    r"""The answer in `completion`, or None if there is none.

    "last_number" is the last number, without the commas that group its digits; "answer_tag" the text in the last
    `<answer>…</answer>`; "answer_line" the rest of the line after the last `Answer:`, in the last 300 characters; "boxed" what is in the
    last `\boxed{…}`; "choice" the capital letter that is said last to be the answer; "none" all of the completion.
    """
    if how == "none":
        return completion.strip()
    if how == "boxed":
        return _boxed(completion)
    if how == "choice":
        return choice(completion)
    where = completion[-ANSWER_TAIL:] if how == "answer_line" else completion
    found = _PATTERNS[how].findall(where)
    if not found:
        return None
    answer: str = found[-1].strip()
    return answer.replace(",", "") if how == "last_number" else answer


def choice(text: str) -> str | None:
    r"""The letter of a multiple choice that `text` gives as its answer: `B`, `(B)`, `Answer: B`, `the answer is B`, `\boxed{B}`."""
    if alone := _LETTER.fullmatch(text[-ANSWER_TAIL:]):
        return alone[1]
    said = _CHOICE.findall(text)
    return said[-1] if said else None


def _boxed(text: str) -> str | None:
    """What the last box that is closed holds."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 0
    for end, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0 and character == "}":
            return text[start + len(_BOXED) : end].strip()
    return None


def shown(answer: str | None) -> str | None:
    """As much of an answer as a score's metadata keeps."""
    return answer and answer[:_SHOWN]
