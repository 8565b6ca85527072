"""On-policy distillation (arXiv 2601.02780): a teacher scores each token that the policy sampled; rewards are ignored.

advantage = teacher's log-probability - policy's log-probability
"""

from __future__ import annotations

import numpy as np

from headrace.config import Config

from ...distributed.ranks import Ranks
from ..batch import Batch
from .statistics import (
    baseline_metrics,
    finite,
    token_metrics,
    unfiltered_logprobs,
)


def required_passes(config: Config) -> set[str]:
    return {"old", "teacher"}


def advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. Raises `ServiceError` naming the trajectories for log-probabilities that are not finite."""
    assert batch.teacher_logprobs is not None
    gap = batch.teacher_logprobs.astype(np.float64) - unfiltered_logprobs(batch)
    batch.advantages = finite(batch, gap, "log-probabilities", ranks)
    mean = token_metrics(batch, "gap", gap, ranks)["gap/mean"]
    metrics = baseline_metrics(config, batch.of_all_ranks(batch.rewards, ranks))
    return {**metrics, "on_policy_distillation/teacher_student_logprob_gap_mean": mean}
