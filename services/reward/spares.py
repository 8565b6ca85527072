"""What was made for a burst of work, and is kept for the next: it ends after a quiet time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

# Longer than the pauses between two steps of most runs, which need all of it again.
_QUIET_S = 60.0

T = TypeVar("T")


class Spares(Generic[T]):
    """Things that nobody uses now. The one put back last is taken first, so those that are too many stay unused, and `end_unused` ends them
    after a quiet time; one is always kept."""

    def __init__(self, end: Callable[[T], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._end = end
        self._clock = clock
        self._unused: list[tuple[float, T]] = []  # with the time since when; the longest unused comes first

    def take(self) -> T | None:
        """Return a thing to use, or None if there is none."""
        return self._unused.pop()[1] if self._unused else None

    def put(self, thing: T) -> None:
        self._unused.append((self._clock(), thing))

    def end_unused(self) -> float | None:
        """End what was not used for a quiet time. Return the seconds until there may be more to end, or None if there is only one left."""
        while len(self._unused) > 1:
            since, thing = self._unused[0]
            left_s = since + _QUIET_S - self._clock()
            if left_s > 0:
                return left_s
            del self._unused[0]
            self._end(thing)
        return None
