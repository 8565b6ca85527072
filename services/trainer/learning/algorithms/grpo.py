"""GRPO (arXiv 2402.03300): the advantage is how much better a trajectory did than its group.

    advantage = (r - baseline) / deviation, both of the whole group or of its other trajectories; `r` after scaling and shaping

The formulae are NeMo RL's (`GRPOAdvantageEstimator`), with the variance taken in two passes: `E[x²] - E[x]²` leaves a deviation of rounding
errors in a group of equal rewards, and dividing by it turns them into advantages of thousands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.config import Config
from headrace_services.trainer.distributed import Ranks
from headrace_services.trainer.learning.batch import Batch, Float64


def required_passes(config: Config) -> set[str]:
    return set()


def advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. Every token gets its trajectory's advantage."""
    assert config.grpo is not None
    rewards = batch.of_all_ranks(batch.rewards, ranks)
    of_batch = group_advantages(
        rewards.reshape(-1, config.grpo.num_generations_per_prompt),
        leave_one_out=config.grpo.leaves_one_out,
        normalize=config.grpo.normalizes,
    )
    batch.advantages = batch.per_token(of_batch.ravel())
    return baseline_metrics(config, rewards)


def group_advantages(rewards: Float64, *, leave_one_out: bool, normalize: bool) -> Float64:
    """Advantages [P, n] of rewards [P, n], one row per group.

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
    """Mean and unbiased standard deviation of the rewards that each of `rewards` [P, n] is compared with; they broadcast to [P, n].

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
    return mean_and_std(rewards[:, _others(n)] if leave_one_out else rewards[:, None, :])


def baseline_metrics(config: Config, rewards: Float64) -> dict[str, float]:
    """The percentages of trajectories, rewards [P·n], whose baseline is 0, 1, or anything else."""
    assert config.grpo is not None
    n = config.grpo.num_generations_per_prompt
    baseline, _ = baselines(rewards.reshape(-1, n), leave_one_out=config.grpo.leaves_one_out and n > 1)
    zero, one = (100.0 * float((baseline == value).mean()) for value in (0, 1))
    return {
        "baseline_reward/pct_0": zero,
        "baseline_reward/pct_1": one,
        "baseline_reward/pct_mixed": 100.0 - zero - one,
    }


def _others(n: int) -> npt.NDArray[np.intp]:
    """[n, n - 1]: row i lists every index but i."""
    grid = np.broadcast_to(np.arange(n), (n, n))
    return grid[~np.eye(n, dtype=bool)].reshape(n, n - 1)


def mean_and_std(values: Float64) -> tuple[Float64, Float64]:
    """Mean and unbiased standard deviation over the last axis; exactly the value and 0 where all are equal."""
    count = values.shape[-1]
    first = values[..., :1]
    # relative to the first value, the mean of equal values is exact
    mean = first + (values - first).mean(axis=-1, keepdims=True)
    squares = ((values - mean) ** 2).sum(axis=-1)
    return mean[..., 0], np.sqrt(squares / max(count - 1, 1))
