"""The growing pause before another try."""

from __future__ import annotations

# far beyond every last pause; 2.0 ** 1024 would overflow
_MOST_DOUBLINGS = 60


def pause_after(tries: int, first_s: float, last_s: float) -> float:
    """Return the seconds to wait after `tries` failures in a row: `first_s` after one, doubled with each, and at most `last_s`."""
    return min(last_s, first_s * 2.0 ** min(tries - 1, _MOST_DOUBLINGS))
