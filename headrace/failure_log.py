"""The log of what an environment could not score, and of programs that failed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.environment import Environment, Sample, place_of
from headrace.episode import Episode
from headrace.printable import printable
from headrace.repeats import Repeats, alike
from headrace.trajectory import Score

_log = logging.getLogger("headrace.environment")
# Characters of a prompt, a completion and the information about a problem that the log of a failure shows.
_SHOWN = 600


class FailureLog:
    """Logs each kind of failure once, with what caused it, and from then on as a count.

    What is shown of the sample or episode is data that others wrote: it is escaped and cut.
    """

    def __init__(self, environment: Environment, repeats: Repeats) -> None:
        self._environment = environment
        self._repeats = repeats

    def raised(self, error: Exception, given: Sequence[Sample | Episode], score: Score) -> None:
        """`error` came out of work on `given`, which got `score` for it. Its kind is its type and the environment's line that it came
        through."""
        kind = f"{type(error).__name__}{place_of(self._environment, error)}"
        self._log(kind, f"raised {kind}", given[0], len(given), str(score.metadata["traceback"]))

    def note(self, given: Sequence[Sample | Episode], scores: Sequence[Score]) -> None:
        """`given` got `scores`; of these, log what is no reward."""
        for each, score in zip(given, scores, strict=True):
            if score.status not in ("SCORED", "NOT_STARTED"):
                said = f"{score.status}: {score.message}"
                self._log(alike(said), f"answered {said}", each, 1, "")

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
        return [f"prompt: {_shown(prompt)}", f"public: {_shown(str(given.public))}"]
    return [
        f"prompt: {_shown(prompt)}",
        f"completion: {_shown(given.completion)}",
        f"extra_env_info: {_shown(str(given.extra_env_info))}",
    ]


def _shown(text: str) -> str:
    return printable(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")
