"""Importance weights, which correct for tokens sampled by a policy other than the one before the update.

    token level        w_t = exp(prev_t - rollout_t)
    sequence level     w   = exp(mean_t(prev_t - rollout_t)), or of the sum: one for all tokens of the sequence

Weights that are not finite become 0, and none carries a gradient. With bounds [low, high] they are then truncated:

    tis                clamp(w, low, high)
    icepop             w where low <= w <= high, else 0
    seq-mask-tis       w_t where low <= exp(mean_t(prev_t - rollout_t)) <= high, else 0 on the whole sequence

Sources: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training"), IcePop (Zhao et al. 2025, ringtech.notion.site/icepop), sequence masks (Liu et al. 2025, "When Speed Kills
Stability"). The mean at the sequence level is Headrace's own: NeMo RL takes the sum, as does `sequence_is_aggregation: sum`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.config.loss import LossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch
from headrace_services.trainer.learning.losses.reduction import (
    mean_by_trajectory,
    sequence_weights,
    sum_by_trajectory,
    weighted_sum,
)


@dataclasses.dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights before (`raw`) and after truncation (`truncated`): [N] per token or, with `by_sequence`, [B].

    `outside`, bool, marks the weights out of bounds: [B] with `outside_by_sequence`, else shaped like `raw`; None without truncation.
    """

    raw: Tensor
    truncated: Tensor
    outside: Tensor | None
    by_sequence: bool
    outside_by_sequence: bool

    def per_token(self, tokens: MicroBatch) -> Tensor:
        """[N]: the factors of the tokens' policy terms."""
        return self.truncated[tokens.trajectory] if self.by_sequence else self.truncated


def importance_weights(
    config: LossConfig, prev: Tensor, rollout_logprobs: Tensor, inside: Tensor, tokens: MicroBatch
) -> ImportanceWeights:
    """Importance weights of `prev` [N] against `rollout_logprobs` [N], before and after truncation.

    Sequence weights are computed over the tokens that are `inside` [N] bool, whether they count in the loss or not.
    """
    difference = (prev - rollout_logprobs).detach()
    if not config.sequence_level_importance_ratios:
        raw = _finite(difference.exp())
    elif config.sequence_is_aggregation == "sum":
        total = sum_by_trajectory(torch.where(inside, difference, 0.0), tokens)
        raw = _finite(total.to(difference.dtype).exp())
    else:
        raw = _finite(mean_by_trajectory(difference, inside, tokens).to(difference.dtype).exp())
    kind, high = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    by_sequence = config.sequence_level_importance_ratios
    if kind is None or high is None:
        return ImportanceWeights(raw, raw, None, by_sequence, False)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    if kind == "seq-mask-tis":
        geometric_mean = mean_by_trajectory(_finite(difference), inside, tokens).exp()
        outside = ~((geometric_mean >= low) & (geometric_mean <= high))
        return ImportanceWeights(raw, torch.where(outside[tokens.trajectory], 0.0, raw), outside, by_sequence, True)
    outside = (raw < low) | (raw > high)
    truncated = raw.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(raw, truncated, outside, by_sequence, False)


def importance_metrics(
    weights: ImportanceWeights, per_token: Tensor, tokens: MicroBatch, counts: GlobalCounts
) -> dict[str, Tensor]:
    """Means of the importance weights before and after truncation, and the share that is out of bounds.

    Means over tokens are weighted by `per_token` [N]; means over sequences weight every sequence with a token equally. The share
    out of bounds is of tokens, or of sequences under seq-mask-tis.
    """
    per_sequence = sequence_weights(tokens, counts)
    unit = per_sequence if weights.by_sequence else per_token
    metrics = {"sampling_importance_ratio": weighted_sum(weights.raw, unit)}
    if weights.outside is not None:
        metrics["sampling_importance_ratio_truncated"] = weighted_sum(weights.truncated, unit)
        if weights.outside_by_sequence:
            metrics["is_oob_ratio"] = weighted_sum(weights.outside, per_sequence)
        else:
            outside = weights.outside[tokens.trajectory] if weights.by_sequence else weights.outside
            metrics["is_oob_ratio"] = weighted_sum(outside, per_token)
    return metrics


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
