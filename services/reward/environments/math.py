"""`math`: is the completion's answer mathematically equal to the expected one? Judged by math-verify."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from headrace.config.data import DataSourceConfig
from headrace.config.environments import MathConfig
from headrace.env.environment import Sample
from headrace.records.score import Score

from ..environment_build import read_version
from .base import SandboxedEnvironment, choice, extract_answer, shorten_answer

_EXPECTED = (LatexExtractionConfig(),)
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_ANSWER = (ExprExtractionConfig(), LatexExtractionConfig())


class Math(SandboxedEnvironment[MathConfig]):
    """Compares a number or a formula. `extra_env_info` is `{"answer": …}`, a number or LaTeX.

    The reward is 1 if math-verify finds an equal expression in the completion (a boxed one first, else the last), else 0. With `extract` it
    searches only what that takes from the completion. With `tolerance`, a number near the expected one also earns 1. With `extract: choice`
    the answer is a letter, and the same letter earns 1.

    math-verify's own deadlines are off, because they would turn a hang into "not equal". The hub's deadline ends a hang as TIMED_OUT.
    """

    def __init__(self, name: str, env: MathConfig) -> None:
        super().__init__(name, env, read_version("math-verify"), read_version("sympy"))
        self.description = "mathematical equality with extra_env_info.answer"
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its deadlines are off

    def prepare(self, sources: Sequence[DataSourceConfig]) -> None:
        _equal(_parse("\\boxed{\\frac{1}{2}}", _EXPECTED), _parse("1/2", _ANSWER))  # grammars, and sympy's own modules

    def quick_score(self, sample: Sample) -> Score | None:
        expected, answer = str(sample.extra_env_info.get("answer")), sample.completion
        if (found := super().quick_score(sample)) is not None:
            return found
        plain = self.env.extract == "none" and self.env.tolerance is None
        if plain and _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(answer):
            return Score("SCORED", reward=float(int(answer) == int(expected)), metadata={"answer": answer})
        return None

    def judge(self, sample: Sample) -> float | Score:
        answer = sample.extra_env_info.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            return Score(
                "INVALID", message=f"extra_env_info.answer is {answer!r:.80}; math needs a number or LaTeX text"
            )
        text = str(answer)
        if self.env.extract == "choice":
            return _score_choice(sample.completion, text)
        boxed = text if "\\boxed" in text else f"\\boxed{{{text}}}"
        expected = _parse(boxed, _EXPECTED)
        if not expected:
            return Score(
                "INVALID", message=f"extra_env_info.answer {text!r:.80} is not mathematics that math-verify can read"
            )
        given = sample.completion if self.env.extract == "none" else extract_answer(sample.completion, self.env.extract)
        if given is None:
            return Score("SCORED", reward=0.0, metadata={"rule": f"extract: {self.env.extract} finds no answer"})
        found = _parse(given, _ANSWER)
        equal = _equal(expected, found) or (
            self.env.tolerance is not None and _near(expected, found, self.env.tolerance)
        )
        # `found` ends with the text as it was written, if that is known
        written = next((item for item in reversed(found) if isinstance(item, str)), None)
        return Score(
            "SCORED", reward=float(equal), metadata={} if written is None else {"answer": shorten_answer(written)}
        )


def _score_choice(completion: str, expected: str) -> Score:
    letter = choice(expected)
    if letter is None:
        return Score(
            "INVALID", message=f"extra_env_info.answer is {expected!r:.80}; extract choice needs a capital letter"
        )
    answer = choice(completion)
    return Score("SCORED", reward=float(answer == letter), metadata={"answer": answer})


def _near(expected: Sequence[Any], found: Sequence[Any], tolerance: float) -> bool:
    """Return whether the first expression found is a number that differs from the expected one by at most this share of it."""
    wanted, given = _number(expected), _number(found)
    if wanted is None or given is None:
        return False
    return abs(given - wanted) <= tolerance * (abs(wanted) or 1.0)


def _number(parsed: Sequence[Any]) -> float | None:
    try:
        number = float(parsed[0])
    except (IndexError, TypeError, ValueError, OverflowError):
        # not a number: text, a set, an equation, or it contains a symbol
        return None
    return number if math.isfinite(number) else None


def _parse(text: str, extraction: Sequence[Any]) -> list[Any]:
    """Return what math-verify finds in `text`. Nothing in it is evaluated as Python: LaTeX goes through a grammar (ANTLR), and sympy's
    `parse_expr` gets only digits and operators."""
    return list(parse(text, extraction_config=extraction, parsing_timeout=None))


def _equal(expected: list[Any], found: list[Any]) -> bool:
    try:
        return bool(verify(expected, found, timeout_seconds=None, raise_on_error=True))
    except MemoryError:  # law 7: not "not equal"
        raise
    except Exception:  # noqa: BLE001  # a comparison that fails must not hide another that succeeds
        return bool(verify(expected, found, timeout_seconds=None))
