"""Sequences on which trainer and generator disagree too much are left out of the loss (`seq_logprob_error_threshold`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.learning.advantages.share import AllRanks, Share
from services.trainer.learning.tokens import Episode, Float64


def mask_logprob_errors(
    threshold: float | None,
    episodes: Sequence[Episode],
    gen: Sequence[Float64],
    batch_size: int,
    ranks: AllRanks,
) -> tuple[Float64, dict[str, float]]:
    """A collective, before advantages. New multipliers [E] of this rank's episodes, and metrics of the whole batch.

    A sequence's error is the mean over its tokens of `exp |gen - start|`, from the generator's log-probabilities [T] of each
    and the trainer's at the start of the step. Its multiplier becomes 0 where the error is above `threshold` or not a number; None
    leaves all as they are and measures.

    `max_`, `mean_` and `min_seq_mult_prob_error` are over the sequences with a token and a multiplier above 0, those
    `_after_mask` over what is left of them, 0 without any. `num_masked_seqs_by_logprob_error` is the number of sequences left
    out, `masked_correct_pct` the share of them with a reward of 1 (after scaling and shaping), between 0 and 1.
    """
    share = Share(episodes, batch_size, ranks)
    with np.errstate(over="ignore"):
        tokens = np.exp(np.abs(np.concatenate([np.empty(0), *gen]) - share.tokens("start")))
    errors = share.sums(tokens) / np.maximum(share.lengths, 1)
    counted = (share.lengths > 0) & (share.multipliers > 0)
    kept = counted if threshold is None else counted & (errors <= threshold)
    rewards = np.array([episode.reward for episode in episodes], dtype=np.float64)
    table = share.whole(np.stack([errors, counted, kept, rewards == 1], axis=1))
    error, was_counted, is_kept, correct = table[:, 0], table[:, 1] > 0, table[:, 2] > 0, table[:, 3] > 0
    masked = was_counted & ~is_kept
    metrics = {
        **_extent(error[was_counted], "seq_mult_prob_error"),
        **_extent(error[is_kept], "seq_mult_prob_error_after_mask"),
        "num_masked_seqs_by_logprob_error": float(masked.sum()),
        "masked_correct_pct": float(correct[masked].mean()) if masked.any() else 0.0,
    }
    return np.where(counted & ~kept, 0.0, share.multipliers), metrics


def _extent(errors: Float64, name: str) -> dict[str, float]:
    found = (errors.max(), errors.mean(), errors.min()) if errors.size else (0.0, 0.0, 0.0)
    return {f"{key}_{name}": float(value) for key, value in zip(("max", "mean", "min"), found, strict=True)}
