"""Metrics of a reserved batch: rewards, ages, lengths, dynamic sampling; and of scores, in training and validation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from headrace.replay import Reservation
from headrace.trajectory import Group

# What an environment names is bounded: trackers and Prometheus keep every name that they have ever seen.
MOST_COMPONENTS, LONGEST_NAME = 32, 64


class Scored(NamedTuple):
    """The reward components of one trajectory by name, and the seconds that its score took (`Score.timings`)."""

    components: Mapping[str, float]
    timings: Mapping[str, float]


def score_metrics(environments: Iterable[str], scores: Iterable[Scored]) -> dict[str, float]:
    """Mean and standard deviation of each reward component, over the trajectories that have it, and the mean seconds that scores took, by
    environment. `environments` has the name of each score's."""
    components: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for environment, score in zip(environments, scores, strict=True):
        for name, value in score.components.items():
            components[_fit(name)].append(value)
        if score.timings:
            times[_fit(environment)].append((score.timings.get("waiting", 0.0), score.timings.get("environment", 0.0)))
    metrics = {}
    for name in sorted(components)[:MOST_COMPONENTS]:
        metrics[f"reward/{name}"] = float(np.mean(components[name]))
        metrics[f"reward_std/{name}"] = float(np.std(components[name]))
    for name, pairs in sorted(times.items()):
        metrics[f"scoring_wait/{name}"], metrics[f"scoring_time/{name}"] = map(float, np.mean(pairs, axis=0))
    return metrics


def _fit(name: str) -> str:
    """A name that an environment or a data set has given, as every tracker accepts it."""
    return re.sub(r"[^\w.: -]+", "_", name)[:LONGEST_NAME].strip(". ") or "_"


def batch_metrics(reservation: Reservation, groups: Sequence[Group], truncated: float) -> dict[str, float]:
    """Metrics of a batch: the environments' rewards, ages in steps, lengths in tokens.

    `groups` are the batch's, in its order; if they have several tasks, `environment_reward/<task>` is each task's mean reward.
    `truncated` is the number of trajectories cut off at the length limit.
    """
    batch = reservation.trajectories
    group_of = dict(zip(reservation.groups, groups, strict=True))
    ages = np.array([reservation.step - t.oldest_version for t in batch])
    completions = np.array([t.length for t in batch])
    lengths = np.array(total_lengths(reservation, groups))
    metrics = {
        "environment_reward": float(np.mean([t.reward for t in batch])),
        "avg_trajectory_age": float(ages.mean()),
        "max_trajectory_age": float(ages.max()),
        "mean_prompt_length": float((lengths - completions).mean()),
        "mean_gen_tokens_per_sample": float(completions.mean()),
        "min_gen_tokens_per_sample": float(completions.min()),
        "max_gen_tokens_per_sample": float(completions.max()),
        "mean_total_tokens_per_sample": float(lengths.mean()),
        "total_num_tokens": float(lengths.sum()),
        "truncation_rate": truncated / len(batch),
    }
    tasks = {group.task_name for group in groups}
    if len(tasks) > 1:
        for task in sorted(tasks):
            mine = [t.reward for t in batch if group_of[t.group_id].task_name == task]
            metrics[f"environment_reward/{task}"] = float(np.mean(mine))
    return metrics


def total_lengths(reservation: Reservation, groups: Sequence[Group]) -> list[int]:
    """Tokens of prompt and completion of each trajectory of a batch."""
    prompts = {group.id: group.prompt_token_ids.size for group in groups}
    return [prompts[t.group_id] + t.length for t in reservation.trajectories]


def sampling_metrics(reservation: Reservation, generation_batch: float) -> dict[str, float]:
    """Metrics of dynamic sampling: the groups scored since the previous batch, as a count and in batches of `generation_batch` groups,
    and how many of them were filtered."""
    return {
        "dynamic_sampling_num_gen_batches": reservation.scored / generation_batch,
        "dynamic_sampling_scored_groups": reservation.scored,
        "dynamic_sampling_filtered_groups": reservation.filtered,
    }
