"""What is measured of advantages and returns; names as in NeMo RL."""

from __future__ import annotations

import math

import numpy as np

from services.trainer.learning.advantages.group import baselines
from services.trainer.learning.advantages.share import Share
from services.trainer.learning.tokens import Float64


def token_metrics(share: Share, name: str, tokens: Float64) -> dict[str, float]:
    """A collective. `<name>/mean`, `/std` (unbiased), `/min` and `/max` over all tokens [N] of the batch; 0 without any."""
    parts = share.split(tokens)
    rows = np.array([(p.size, p.sum(), p.min(initial=math.inf), p.max(initial=-math.inf)) for p in parts])
    table = share.whole(rows.reshape(-1, 4))
    count, total = table[:, 0].sum(), table[:, 1].sum()
    mean = total / count if count else 0.0
    squares = share.whole(share.sums((tokens - mean) ** 2)).sum()
    found = {
        "mean": mean,
        "std": math.sqrt(squares / (count - 1)) if count > 1 else 0.0,
        "min": table[:, 2].min() if count else 0.0,
        "max": table[:, 3].max() if count else 0.0,
    }
    return {f"{name}/{key}": float(value) for key, value in found.items()}


def baseline_metrics(rewards: Float64, generations: int, *, leave_one_out: bool) -> dict[str, float]:
    """Of how many percent of trajectories, rewards [P·n], the baseline is 0, 1, or anything else."""
    groups = rewards.reshape(-1, generations)
    baseline, _ = baselines(groups, leave_one_out=leave_one_out and generations > 1)
    zero, one = (100.0 * float((baseline == value).mean()) for value in (0, 1))
    return {
        "baseline_reward/pct_0": zero,
        "baseline_reward/pct_1": one,
        "baseline_reward/pct_mixed": 100.0 - zero - one,
    }
