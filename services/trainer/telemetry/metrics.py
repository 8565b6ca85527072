"""Metrics of a reserved batch: rewards, ages, lengths, dynamic sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.replay import Reservation
from headrace.trajectory import Group


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
