"""GRPO (arXiv 2402.03300): the advantage is how much better a trajectory did than its group.

    advantage = (r - baseline) / deviation, both of the whole group or of its other trajectories; `r` after scaling and shaping

The formulae are NeMo RL's (`GRPOAdvantageEstimator`), except that the variance is computed in two passes, and that a deviation of rounding
errors is none. In a group of equal rewards `E[x²] - E[x]²` leaves one, and so do rewards that are equal but for rounding (0.1 + 0.2 and
0.3). Dividing by it makes advantages of thousands.
"""

from __future__ import annotations

from headrace.config import Config

from ...distributed.ranks import Ranks
from ..batch import Batch
from .statistics import baseline_metrics, group_advantages


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
