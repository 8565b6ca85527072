"""Group-relative advantages: how much better each trajectory did than its group.

The formulae are NeMo RL's (`GRPOAdvantageEstimator`, `GDPOAdvantageEstimator`), with the variance taken in two passes: `E[x²] - E[x]²`
leaves a deviation of rounding errors in a group of equal rewards, and dividing by it turns them into advantages of thousands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from services.trainer.learning.tokens import Float64


def group_advantages(rewards: Float64, *, leave_one_out: bool, normalize: bool) -> Float64:
    """Advantages [P, n] of rewards [P, n], one row a group.

    `A_i = r_i - b_i`, divided by `std_i + 1e-6` where `normalize` and `std_i > 0`. Baseline and unbiased standard deviation
    are those of the whole group, or of its other trajectories under `leave_one_out`. A single value has no deviation: under
    `leave_one_out` a group of two keeps `±(r_0 - r_1)`. Without it a group of one has advantage 0.

    Raises `ValueError` for rewards that are not [P, n] or not finite, and for leaving one out of a group of one.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    baseline, std = baselines(rewards, leave_one_out=leave_one_out)
    advantages = rewards - baseline
    if normalize:
        advantages = np.where(std > 0, advantages / (std + 1e-6), advantages)
    return advantages


def baselines(rewards: Float64, *, leave_one_out: bool) -> tuple[Float64, Float64]:
    """Mean and unbiased standard deviation of what each of rewards [P, n] is compared with, as arrays that broadcast to [P, n].

    Raises as `group_advantages` does.
    """
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards of shape {rewards.shape}; wanted [groups, trajectories]")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward of group {int(np.argwhere(~np.isfinite(rewards))[0, 0])} is not finite")
    n = rewards.shape[1]
    if leave_one_out and n == 1:
        raise ValueError("a group of one has no others to take a baseline from")
    # [P, n, k]: the rewards that each trajectory is compared with
    return _mean_and_std(rewards[:, _others(n)] if leave_one_out else rewards[:, None, :])


def weighed_components(
    components: Mapping[str, Float64],
    weights: Sequence[float] | None,
    generations: int,
    *,
    leave_one_out: bool,
    normalize: bool,
) -> Float64:
    """Advantages [P·n] from reward components [P·n] by name (GDPO, arXiv 2601.05242).

    Each component's group advantages, times its weight (in alphabetical order of names; None: all 1), are summed, and the sum
    is brought to mean 0 and, unless it is the same for all, to unbiased standard deviation 1 over the batch.
    """
    names = sorted(components)
    factors = [1.0] * len(names) if weights is None else weights
    total = np.zeros(1)
    for name, weight in zip(names, factors, strict=True):
        groups = components[name].reshape(-1, generations)
        total = total + weight * group_advantages(groups, leave_one_out=leave_one_out, normalize=normalize).ravel()
    mean, std = _mean_and_std(total)
    return (total - mean) / (std if std > 0 else 1.0)


def _others(n: int) -> npt.NDArray[np.intp]:
    """[n, n - 1]: row i lists every index but i."""
    grid = np.broadcast_to(np.arange(n), (n, n))
    return grid[~np.eye(n, dtype=bool)].reshape(n, n - 1)


def _mean_and_std(values: Float64) -> tuple[Float64, Float64]:
    """Mean and unbiased standard deviation over the last axis; exactly the value and 0 where all are equal."""
    count = values.shape[-1]
    first = values[..., :1]
    # counted from the first value, the mean of equal values is that value to the last bit
    mean = first + (values - first).mean(axis=-1, keepdims=True)
    squares = ((values - mean) ** 2).sum(axis=-1)
    return mean[..., 0], np.sqrt(squares / max(count - 1, 1))
