"""GDPO (arXiv 2601.05242): each reward component is compared within its group separately, then their weighted sum is whitened.

    advantage = whiten(Σ_k w_k A_k), with A_k the group advantage of component k, whitened over the batch's trajectories

The formulae are NeMo RL's (`GDPOAdvantageEstimator`), except that the variance is computed in two passes, as in `grpo`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.algorithm import RewardScalingConfig

from ...distributed.ranks import Ranks
from ..batch import Batch, BatchRejected, Float64
from ..rewards import scale_rewards
from .statistics import (
    ROUNDING,
    all_equal,
    baseline_metrics,
    group_advantages,
    mean_and_std,
)


def required_passes(config: Config) -> set[str]:
    return set()


def advantages(config: Config, batch: Batch, ranks: Ranks) -> dict[str, float]:
    """A collective. Weights are in alphabetical order of the components' names. If none are configured, all are 1.

    Raises `BatchRejected` as `reject_odd_ones` does, and `ServiceError` as `scaled_components` does.
    """
    grpo = config.grpo
    assert grpo is not None
    own = [
        (int(place), dict(score.components), score.environment, trajectory.group_id)
        for place, score, trajectory in zip(batch.places, batch.scores, batch.trajectories, strict=True)
    ]
    rows = ranks.all_gather(own, list[tuple[int, dict[str, float], str, str]])
    everyone = sorted((row for of_rank in rows for row in of_rank), key=lambda row: row[0])
    reject_odd_ones([row[1:] for row in everyone])
    weights = grpo.adv_estimator.reward_weights
    components = scaled_components(
        [row[1] for row in everyone], [row[2] for row in everyone], weights, grpo.reward_scaling
    )
    total, largest, equal = np.zeros(1), 0.0, np.ones(batch.size // grpo.num_generations_per_prompt, dtype=np.bool_)
    for weight, name in zip(weights or [1.0] * len(components), sorted(components), strict=True):
        groups = components[name].reshape(-1, grpo.num_generations_per_prompt)
        of_component = group_advantages(groups, leave_one_out=grpo.leaves_one_out, normalize=grpo.normalizes)
        total = total + weight * of_component.ravel()
        largest = max(largest, float(np.abs(weight * of_component).max()))
        equal &= all_equal(groups) | (weight == 0)
    mean, std = mean_and_std(total)
    # components that cancel leave rounding
    batch.advantages = batch.per_token((total - mean) / (std if std > ROUNDING * largest else 1.0))
    metrics = baseline_metrics(config, batch.of_all_ranks(batch.rewards, ranks))
    return metrics | {"groups_without_spread": float(equal.mean())}


def reject_odd_ones(scores: Sequence[tuple[Mapping[str, float], str, str]]) -> None:
    """Raise `BatchRejected` for the groups of trajectories whose reward components are not those that most trajectories of the same
    environment have. `scores` are components, environment and group of each trajectory of the batch."""
    usual = {
        environment: Counter(tuple(sorted(given)) for given, other, _ in scores if other == environment).most_common(1)
        for environment in {environment for _, environment, _ in scores}
    }
    odd = {
        group: f"a trajectory of group {group!r} has reward components {_join(sorted(given))}, where environment {environment!r} usually "
        f"gives {_join(names)}; under gdpo all trajectories need the same"
        for given, environment, group in scores
        for names, _ in usual[environment]
        if tuple(sorted(given)) != names
    }
    if odd:
        raise BatchRejected(odd)


def scaled_components(
    scores: Sequence[Mapping[str, float]],
    environments: Sequence[str],
    weights: Sequence[float] | None,
    scaling: RewardScalingConfig,
) -> dict[str, Float64]:
    """Return the scaled reward components of a batch, [B] each, in alphabetical order of their names.

    `scores` are each trajectory's components by name, `environments` the environments that gave them, `weights` the configured ones. Raises
    `ServiceError` naming the environment if there are fewer than two components, if trajectories have different ones, or if their number
    differs from that of the weights.
    """
    names = sorted(scores[0]) if scores else []
    for given, environment in zip(scores, environments, strict=True):
        found = sorted(given)
        if len(found) < 2:
            raise ServiceError(
                f"environment {environment!r} scored with reward components {_join(found)}, and gdpo needs two or more; have the "
                "environment give each part of its reward as a component, or set grpo.adv_estimator.name to grpo"
            )
        if found != names:
            raise ServiceError(
                f"environment {environment!r} scored with reward components {_join(found)}, environment {environments[0]!r} "
                f"with {_join(names)}: under gdpo all trajectories need the same"
            )
    if scores and weights is not None and len(weights) != len(names):
        raise ServiceError(
            f"grpo.adv_estimator.reward_weights has {len(weights)} entries, and environment {environments[0]!r} scored with "
            f"{len(names)} reward components: {_join(names)}; give one weight for each, in this order"
        )
    return {
        name: scale_rewards(np.array([given[name] for given in scores], dtype=np.float64), scaling) for name in names
    }


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
