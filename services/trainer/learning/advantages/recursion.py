"""Sums over a token's future, and generalized advantage estimation as one of them."""

from __future__ import annotations

import numpy as np

from services.trainer.learning.advantages.share import Share
from services.trainer.learning.tokens import Float64


def sums_to_go(share: Share, tokens: Float64, factors: Float64) -> Float64:
    """`y_t = x_t + f y_{t+1}` of tokens [N], with a factor for each episode, [E]; nothing comes after an episode's last token.

    All episodes take a step at once, from their ends: as many steps as the longest has tokens.
    """
    table = np.zeros((int(share.lengths.max(initial=0)), len(share.episodes)))
    table[share.to_go, share.sequence] = tokens
    for place in range(1, len(table)):
        table[place] += factors * table[place - 1]
    return table[share.to_go, share.sequence]


def temporal_differences(share: Share, rewards: Float64, values: Float64, gamma: float) -> Float64:
    """`δ_t = r_t + gamma V_{t+1} - V_t` of rewards and values [N]; the value after an episode's last token is 0."""
    following = np.append(values[1:], 0.0)
    following[share.to_go == 0] = 0.0
    return rewards + gamma * following - values


def generalized_advantages(share: Share, rewards: Float64, values: Float64, gamma: float, lambdas: Float64) -> Float64:
    """`A_t = δ_t + gamma λ A_{t+1}` (GAE, arXiv 1506.02438), [N], of rewards and values [N] with one λ for each episode, [E]."""
    return sums_to_go(share, temporal_differences(share, rewards, values, gamma), gamma * lambdas)


def length_adaptive_lambdas(share: Share, alpha: float) -> Float64:
    """[E]: `1 - 1 / max(alpha · length, 1)`: the longer an episode, the further credit reaches (VAPO, arXiv 2504.05118)."""
    return 1.0 - 1.0 / np.maximum(alpha * share.lengths, 1.0)
