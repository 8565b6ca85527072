"""Functions that several estimators share: group baselines, whitening over the batch, sums over a token's future, the KL penalty of
rewards, and metrics.

All numbers are float64. [N] is over the policy tokens of this rank's trajectories. Statistics of the whole batch are computed from
`Batch.of_all_ranks`, so they are bit-equal for any number of ranks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.loss import LossConfig

from ...distributed.ranks import Ranks
from ..batch import Batch, Bool, Float32, Float64

SMALLEST_VARIANCE = 1e-8
# A deviation of this share of the largest value, or less, is rounding: 0.1 + 0.2 is not 0.3, nor are a float32's digits a float64's.
ROUNDING = 1e-6
# NeMo RL's clamps for the penalty in rewards, independent of those in the loss
KL_INPUT_CLAMP, KL_OUTPUT_CLAMP = 20.0, 10.0


def whiten(batch: Batch, tokens: Float64, ranks: Ranks, *, unbiased: bool) -> Float64:
    """A collective. Shift and scale `tokens` [N] to mean 0 and variance 1 over all tokens of the batch, weighted by the multipliers.

    `(A - mean) / sqrt(max(var, 1e-8))` with the biased variance (Reinforce++, raw rewards), or `(A - mean) / sqrt(var + 1e-8)` with the
    unbiased one (generalized advantage estimation). Unchanged if all weights are 0.
    """
    weights = batch.multipliers
    rows = np.stack([weights * batch.lengths, weights * batch.sums(tokens), batch.lengths], axis=1)
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
    """Return the discounted sums `y_t = x_t + f y_{t+1}` of tokens [N], with one factor per trajectory, [B]. 0 follows a trajectory's last
    token.

    It is vectorized over trajectories, from their ends, in as many steps as the longest one has tokens.
    """
    to_go = batch.to_go
    table = np.zeros((int(batch.lengths.max(initial=0)), len(batch)))
    table[to_go, batch.trajectory] = tokens
    for place in range(1, len(table)):
        table[place] += factors * table[place - 1]
    return table[to_go, batch.trajectory]


def kl_penalty(batch: Batch, loss_fn: LossConfig, ranks: Ranks) -> Float64:
    """A collective. Return the KL penalty of each token, [N]: `loss_fn.reference_policy_kl_penalty` times an estimate of
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
    """Return the old log-probabilities [N] before top-k and top-p."""
    found: Float32 | None = batch.old_logprobs_unfiltered
    if found is None:
        found = batch.old_logprobs
    assert found is not None
    return found.astype(np.float64)


def finite(batch: Batch, tokens: Float64, what: str, ranks: Ranks) -> Float64:
    """A collective. Return `tokens` [N] if all are finite. Otherwise raise the same `ServiceError` on every rank, naming the
    trajectories."""
    own = np.flatnonzero(batch.sums(~np.isfinite(tokens)))
    found = ranks.all_gather([(int(batch.places[i]), batch.name(i)) for i in own], list[tuple[int, str]])
    names = [name for _, name in sorted(bad for of_rank in found for bad in of_rank)]
    if names:
        others = f" and {len(names) - 1} more of the {batch.size} trajectories" if len(names) > 1 else ""
        raise ServiceError(
            f"{names[0]}{others}: {what} that are not finite. The weights of a model are broken, or its precision is too low; continue "
            "from an earlier checkpoint with a lower learning rate or in float32"
        )
    return tokens


def token_metrics(batch: Batch, name: str, tokens: Float64, ranks: Ranks) -> dict[str, float]:
    """A collective. Return `<name>/mean`, `/std` (unbiased), `/min` and `/max` over all tokens [N] of the batch; 0 without tokens."""
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
    """Return [P] bool: whether all values of a row of `groups` [P, n] are equal, but for rounding."""
    return mean_and_std(groups)[1] == 0


def group_advantages(rewards: Float64, *, leave_one_out: bool, normalize: bool) -> Float64:
    """Return the advantages [P, n] of rewards [P, n], one row per group.

    They are `A_i = r_i - b_i`, divided by `std_i + 1e-6` with `normalize` and where `std_i > 0`. Baseline and unbiased standard deviation
    are those of the whole group, or with `leave_one_out` of its other trajectories. A single value has no deviation, so with
    `leave_one_out` a group of two keeps `±(r_0 - r_1)`. Without it a group of one has advantage 0.

    Raises `ValueError` for rewards that are not [P, n] or not finite, and for leaving one out of a group of one.
    """
    baseline, std = baselines(rewards, leave_one_out=leave_one_out)
    advantages = rewards - baseline
    if normalize:
        advantages = np.where(std > 0, advantages / (std + 1e-6), advantages)
    return advantages


def baselines(rewards: Float64, *, leave_one_out: bool) -> tuple[Float64, Float64]:
    """Return the mean and the unbiased standard deviation of the rewards that each of `rewards` [P, n] is compared with. They broadcast to
    [P, n]. Raises as `group_advantages` does."""
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards of shape {rewards.shape}; wanted [groups, trajectories]")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward of group {int(np.argwhere(~np.isfinite(rewards))[0, 0])} is not finite")
    n = rewards.shape[1]
    if leave_one_out and n == 1:
        raise ValueError("a group of one has no other trajectories for a baseline")
    # [P, n, k]: the rewards that each trajectory is compared with
    return mean_and_std(rewards[:, _others(n)] if leave_one_out else rewards[:, None, :])


def baseline_metrics(config: Config, rewards: Float64) -> dict[str, float]:
    """Return the percentages of trajectories whose baseline is 0, 1, or anything else, from rewards [P·n]."""
    assert config.grpo is not None
    n = config.grpo.num_generations_per_prompt
    baseline, _ = baselines(rewards.reshape(-1, n), leave_one_out=config.grpo.leaves_one_out and n > 1)
    zero, one = (100.0 * float((np.abs(baseline - value) <= ROUNDING).mean()) for value in (0, 1))
    return {
        "baseline_reward/pct_0": zero,
        "baseline_reward/pct_1": one,
        "baseline_reward/pct_mixed": 100.0 - zero - one,
    }


def _others(n: int) -> npt.NDArray[np.intp]:
    """Return [n, n - 1]: row i lists every index but i."""
    grid = np.broadcast_to(np.arange(n), (n, n))
    return grid[~np.eye(n, dtype=bool)].reshape(n, n - 1)


def mean_and_std(values: Float64) -> tuple[Float64, Float64]:
    """Return the mean and the unbiased standard deviation over the last axis: exactly the value and 0 where all are equal, and 0 where they
    differ by rounding."""
    count = values.shape[-1]
    first = values[..., :1]
    # relative to the first value, the mean of equal values is exact
    mean = first + (values - first).mean(axis=-1, keepdims=True)
    std = np.sqrt(((values - mean) ** 2).sum(axis=-1) / max(count - 1, 1))
    return mean[..., 0], np.where(std > ROUNDING * np.abs(values).max(axis=-1), std, 0.0)
