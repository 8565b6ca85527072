"""The base class of the built-in environments that score in a sandboxed worker, and the extraction of answers."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

from headrace.config.data import DataSourceConfig
from headrace.config.environments import Extract, SandboxedConfig, ScoringConfig
from headrace.env.environment import Environment, Sample
from headrace.records.score import Score

from ..environment_build import compute_build

# Commas may group digits, as in 1,234,567. A minus directly after a digit or letter is an operator ("5-3" ends in 3).
_NUMBER = re.compile(r"(?<![\w.])-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)|\d+(?:\.\d+)?")
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = "\\boxed{"
# A capital letter after "answer", in a box or in a tag, perhaps in parentheses or bold; `_LETTER` is a text with only that letter.
_CHOICE = re.compile(
    r"(?:\b[Aa]nswer(?:\s+is)?\s*:?|\bANSWER\s*:|\\boxed\{|<answer>)[\s*(]{0,8}(?:\\text\{)?([A-Z])(?![A-Za-z])"
)
_LETTER = re.compile(r"[\s*(]*([A-Z])[\s*).]*")

_PATTERNS = {"last_number": _NUMBER, "answer_tag": _TAG, "answer_line": _LINE}
ANSWER_TAIL = 300  # characters, as in DAPO
_SHOWN = 1000


class Wait(NamedTuple):
    """What an observation waits for: `end`, a file descriptor that becomes readable. `asleep`: no core is used for it meanwhile."""

    end: int
    asleep: bool = False


ConfigT = TypeVar("ConfigT", bound=SandboxedConfig)
Observation = Generator[Wait, None, Score | None]


class SandboxedEnvironment(Environment, Generic[ConfigT]):
    """The base of these environments, configured by `env.<name>`. Subclasses score a complete answer in `judge`. `software` names the
    libraries that they judge with."""

    def __init__(self, name: str, env: ConfigT, *software: str) -> None:
        self.name = name
        self.env = env
        self.build = compute_build(env, *software)

    def score(self, sample: Sample) -> float | Score:
        found = self.quick_score(sample)
        return self.judge(sample) if found is None else found

    def quick_score(self, sample: Sample) -> Score | None:
        """Return the score of a sample if it takes no more than a comparison, else None. It is exactly the score of `judge`.

        It must not parse the completion. So a worker needs no child for it, which would cost a hundred times as much.
        """
        return score_truncated(self.env, sample)

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        """Load what the scores need, in a worker that has scored nothing yet. `sources` are the run's data sets that name this environment.
        Raises `ConfigError` for a data set that it can't score."""

    def observe(self, sample: Sample, deadline: float) -> Observation:
        """Do the part of scoring that must happen in the worker, because the child that runs `judge` can't do it, by `deadline` on the
        monotonic clock. Return a score if that decides it. `judge` follows at once, before anything else of this environment."""
        yield from ()
        return None

    def end_unused(self) -> float | None:
        """End what was kept for `observe` and is not used any more. Return the seconds until there may be more to end, None if there is
        nothing."""
        return None

    def judge(self, sample: Sample) -> float | Score:
        raise NotImplementedError


def score_truncated(env: ScoringConfig, sample: Sample) -> Score | None:
    """Return the score of a truncated completion if `require_stop` is set, else None."""
    if env.require_stop and sample.finish_reason == "length":
        return Score("SCORED", reward=0.0, metadata={"rule": "require_stop: the completion was cut off"})
    return None


def extract_answer(completion: str, how: Extract) -> str | None:
    r"""Return the answer in `completion`, or None if there is none.

    - "last_number": the last number, without the commas that group its digits, and with a zero before its point (".5" is "0.5").
    - "answer_tag": the text in the last `<answer>…</answer>`.
    - "answer_line": the rest of the line after the last `Answer:`, in the last 300 characters.
    - "boxed": the content of the last `\boxed{…}`.
    - "choice": the last capital letter that is given as the answer.
    - "none": the whole completion.
    """
    if how == "none":
        return completion.strip()
    if how == "boxed":
        return _unbox(completion)
    if how == "choice":
        return choice(completion)
    where = completion[-ANSWER_TAIL:] if how == "answer_line" else completion
    found = _PATTERNS[how].findall(where)
    if not found:
        return None
    answer: str = found[-1].strip()
    if how == "last_number":
        answer = re.sub(r"^(-?)\.", r"\g<1>0.", answer.replace(",", ""))
    return answer


def choice(text: str) -> str | None:
    r"""Return the letter that `text` gives as its answer to a multiple choice: `B`, `(B)`, `Answer: B`, `the answer is B`, `\boxed{B}`."""
    if alone := _LETTER.fullmatch(text[-ANSWER_TAIL:]):
        return alone[1]
    letters = _CHOICE.findall(text)
    return letters[-1] if letters else None


def _unbox(text: str) -> str | None:
    """Return the content of the last box, or None if it is not closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 0
    for end, character in enumerate(text[start:], start):
        depth += (character == "{") - (character == "}")
        if depth == 0 and character == "}":
            return text[start + len(_BOXED) : end].strip()
    return None


def shorten_answer(answer: str | None) -> str | None:
    """Return as much of an answer as a score's metadata keeps."""
    return answer and answer[:_SHOWN]
