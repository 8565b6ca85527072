"""Reinforce++ (arXiv 2501.03262): rewards minus a KL penalty, whitened over all tokens of the batch.

    advantage = whiten(r - mean of the group - β KL_t), or - β Σ_{i≥t} KL_i under `kl_to_go`

where `KL_t` is a token's divergence from the reference policy, and β the KL penalty if it is subtracted from rewards
(`loss_fn.use_kl_in_reward`), else 0. Whitening includes tokens over age.
"""

from __future__ import annotations

import numpy as np

from headrace.config import Config

from ...distributed.ranks import Ranks
from ..batch import Batch
from .statistics import (
    baseline_metrics,
    group_advantages,
    kl_penalty,
    sums_to_go,
    whiten,
)


def required_passes(config: Config) -> set[str]:
    return {"old", "ref"} if config.loss_fn.kl_in_reward else set()


def advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective."""
    assert config.grpo is not None
    estimator, n = config.grpo.adv_estimator, config.grpo.num_generations_per_prompt
    rewards = of_batch = batch.of_all_ranks(batch.rewards, ranks)
    if estimator.minus_baseline:
        of_batch = group_advantages(rewards.reshape(-1, n), leave_one_out=False, normalize=False).ravel()
    tokens = batch.per_token(of_batch)
    if config.loss_fn.kl_in_reward:
        penalty = kl_penalty(batch, config.loss_fn, ranks)
        if estimator.kl_to_go:
            penalty = sums_to_go(batch, penalty, np.ones(len(batch)))
        tokens = tokens - penalty
    batch.advantages = whiten(batch, tokens, ranks, unbiased=False)
    return baseline_metrics(config, rewards)
