"""Group-relative advantages: how much better each trajectory did than its group, on its rewards as scaled.

The formulae are NeMo RL's (`GRPOAdvantageEstimator`), with the variance taken in two passes: `E[x²] - E[x]²` leaves a
deviation of rounding errors in a group of equal rewards, and dividing by it turns them into advantages of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.config.algorithm import GRPO, RewardScaling

Float64 = npt.NDArray[np.float64]


def scale_rewards(rewards: Float64, scaling: RewardScaling) -> Float64:
    """Rewards of any shape, clamped to the source range and mapped to the target range; as they are where that is turned off."""
    if not scaling.enabled:
        return rewards
    share = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
        scaling.source_max - scaling.source_min
    )
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def batch_advantages(rewards: Sequence[float], groups: int, grpo: GRPO) -> list[float]:
    """Of a batch of `groups` groups of equal size, one after the other, as the configuration says."""
    scaled = scale_rewards(np.array(rewards, dtype=np.float64), grpo.reward_scaling)
    advantages = group_advantages(
        scaled.reshape(groups, -1), leave_one_out=grpo.use_leave_one_out_baseline, normalize=grpo.normalize_rewards
    )
    return [float(a) for a in advantages.ravel()]


def group_advantages(rewards: Float64, *, leave_one_out: bool, normalize: bool) -> Float64:
    """Advantages [P, n] of rewards [P, n], one row a group.

    `A_i = r_i - b_i`, divided by `std_i + 1e-6` where `normalize` and `std_i > 0`. Baseline and unbiased standard deviation
    are those of the whole group, or of its other trajectories under `leave_one_out`. A single value has no deviation: under
    `leave_one_out` a group of two keeps `±(r_0 - r_1)`. Without it a group of one has advantage 0.

    Raises `ValueError` for rewards that are not [P, n] or not finite, and for leaving one out of a group of one.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards of shape {rewards.shape}; wanted [groups, trajectories]")
    if not np.isfinite(rewards).all():
        raise ValueError(f"a reward of group {int(np.argwhere(~np.isfinite(rewards))[0, 0])} is not finite")
    n = rewards.shape[1]
    if leave_one_out and n == 1:
        raise ValueError("a group of one has no others to take a baseline from")
    # [P, n, k]: the rewards that each trajectory is compared with
    peers = rewards[:, _others(n)] if leave_one_out else rewards[:, None, :]
    baseline, std = _mean_and_std(peers)
    advantages = rewards - baseline
    if normalize:
        advantages = np.where(std > 0, advantages / (std + 1e-6), advantages)
    return advantages


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
