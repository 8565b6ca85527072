"""From rewards to advantages: pure float64 on ragged sequences, the same numbers for any number of ranks.

What a step does, in this order: `scale_rewards` and `components_of`, `shape_rewards`, `leave_out_truncated`, `mask_logprob_errors` where a
threshold is set, then `estimate`, which asks each episode for what `needs` says. Formulae are in the modules' docstrings.
"""

from __future__ import annotations

from services.trainer.learning.advantages.estimators import Needs, Settings, estimate, needs
from services.trainer.learning.advantages.group import group_advantages
from services.trainer.learning.advantages.logprob_error import mask_logprob_errors
from services.trainer.learning.advantages.rewards import (
    components_of,
    leave_out_truncated,
    reward_metrics,
    scale_rewards,
    shape_rewards,
)
from services.trainer.learning.advantages.share import AllRanks, Share

__all__ = [
    "AllRanks",
    "Needs",
    "Settings",
    "Share",
    "components_of",
    "estimate",
    "group_advantages",
    "leave_out_truncated",
    "mask_logprob_errors",
    "needs",
    "reward_metrics",
    "scale_rewards",
    "shape_rewards",
]
