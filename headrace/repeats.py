"""What happens again and again is told the first time, and then as a count every so often."""

from __future__ import annotations

import re
import time
from collections.abc import Callable


class Repeats:
    """Decides of each occurrence whether to tell of it. Of more than `most` kinds of things the others count as one kind."""

    def __init__(self, every_s: float = 60.0, most: int = 256, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._most = most
        self._clock = clock
        self._told: dict[str, tuple[int, float]] = {}  # occurrences so far, and when they were told of last

    def due(self, what: str, times: int = 1) -> int | None:
        """How often `what` has happened by now, these `times` included, if that is to be told: the first time (then it is `times`), and
        again when `every_s` have passed. Else None."""
        if what not in self._told and len(self._told) >= self._most:
            what = ""
        now = self._clock()
        before, told_at = self._told.get(what, (0, None))
        is_due = told_at is None or now - told_at >= self._every_s
        self._told[what] = (before + times, now if is_due or told_at is None else told_at)
        return before + times if is_due else None


def alike(message: str) -> str:
    """The same for messages that differ in their numbers or white space alone: attempts, line numbers, sizes."""
    return re.sub(r"\d+", "#", " ".join(message.split()))[:300]
