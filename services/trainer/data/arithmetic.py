"""Addition of two numbers of at most `digits` digits, and the split of its problems into training and validation.

The held-out unordered pairs are a function of `digits` alone. The warm-up of the tiny model, training and validation all use this module,
so none of them ever trains on a validation problem, in either order of its numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

HELD_OUT = 400
_SPLIT_SEED = 2025

Pair = tuple[int, int]


def select_held_out(digits: int) -> list[Pair]:
    """Return the held-out pairs `(a, b)`, a <= b, in a fixed shuffled order: 400, or a tenth of all pairs if that is less."""
    count = 10**digits
    pairs = count * (count + 1) // 2
    chosen = random.Random(_SPLIT_SEED).sample(range(pairs), min(HELD_OUT, pairs // 10))
    return [_unrank(k) for k in chosen]


def training_pairs(digits: int, rng: random.Random) -> Iterator[Pair]:
    """Yield ordered pairs without end, uniform over those that are not held out in either order."""
    forbidden = set(select_held_out(digits))
    while True:
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        if (min(a, b), max(a, b)) not in forbidden:
            yield a, b


def validation_pairs(digits: int, rng: random.Random) -> Iterator[Pair]:
    """Yield every held-out pair once, with its two numbers in an order drawn from `rng`."""
    for a, b in select_held_out(digits):
        yield (a, b) if rng.random() < 0.5 else (b, a)


def text(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}"


def answer(pair: Pair) -> str:
    return str(sum(pair))


def _unrank(k: int) -> Pair:
    """Return the k-th pair a <= b in the order (0,0), (0,1), (1,1), (0,2), …; exact for any size."""
    b = (math.isqrt(8 * k + 1) - 1) // 2
    return k - b * (b + 1) // 2, b
