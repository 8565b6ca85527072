"""The mean and the spread of a group's rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(rewards: Sequence[float | None]) -> float | None:
    """Return the mean; None if there are no rewards, or one is missing."""
    known = _known(rewards)
    return math.fsum(known) / len(known) if known else None


def spread(rewards: Sequence[float | None]) -> float | None:
    """Return the standard deviation, like `mean`. It is 0 if all are equal, so that nothing is learnt from them, and only then."""
    known, middle = _known(rewards), mean(rewards)
    if middle is None:
        return None
    if min(known) == max(known):  # the mean of equal numbers may differ from them by rounding
        return 0.0
    return math.sqrt(math.fsum((reward - middle) ** 2 for reward in known) / len(known))


def _known(rewards: Sequence[float | None]) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    return known if len(known) == len(rewards) else []
