"""PPO with a value model (arXiv 1707.06347): generalized advantage estimation, or the reward itself.

    gae           whiten(Σ_{i≥t} (γλ)^{i-t} δ_i)   (GAE, arXiv 1506.02438)
    raw_reward    whiten(r), and no value model

with `δ_t = r_t + gamma V_{t+1} - V_t`. The token rewards `r_t` are -β KL_t (0 without `loss_fn.use_kl_in_reward`), plus the trajectory's
reward `r` at its last token. The value model's returns and the policy's advantages may have different λs. The policy's λ may depend on the
length (VAPO, arXiv 2504.05118). Whitening and sums over whole trajectories include tokens over age.
"""

from __future__ import annotations

import numpy as np

from headrace.config import Config
from headrace.config.ppo import PPOAdvEstimatorConfig

from ...distributed.ranks import Ranks
from ..batch import Batch, Float64
from .statistics import finite, kl_penalty, sums_to_go, whiten


def required_passes(config: Config) -> set[str]:
    assert config.ppo is not None
    if not config.ppo.adv_estimator.has_value_model:
        return set()
    return {"values", "old", "ref"} if config.loss_fn.kl_in_reward else {"values"}


def advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. With `gae` it also sets the value model's returns. Raises `ServiceError` for values that are not finite."""
    assert config.ppo is not None
    estimator = config.ppo.adv_estimator
    rewards = batch.per_token(batch.of_all_ranks(batch.rewards, ranks))
    if not estimator.has_value_model:
        normalized = estimator.normalize_advantages
        batch.advantages = whiten(batch, rewards, ranks, unbiased=False) if normalized else rewards
        return {}
    token_rewards = np.where(batch.to_go == 0, rewards, 0.0)
    if config.loss_fn.kl_in_reward:
        token_rewards = token_rewards - kl_penalty(batch, config.loss_fn, ranks)
    assert batch.values is not None
    values = finite(batch, batch.values.astype(np.float64), "values", ranks)
    value_lambdas, policy_lambdas = lambdas(estimator, batch)
    gamma = estimator.gae_gamma
    batch.returns = generalized_advantages(batch, token_rewards, values, gamma, value_lambdas) + values
    tokens = generalized_advantages(batch, token_rewards, values, gamma, policy_lambdas)
    if estimator.normalize_advantages:
        tokens = whiten(batch, tokens, ranks, unbiased=True)
    batch.advantages = np.where(batch.multipliers[batch.trajectory] > 0, tokens, 0.0)
    return {}


def generalized_advantages(batch: Batch, rewards: Float64, values: Float64, gamma: float, lambdas: Float64) -> Float64:
    """Return advantages [N] `A_t = δ_t + gamma λ A_{t+1}` with `δ_t = r_t + gamma V_{t+1} - V_t`, from rewards and values [N] and one λ per
    trajectory, [B]. The value after a trajectory's last token is 0."""
    following = np.append(values[1:], 0.0)
    following[batch.to_go == 0] = 0.0
    return sums_to_go(batch, rewards + gamma * following - values, gamma * lambdas)


def lambdas(estimator: PPOAdvEstimatorConfig, batch: Batch) -> tuple[Float64, Float64]:
    """Return the λ of the value model and of the policy, [B] each. The length-adaptive λ is `1 - 1 / max(alpha · length, 1)`: the longer a
    trajectory, the further credit reaches."""

    def constant(own: float | None) -> Float64:
        return np.full(len(batch), estimator.gae_lambda if own is None else own)

    if estimator.length_adaptive_alpha > 0:
        of_policy = 1.0 - 1.0 / np.maximum(estimator.length_adaptive_alpha * batch.lengths, 1.0)
    else:
        of_policy = constant(estimator.gae_lambda_policy)
    return constant(estimator.gae_lambda_value), of_policy
