"""How far the work of a trainer's rank has come, for threads that watch it: the health page, and the watch over other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence


class Progress:
    """The time of the last sign of life of the thread that works with torch. It needs none while it has nothing to do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.marks = 0
        self._clock = clock
        self._last: float | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The thread works while the context is open, and must call `mark`."""
        self._last = self._clock()
        try:
            yield
        finally:
            self._last = None

    def mark(self) -> None:
        """The work goes on: called before each collective, and for each micro-batch and weight, at the same points by all ranks."""
        self.marks += 1
        if self._last is not None:
            self._last = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 without work."""
        last = self._last
        return 0.0 if last is None else self._clock() - last


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What a rank publishes of itself: how often it has done so, and the marks of its `Progress`."""

    count: int
    marks: int


def silent_ranks(before: Sequence[Heartbeat], after: Sequence[Heartbeat]) -> list[int]:
    """The ranks that the others wait for, by what all of them published at two times: those whose process stands still, else those
    whose work has come less far than the others'."""
    stopped = [rank for rank, (one, other) in enumerate(zip(before, after, strict=True)) if one.count == other.count]
    foremost = max(beat.marks for beat in after)
    return stopped or [rank for rank, beat in enumerate(after) if beat.marks < foremost]
