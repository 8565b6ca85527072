"""Counts an environment's results of the last minute. No I/O."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from headrace.v1 import reward_pb2 as pb
from headrace.v1 import trajectory_pb2

_WINDOW_S = 60.0


class RecentResults:
    """The counts of one environment's results, and how long those with a reward took."""

    def __init__(self, now: float) -> None:
        self._since = now
        # (time, duration); the duration of a failure is nan
        self._results: collections.deque[tuple[float, float]] = collections.deque()

    def note(self, results: Sequence[trajectory_pb2.Result], call_s: float, now: float) -> None:
        """Add the results of a call that took `call_s`. That is the duration of results that don't state their own. Those that were not
        begun don't count."""
        for result in results:
            if result.status == trajectory_pb2.STATUS_SCORED:
                self._results.append((now, result.took_ms / 1000 if result.HasField("took_ms") else call_s))
            elif result.status != trajectory_pb2.STATUS_NOT_STARTED:
                self._results.append((now, math.nan))
        self._forget(now)

    def summary(self, now: float) -> pb.Recent:
        self._forget(now)
        took = sorted(seconds for _, seconds in self._results if not math.isnan(seconds))
        return pb.Recent(
            window_ms=round(1000 * min(_WINDOW_S, now - self._since)),
            scored=len(took),
            failed=len(self._results) - len(took),
            p50_ms=1000 * _quantile(took, 0.5),
            p99_ms=1000 * _quantile(took, 0.99),
        )

    def _forget(self, now: float) -> None:
        while self._results and self._results[0][0] < now - _WINDOW_S:
            self._results.popleft()


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values don't exceed, or 0 if there are none."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
