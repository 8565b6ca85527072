"""Turns rewards into the advantage of each token. There is one module per family of algorithms, selected here by its configured name.

Each module declares which passes without gradients it reads (`required_passes`), and adds `advantages` (and `returns`) to the batch. Its
settings are in `headrace.config`. All numbers are float64, and equal to the last bit for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from headrace.config import Config

from ...distributed.ranks import Ranks
from ..batch import Batch
from . import gdpo, grpo, opd, ppo, reinforce
from .statistics import token_metrics


class AdvantageEstimator(Protocol):
    """The interface of each algorithm module of this package."""

    def required_passes(self, config: Config) -> set[str]:
        """Return the columns of the batch that `advantages` reads: `old`, `ref` or `teacher` log-probabilities, `values`."""

    def advantages(self, config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
        """A collective. Set `batch.advantages` [N], and `batch.returns` [N] for a value model. Returns metrics of the whole batch."""


ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "grpo": grpo,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce,
    "opd": opd,
    "gae": ppo,
    "raw_reward": ppo,
}


def required_passes(config: Config, optimizer_steps: int) -> set[str]:
    """Return the passes without gradients that a step of `optimizer_steps` makes: those that its estimator and its loss require, and `old`.
    A single optimizer step without dropout needs no pass for `old`, unless it is needed earlier: its own forward pass computes the same."""
    passes = set(_estimator(config).required_passes(config))
    late = config.algorithm.seq_logprob_error_threshold is not None
    if optimizer_steps > 1 or late or config.policy.lora_cfg.drops:
        passes.add("old")
    if config.loss_fn.kl_in_loss:
        passes.add("ref")
    return passes


def needs_unfiltered(config: Config) -> bool:
    """Return whether the estimator compares log-probabilities. It does so before top-k and top-p."""
    return "old" in _estimator(config).required_passes(config)


def estimate_advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. Set `batch.advantages`, clamped to the configured bounds, and `batch.returns` for a value model.

    Metrics are `advantages/mean`, `/std`, `/min` and `/max` over all tokens of the batch, and the estimator's own. Those of the `grpo`
    section have `baseline_reward/pct_0`, `_1` and `_mixed`, and `opd` also has `on_policy_distillation/teacher_student_logprob_gap_mean`.

    Raises `ServiceError` naming the trajectory, on every rank, for log-probabilities or values that are not finite.
    """
    metrics = _estimator(config).advantages(config, batch, ranks)
    assert batch.advantages is not None
    low, high = config.algorithm.advantage_clip_low, config.algorithm.advantage_clip_high
    if low is not None or high is not None:
        batch.advantages = np.clip(batch.advantages, low, high)
    return metrics | token_metrics(batch, "advantages", batch.advantages, ranks)


def _estimator(config: Config) -> AdvantageEstimator:
    return ESTIMATORS[config.algorithm.adv_estimator.name]
