"""From rewards to advantages: pure float64 on ragged sequences, the same numbers for any number of ranks.

What a step does, in this order: `scale_rewards` and `components_of`, `shape_rewards`, `leave_out_truncated`, `mask_logprob_errors` where a
threshold is set, then `estimate`, which asks each episode for what `needs` says. Formulae are in the modules' docstrings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.config.algorithm import GRPO
from services.trainer.advantages.estimators import Needs, Settings, estimate, needs
from services.trainer.advantages.group import group_advantages
from services.trainer.advantages.logprob_error import mask_logprob_errors
from services.trainer.advantages.metrics import explained_variance
from services.trainer.advantages.rewards import (
    components_of,
    leave_out_truncated,
    reward_metrics,
    scale_rewards,
    shape_rewards,
)
from services.trainer.advantages.share import Share, SumOverRanks

__all__ = [
    "Needs",
    "Settings",
    "Share",
    "SumOverRanks",
    "batch_advantages",
    "components_of",
    "estimate",
    "explained_variance",
    "group_advantages",
    "leave_out_truncated",
    "mask_logprob_errors",
    "needs",
    "reward_metrics",
    "scale_rewards",
    "shape_rewards",
]


def batch_advantages(rewards: Sequence[float], groups: int, grpo: GRPO) -> list[float]:
    """Of a batch of `groups` groups of equal size, one after the other, as the configuration says."""
    scaled = scale_rewards(np.array(rewards, dtype=np.float64), grpo.reward_scaling)
    advantages = group_advantages(
        scaled.reshape(groups, -1), leave_one_out=grpo.use_leave_one_out_baseline, normalize=grpo.normalize_rewards
    )
    return [float(a) for a in advantages.ravel()]
