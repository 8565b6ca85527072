"""Turns the environments' rewards into those that are trained on, and decides which trajectories leave the loss.

Rewards are scaled first, then shaped by length. Between the two, the buffer filters groups (`use_dynamic_sampling`). Baselines are computed
after both.
"""

from __future__ import annotations

import numpy as np

from headrace.config.algorithm import RewardScalingConfig, RewardShapingConfig

from ..distributed.ranks import Ranks
from .batch import Batch, Bool, Float64, Int


def scale_rewards(rewards: Float64, scaling: RewardScalingConfig) -> Float64:
    """Clamp rewards of any shape to the source range and map them to the target range. Without scaling they are unchanged."""
    if not scaling.enabled:
        return rewards
    share = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
        scaling.source_max - scaling.source_min
    )
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def shape_rewards(
    rewards: Float64, lengths: Int, truncated: Bool, shaping: RewardShapingConfig, max_response_length: int
) -> Float64:
    """Subtract penalties on length from scaled rewards [B]. Without shaping they are unchanged.

    `lengths` [B] counts policy tokens, `truncated` [B] marks completions that were cut off. With
    `stop_properly_penalty_coef` c, a truncated completion gets `c r`. Otherwise the soft overlong punishment of DAPO (arXiv 2503.14476,
    eq. 13) applies: `r - p · clamp((length - (L - b)) / b, 0, 1)`, with L the maximum response length (`Config.max_response_length`),
    b the overlong buffer and p its penalty.
    """
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return np.where(truncated, rewards * shaping.stop_properly_penalty_coef, rewards)
    over = (lengths - (max_response_length - shaping.overlong_buffer_length)) / shaping.overlong_buffer_length
    return rewards - shaping.overlong_buffer_penalty * np.clip(over, 0.0, 1.0)


def mask_truncated(multipliers: Float64, truncated: Bool, overlong_filtering: bool) -> Float64:
    """Set `multipliers` [B] to 0 where a completion was cut off, with `overlong_filtering`. Such trajectories leave the loss, but not the
    baseline."""
    return np.where(truncated, 0.0, multipliers) if overlong_filtering else multipliers


def mask_by_logprob_error(batch: Batch, threshold: float | None, ranks: Ranks) -> dict[str, float]:
    """A collective, before advantages. Set the multiplier of trajectories on which trainer and behaviour policy disagree too much to 0
    (`seq_logprob_error_threshold`; None only measures). Returns metrics of the whole batch.

    A trajectory's error is the mean over its tokens of `exp |rollout - old|`. It leaves the loss if that is above `threshold` or NaN.
    Tokens that top-k or top-p now leaves out are not counted: they say nothing about the agreement.

    `max_`, `mean_` and `min_seq_mult_prob_error` are over the trajectories with a token and a multiplier above 0. Those with `_after_mask`
    are over the trajectories that remain; 0 if none does. `num_masked_seqs_by_logprob_error` is the number of trajectories left out,
    `masked_correct_pct` the share of them with a reward of 1 (after scaling and shaping), between 0 and 1.
    """
    assert batch.old_logprobs is not None
    old = np.where(np.isneginf(batch.old_logprobs), batch.rollout_logprobs, batch.old_logprobs).astype(np.float64)
    with np.errstate(over="ignore"):
        tokens = np.exp(np.abs(batch.rollout_logprobs.astype(np.float64) - old))
    errors = batch.sums(tokens) / np.maximum(batch.lengths, 1)
    counted = (batch.lengths > 0) & (batch.multipliers > 0)
    kept = counted if threshold is None else counted & (errors <= threshold)
    table = batch.of_all_ranks(np.stack([errors, counted, kept, np.isclose(batch.rewards, 1)], axis=1), ranks)
    error, was_counted, is_kept, correct = table[:, 0], table[:, 1] > 0, table[:, 2] > 0, table[:, 3] > 0
    masked = was_counted & ~is_kept
    batch.multipliers = np.where(counted & ~kept, 0.0, batch.multipliers)
    metrics = {
        "num_masked_seqs_by_logprob_error": float(masked.sum()),
        "masked_correct_pct": float(correct[masked].mean()) if masked.any() else 0.0,
    }
    for suffix, found in (("", error[was_counted]), ("_after_mask", error[is_kept])):
        extent = (found.max(), found.mean(), found.min()) if found.size else (0.0, 0.0, 0.0)
        for name, value in zip(("max", "mean", "min"), extent, strict=True):
            metrics[f"{name}_seq_mult_prob_error{suffix}"] = float(value)
    return metrics
