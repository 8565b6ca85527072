"""Reports repeated events the first time, and after that as a count at intervals."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

# Characters of a message that tell its kind.
_READ = 4000
# More than 40 characters between quotation marks, as of repr(); an apostrophe is none. It may be cut off.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.){41,}(?:'|$)|"(?:[^"\\]|\\.){41,}(?:"|$))""")


class Repeats:
    """Decides for each occurrence whether to report it. Beyond `most` kinds of events, the others count as one kind."""

    def __init__(self, every_s: float = 60.0, most: int = 256, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._most = most
        self._clock = clock
        self._reported: dict[str, tuple[int, float]] = {}  # occurrences so far, and when they were last reported

    def due(self, what: str, times: int = 1) -> int | None:
        """Return how often `what` has happened so far, including these `times`, if that is to be reported: the first time (then it is
        `times`), and again after `every_s`. Else None."""
        if what not in self._reported and len(self._reported) >= self._most:
            what = ""
        now = self._clock()
        before, reported_at = self._reported.get(what, (0, None))
        is_due = reported_at is None or now - reported_at >= self._every_s
        self._reported[what] = (before + times, now if is_due or reported_at is None else reported_at)
        return before + times if is_due else None


def alike(message: str) -> str:
    """Return the same text for messages that differ only in numbers, in white space, or in what they quote at length: attempts, line
    numbers, sizes, what a model answered. A short quotation may be the name of what failed."""
    return re.sub(r"\d+", "#", _QUOTED.sub("'…'", " ".join(message[:_READ].split())))[:300]
