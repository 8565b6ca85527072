"""Metrics of a reserved batch: rewards, ages, lengths, dynamic sampling; and of scores, in training and validation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headrace.records.origin import Origin
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, EpisodeTrajectory, Group, Int32, Trajectory
from headrace.replay import Reservation
from headrace.run.metric_names import MOST_COMPONENTS

# Bounds on names given by environments: trackers and Prometheus keep every name that they have ever seen.
LONGEST_NAME = 64
# Tokens that count as repeated if the completion has had them before, one after the other.
RUN = 4


class Extent(NamedTuple):
    """The size of one trajectory, as a model sees it.

    `prompt` counts the tokens of its prompt (in an episode, of the first path's), `wrote` those that the policy wrote, and `paths` those of
    each path, prompt included. `calls` counts the calls that are trained, `roots` the roots among all calls, and `rendered_again` the
    tokens of contexts at roots after the first. `runs` counts the runs of `RUN` tokens in its completions, and `repeated` those of them
    that the same completion has had before.
    """

    prompt: int
    wrote: int
    paths: list[int]
    calls: int
    roots: int
    rendered_again: int
    runs: int
    repeated: int

    @classmethod
    def of(cls, trajectory: AnyTrajectory, paths: Sequence[Trajectory]) -> Extent:
        """Measure a trajectory, which has these `paths`."""
        calls, contexts = 1, [paths[0].prompt_token_ids.size]
        completions = [paths[0].completion_token_ids]
        if isinstance(trajectory, EpisodeTrajectory):
            calls = sum(call.trained for call in trajectory.calls)
            contexts = [call.context_token_ids.size for call in trajectory.calls if call.parent < 0]
            completions = [call.completion_token_ids for call in trajectory.calls if call.trained]
        lengths = [path.prompt_token_ids.size + path.completion_token_ids.size for path in paths]
        counts = [_count_runs(completion) for completion in completions]
        return cls(
            prompt=paths[0].prompt_token_ids.size,
            wrote=trajectory.length,
            paths=lengths,
            calls=calls,
            roots=len(contexts),
            rendered_again=sum(contexts[1:]),
            runs=sum(all_ for all_, _ in counts),
            repeated=sum(all_ - distinct for all_, distinct in counts),
        )


def _count_runs(token_ids: Int32) -> tuple[int, int]:
    """Return how many runs of `RUN` tokens there are, overlapping ones included, and how many distinct ones."""
    if token_ids.size < RUN:
        return 0, 0
    ids = token_ids.astype(np.uint64)
    runs = np.zeros(ids.size - RUN + 1, np.uint64)
    for place in range(RUN):
        # one number for each, modulo 2^64: two runs share theirs with a probability that does not matter here
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + runs.size]
    return runs.size, np.unique(runs).size


class TrajectoryReport(NamedTuple):
    """What a rank reports of a trained trajectory, at this `place` of the batch: its origin, its score's `components` and `timings`, and
    its extent."""

    place: int
    group_id: str
    origin: Origin
    components: dict[str, float]
    timings: dict[str, float]
    extent: Extent


def score_metrics(environments: Iterable[str], scores: Iterable[Score | TrajectoryReport]) -> dict[str, float]:
    """Return the mean and standard deviation of each reward component, over the trajectories that have it, and the mean seconds that scores
    took, by environment. `environments` has the name of each score's environment."""
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
    """Turn a name given by an environment or a data set into one that every tracker accepts."""
    return re.sub(r"[^\w.: -]+", "_", name)[:LONGEST_NAME].strip(". ") or "_"


def batch_metrics(
    reservation: Reservation, groups: Sequence[Group], extents: Sequence[Extent], truncated: int
) -> dict[str, float]:
    """Return the metrics of a batch: the environments' rewards, ages in steps, lengths in tokens.

    `groups` are the batch's, in its order. If they have several tasks, `environment_reward/<task>` is each task's mean reward. `extents`
    are those of its trajectories. `truncated` counts the trajectories that were cut off at the length limit.
    """
    batch = reservation.trajectories
    group_of = dict(zip(reservation.groups, groups, strict=True))
    ages = np.array([reservation.step - t.oldest_version for t in batch])
    completions = np.array([extent.wrote for extent in extents])
    lengths = np.array([sum(extent.paths) for extent in extents])
    metrics = {
        "environment_reward": float(np.mean([t.reward for t in batch])),
        "avg_trajectory_age": float(ages.mean()),
        "max_trajectory_age": float(ages.max()),
        "mean_prompt_length": float(np.mean([extent.prompt for extent in extents])),
        "mean_gen_tokens_per_sample": float(completions.mean()),
        "min_gen_tokens_per_sample": float(completions.min()),
        "max_gen_tokens_per_sample": float(completions.max()),
        "mean_total_tokens_per_sample": float(lengths.mean()),
        "total_num_tokens": float(lengths.sum()),
        "truncation_rate": truncated / len(batch),
    }
    if runs := sum(extent.runs for extent in extents):
        metrics["repetition"] = sum(extent.repeated for extent in extents) / runs
    tasks = {group.task_name for group in groups}
    if len(tasks) > 1:
        for task in sorted(tasks):
            mine = [t.reward for t in batch if group_of[t.group_id].task_name == task]
            metrics[f"environment_reward/{task}"] = float(np.mean(mine))
    return metrics


def episode_metrics(
    environments: Iterable[str], extents: Iterable[Extent], episodes: Collection[str]
) -> dict[str, float]:
    """Return means over the episodes of each environment: trained calls, tokens that the policy wrote, roots, and tokens rendered again.

    `environments` has the name of each trajectory's environment. `episodes` are the environments whose programs run episodes.
    """
    played: dict[str, list[Extent]] = defaultdict(list)
    for environment, extent in zip(environments, extents, strict=True):
        if environment in episodes:
            played[_fit(environment)].append(extent)
    metrics = {}
    for name, own in sorted(played.items()):
        metrics[f"episode_calls/{name}"] = float(np.mean([extent.calls for extent in own]))
        metrics[f"episode_tokens/{name}"] = float(np.mean([extent.wrote for extent in own]))
        metrics[f"episode_roots/{name}"] = float(np.mean([extent.roots for extent in own]))
        metrics[f"episode_rendered_again/{name}"] = float(np.mean([extent.rendered_again for extent in own]))
    return metrics


def sampling_metrics(reservation: Reservation, generation_batch: float) -> dict[str, float]:
    """Return the metrics of dynamic sampling: the groups scored since the previous batch, as a count and in batches of `generation_batch`
    groups, and how many of them were filtered."""
    return {
        "dynamic_sampling_num_gen_batches": reservation.scored / generation_batch,
        "dynamic_sampling_scored_groups": reservation.scored,
        "dynamic_sampling_filtered_groups": reservation.filtered,
    }
