"""From the rewards that environments gave to those that are trained on: scaled first, then shaped by length.

Groups are filtered between the two (`use_dynamic_sampling`), in the buffer; baselines are taken after both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.config.advantages import RewardScaling, RewardShaping
from headrace.errors import ServiceError
from services.trainer.learning.tokens import Bool, Float64

Int = npt.NDArray[np.intp]


def scale_rewards(rewards: Float64, scaling: RewardScaling) -> Float64:
    """Rewards of any shape, clamped to the source range and mapped to the target range; as they are where that is turned off."""
    if not scaling.enabled:
        return rewards
    share = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
        scaling.source_max - scaling.source_min
    )
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def shape_rewards(
    rewards: Float64, lengths: Int, truncated: Bool, shaping: RewardShaping, max_response_length: int
) -> Float64:
    """Scaled rewards [B] less what their lengths cost; as they are where that is turned off.

    `lengths` [B] counts the tokens that the policy wrote, `truncated` [B] marks completions that were cut off. With
    `stop_properly_penalty_coef` c a truncated completion gets `c r`. Else, with L the `max_response_length` (of the configuration
    as a whole: `Config.max_response_length`), b the buffer and p its penalty, the soft overlong punishment of DAPO (arXiv
    2503.14476, eq. 13): `r - p · clamp((length - (L - b)) / b, 0, 1)`.
    """
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        return np.where(truncated, rewards * shaping.stop_properly_penalty_coef, rewards)
    over = (lengths - (max_response_length - shaping.overlong_buffer_length)) / shaping.overlong_buffer_length
    return rewards - shaping.overlong_buffer_penalty * np.clip(over, 0.0, 1.0)


def leave_out_truncated(multipliers: Float64, truncated: Bool, overlong_filtering: bool) -> Float64:
    """`multipliers` [B] with 0 where a completion was cut off, if that is asked for: out of the loss, not out of the baseline."""
    return np.where(truncated, 0.0, multipliers) if overlong_filtering else multipliers


def components_of(
    scores: Sequence[Mapping[str, float]],
    environments: Sequence[str],
    weights: Sequence[float] | None,
    scaling: RewardScaling,
) -> dict[str, Float64]:
    """The scaled reward components of a batch, [B] each, in alphabetical order of their names: what `gdpo` weighs.

    `scores` are each trajectory's components by name, `environments` the environment that gave them, `weights` the
    configuration's. Raises `ServiceError` naming the environment where there are fewer than two components, not the same for all
    trajectories, or not one for each weight.
    """
    names = sorted(scores[0]) if scores else []
    for given, environment in zip(scores, environments, strict=True):
        found = sorted(given)
        if len(found) < 2:
            raise ServiceError(
                f"environment {environment!r} scored with reward components {_listed(found)}: gdpo weighs two or more; have the "
                "environment give each part of its reward as a component, or set grpo.adv_estimator.name to grpo"
            )
        if found != names:
            raise ServiceError(
                f"environment {environment!r} scored with reward components {_listed(found)}, environment {environments[0]!r} "
                f"with {_listed(names)}: under gdpo all trajectories need the same"
            )
    if scores and weights is not None and len(weights) != len(names):
        raise ServiceError(
            f"grpo.adv_estimator.reward_weights has {len(weights)} entries, and environment {environments[0]!r} scored with "
            f"{len(names)} reward components: {_listed(names)}; give one weight for each, in this order"
        )
    return {
        name: scale_rewards(np.array([given[name] for given in scores], dtype=np.float64), scaling) for name in names
    }


def reward_metrics(unshaped: Float64, shaped: Float64, shaping: RewardShaping) -> dict[str, float]:
    """`reward`, the mean of what is trained on; under `reward_shaping` also `unshaped_total_reward`, the mean before it. Both [B],
    scaled."""
    metrics = {"reward": float(shaped.mean())}
    if shaping.enabled:
        metrics["unshaped_total_reward"] = float(unshaped.mean())
    return metrics


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
