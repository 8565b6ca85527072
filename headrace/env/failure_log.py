"""The log of samples that an environment could not score, and of programs that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.base.printable import printable
from headrace.base.repeats import Repeats, alike
from headrace.env.environment import Environment, Sample, find_place
from headrace.env.episode import Episode
from headrace.records.score import Score

_log = logging.getLogger("headrace.env.environment")
# The most characters of a prompt, a completion or the information about a problem in the log of a failure.
_SHOWN = 600


class FailureLog:
    """Logs each kind of failure once, with its cause, and after that only as a count.

    The shown parts of a sample or episode come from outside, so they are escaped and cut.
    """

    def __init__(self, environment: Environment, repeats: Repeats) -> None:
        self._environment = environment
        self._repeats = repeats

    def record(self, error: BaseException, given: Sequence[Sample | Episode], score: Score) -> None:
        """Log `error`, which was raised during work on `given`; `score` is the result. The kind of failure is the error's type and the
        environment's line where it was raised."""
        kind = f"{type(error).__name__}{find_place(self._environment, error)}"
        self._log(kind, f"raised {kind}", given[0], len(given), score.traceback)

    def note(self, given: Sequence[Sample | Episode], scores: Sequence[Score]) -> None:
        """Log those of `given` whose `scores` are not rewards."""
        for each, score in zip(given, scores, strict=True):
            if score.status not in ("SCORED", "NOT_STARTED"):
                answer = f"{score.status}: {score.message}"
                self._log(alike(answer), f"answered {answer}", each, 1, "")

    def _log(self, kind: str, what: str, given: Sample | Episode, times: int, traceback: str) -> None:
        count = self._repeats.due(kind, times)
        if count is None:
            return
        label = self._environment.label
        if count > times:
            _log.error("%s %s, %d times by now", label, printable(what), count)
            return
        lines = [
            f"{label} {printable(what)}; from now on this is only counted",
            *_about(given),
            *printable(traceback, keep="\n").splitlines(),
        ]
        _log.error("%s", "\n    ".join(lines))


def _about(given: Sample | Episode) -> list[str]:
    prompt = " ".join(f"{message.get('role')}: {message.get('content')}" for message in given.messages)
    if isinstance(given, Episode):
        return [f"prompt: {_shorten(prompt)}", f"public: {_shorten(str(given.public))}"]
    return [
        f"prompt: {_shorten(prompt)}",
        f"completion: {_shorten(given.completion)}",
        f"extra_env_info: {_shorten(str(given.extra_env_info))}",
    ]


def _shorten(text: str) -> str:
    return printable(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")
