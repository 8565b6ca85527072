"""Which completions of a group are shown to a judge together, in which order, and what a completion's wins are worth. No I/O.

Equal completions are shown once. Orders are drawn from the group and the number of the judge's sample, so that a repetition asks the same,
and no place is any completion's over many groups.
"""

from __future__ import annotations

import random
from collections.abc import Iterable


def in_order(group_id: str, number: int, completions: Iterable[str]) -> list[str]:
    """Return the distinct completions in the order in which they are shown."""
    order = sorted(set(completions))
    random.Random(f"{group_id}/{number}").shuffle(order)
    return order


def pairs_with(order: list[str], own: str, opponents: int) -> list[tuple[str, str]]:
    """Return the pairs in which `own` is compared with at most about `opponents` others, each pair in the order in which it is shown.

    The completions stand in a circle, in `order`, and each meets those nearest to it on both sides. So all meet equally many, and a pair is
    the same for both of its members.
    """
    count = len(order)
    reach = min(count // 2, (opponents + 1) // 2)
    place = order.index(own)
    near = dict.fromkeys(
        other for distance in range(1, reach + 1) for other in ((place + distance) % count, (place - distance) % count)
    )
    return [_turned(order, *sorted((place, other))) for other in near]


def _turned(order: list[str], low: int, high: int) -> tuple[str, str]:
    """Return the pair, with the first of it first as often as not."""
    first, second = (low, high) if (low + high) % 2 else (high, low)
    return order[first], order[second]
