"""Functions that several estimators share: whitening over the batch, sums over a token's future, the KL penalty of rewards, metrics.

Everything is float64, [N] over the policy tokens of this rank's trajectories; statistics of the whole batch are computed from
`Batch.of_all_ranks`, so that they are bit-equal for any number of ranks.
"""

from __future__ import annotations

import math

import numpy as np

from headrace.config.loss import LossConfig
from headrace.errors import ServiceError
from headrace_services.trainer.distributed import Ranks
from headrace_services.trainer.learning.batch import Batch, Bool, Float32, Float64

SMALLEST_VARIANCE = 1e-8
# NeMo RL's clamps for the penalty in rewards, independent of those in the loss
KL_INPUT_CLAMP, KL_OUTPUT_CLAMP = 20.0, 10.0


def whiten(batch: Batch, tokens: Float64, ranks: Ranks, *, unbiased: bool) -> Float64:
    """A collective. Shift and scale `tokens` [N] to mean 0 and variance 1 over all tokens of the batch, weighted by the multipliers.

    `(A - mean) / sqrt(max(var, 1e-8))` with the biased variance (Reinforce++, raw rewards), or `(A - mean) / sqrt(var + 1e-8)` with the
    unbiased one (generalized advantage estimation). Unchanged if all weights are 0.
    """
    weights = batch.multipliers
    counted = np.where(weights > 0, batch.lengths, 0)
    rows = np.stack([weights * batch.lengths, weights * batch.sums(tokens), counted], axis=1)
    rows = np.where(weights[:, None] > 0, rows, 0.0)
    weight, total, count = batch.of_all_ranks(rows, ranks).sum(axis=0)
    if weight == 0:
        return tokens
    mean = float(total / weight)
    squares = np.where(weights > 0, weights * batch.sums((tokens - mean) ** 2), 0.0)
    variance = float(batch.of_all_ranks(squares, ranks).sum() / weight)
    if unbiased:
        return (tokens - mean) / np.sqrt(variance * count / max(count - 1, 1) + SMALLEST_VARIANCE)
    return (tokens - mean) / np.sqrt(max(variance, SMALLEST_VARIANCE))


def sums_to_go(batch: Batch, tokens: Float64, factors: Float64) -> Float64:
    """Discounted sums `y_t = x_t + f y_{t+1}` of tokens [N], with one factor per trajectory, [B]; 0 follows a trajectory's last token.

    Vectorized over trajectories, from their ends: as many steps as the longest has tokens.
    """
    to_go = batch.to_go
    table = np.zeros((int(batch.lengths.max(initial=0)), len(batch)))
    table[to_go, batch.trajectory] = tokens
    for place in range(1, len(table)):
        table[place] += factors * table[place - 1]
    return table[to_go, batch.trajectory]


def kl_penalty(batch: Batch, loss_fn: LossConfig, ranks: Ranks) -> Float64:
    """A collective. The KL penalty of each token, [N]: `loss_fn.reference_policy_kl_penalty` times an estimate of
    KL(policy || reference) (Schulman, "Approximating KL Divergence").

    With `d = clamp(ref - old, ±20)`, before top-k and top-p: k1 `-d`, k2 `d²/2`, k3 `exp(d) - 1 - d`; then clamped to ±10.
    """
    assert batch.ref_logprobs is not None
    d = np.clip(batch.ref_logprobs.astype(np.float64) - unfiltered_logprobs(batch), -KL_INPUT_CLAMP, KL_INPUT_CLAMP)
    match loss_fn.reference_policy_kl_type:
        case "k1":
            kl = -d
        case "k2":
            kl = d**2 / 2
        case "k3":
            kl = np.expm1(d) - d
    kl = np.clip(kl, -KL_OUTPUT_CLAMP, KL_OUTPUT_CLAMP)
    return loss_fn.reference_policy_kl_penalty * finite(batch, kl, "log-probabilities", ranks)


def unfiltered_logprobs(batch: Batch) -> Float64:
    """The old log-probabilities [N] before top-k and top-p."""
    found: Float32 | None = batch.old_logprobs_unfiltered
    if found is None:
        found = batch.old_logprobs
    assert found is not None
    return found.astype(np.float64)


def finite(batch: Batch, tokens: Float64, what: str, ranks: Ranks) -> Float64:
    """A collective: return `tokens` [N], or raise the same `ServiceError` on every rank, naming the trajectories with one that is not
    finite."""
    own = np.flatnonzero(batch.sums(~np.isfinite(tokens)))
    found = ranks.all_gather([(int(batch.places[i]), batch.name(i)) for i in own], list[tuple[int, str]])
    names = [name for _, name in sorted(bad for of_rank in found for bad in of_rank)]
    if names:
        others = f" and {len(names) - 1} more of the {batch.size} trajectories" if len(names) > 1 else ""
        raise ServiceError(
            f"{names[0]}{others}: {what} that are not finite; the weights of a model are broken, or its precision is too low: go on "
            "from an earlier checkpoint with a lower learning rate or in float32"
        )
    return tokens


def token_metrics(batch: Batch, name: str, tokens: Float64, ranks: Ranks) -> dict[str, float]:
    """A collective. `<name>/mean`, `/std` (unbiased), `/min` and `/max` over all tokens [N] of the batch; 0 without any."""
    rows = [(own.size, own.sum(), own.min(initial=math.inf), own.max(initial=-math.inf)) for own in batch.split(tokens)]
    table = batch.of_all_ranks(np.array(rows).reshape(-1, 4), ranks)
    count, total = table[:, 0].sum(), table[:, 1].sum()
    mean = total / count if count else 0.0
    squares = batch.of_all_ranks(batch.sums((tokens - mean) ** 2), ranks).sum()
    found = {
        "mean": mean,
        "std": math.sqrt(squares / (count - 1)) if count > 1 else 0.0,
        "min": table[:, 2].min() if count else 0.0,
        "max": table[:, 3].max() if count else 0.0,
    }
    return {f"{name}/{key}": float(value) for key, value in found.items()}


def all_equal(groups: Float64) -> Bool:
    """[P]: of which rows of `groups` [P, n] all values are equal."""
    return (groups == groups[:, :1]).all(axis=1)
