"""Advantages brought to mean 0 and variance 1 over the tokens of the whole batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from services.trainer.learning.advantages.share import Share
from services.trainer.learning.tokens import Float64

SMALLEST_VARIANCE = 1e-8


@dataclasses.dataclass(frozen=True)
class Moments:
    """Of the tokens of the batch, each weighed by its episode's multiplier: `mean`, the biased `variance`, and how many tokens weigh
    anything. All 0 where none does."""

    mean: float
    variance: float
    count: float


def moments(share: Share, tokens: Float64) -> Moments:
    """A collective, in two passes: first the mean, then the squares around it."""
    weights = share.multipliers
    counted = np.where(weights > 0, share.lengths, 0)
    rows = np.stack([weights * share.lengths, weights * share.sums(tokens), counted], axis=1)
    weight, total, count = share.whole(np.where(weights[:, None] > 0, rows, 0.0)).sum(axis=0)
    if weight == 0:
        return Moments(0.0, 0.0, 0.0)
    mean = total / weight
    squares = weights * share.sums((tokens - mean) ** 2)
    variance = share.whole(np.where(weights > 0, squares, 0.0)).sum() / weight
    return Moments(float(mean), float(variance), float(count))


def whiten_biased(share: Share, tokens: Float64) -> Float64:
    """A collective. `(A - mean) / sqrt(max(var, 1e-8))`: of Reinforce++ and raw rewards."""
    found = moments(share, tokens)
    if found.count == 0:
        return tokens
    return (tokens - found.mean) / np.sqrt(max(found.variance, SMALLEST_VARIANCE))


def whiten_unbiased(share: Share, tokens: Float64) -> Float64:
    """A collective. `(A - mean) / sqrt(var + 1e-8)` with the unbiased variance: of generalized advantage estimation."""
    found = moments(share, tokens)
    if found.count == 0:
        return tokens
    variance = found.variance * found.count / max(found.count - 1, 1)
    return (tokens - found.mean) / np.sqrt(variance + SMALLEST_VARIANCE)
