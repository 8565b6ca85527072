"""Reads from a run's files what each of its sides takes: the workload of `headrace.run.balance`, as it was in the steps of a window.

Training, refits and scores are in the metrics of the steps. What a replica does is in the history of groups: each trajectory with its
tokens, when its group was leased and when it was pushed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.base.deferred import np
from headrace.base.errors import ConfigError
from headrace.config import Config
from headrace.run import group_files
from headrace.run.balance import Balance, Workload
from headrace.run.findings import TOTAL, Window, in_window, usual
from headrace.run.journal import Line
from headrace.run.now import Now, count_replicas

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Groups whose lengths are drawn, the newest ones.
_GROUPS = 4096
# Events before the window that may begin a trajectory in it.
_BEFORE_S = 900.0
_FIELDS = ("id", "part", "group", "what", "tokens")
# The server's clock tells milliseconds.
_CLOCK_S = 1e-3
# Some of the time of a token is not shared with other sequences, however little the measurements tell of it.
MOST_SHARED = 0.99


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a run did in `steps` steps: what it had to do, and how it went. `trained_tokens` are those that a step trained on."""

    workload: Workload
    balance: Balance
    steps: int
    trained_tokens: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """What replicas did: the tokens of each trajectory by group, and the seconds per token of a sequence, `token_s + per_sequence_s * b`
    beside b - 1 others. `generating`: the share of the time in which a replica had something to generate."""

    lengths: Sequence[tuple[float, ...]]
    token_s: float
    per_sequence_s: float
    generating: float


def measure(
    folder: Path, config: Config, lines: Sequence[Line], window: Window = "all", now: Now | None = None
) -> Measured:
    """Return what the run in `folder` did. `lines` are the surviving ones. Raises `ConfigError` without a timed step, a history of groups
    or pyarrow, and `CodecError` for a damaged file of the history."""
    steps = [line for line in usual(in_window(lines, window)) if math.isfinite(line.metrics.get(TOTAL, math.nan))]
    if not steps:
        raise ConfigError(f"{folder} has no timed step yet; plan again after a few, or plan its configuration")
    replicas = count_replicas(config, now)
    generation = read_generation(folder, (steps[0].time - steps[0].metrics[TOTAL], steps[-1].time), replicas)
    step_s, waited_s = _mean(steps, TOTAL), _mean(steps, "timing/train/exposed_generation")
    given = configured(config)
    # a refit that drains has the wait for running completions in its time; the shortest has the least of it
    refits = [line.metrics.get("timing/train/weight_sync", 0.0) for line in steps]
    refit_s = min(refits) if given["drains"] else statistics.fmean(refits)
    algorithm = config.algorithm
    trajectories = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    measured: dict[str, Any] = {
        "prompts": _groups_a_step(steps, algorithm.num_prompts_per_step),
        "lengths": generation.lengths,
        "token_s": generation.token_s,
        "per_sequence_s": generation.per_sequence_s,
        "training_s": step_s - waited_s - statistics.fmean(refits),
        "refit_s": refit_s,
        "replicas": replicas,
        "scoring_s": _scoring_s(steps),
        "scoring_places": _scoring_places(now),
    }
    return Measured(
        Workload(**{**given, **measured}),
        Balance(step_s, 1 - waited_s / step_s, generation.generating),
        len(steps),
        _mean(steps, "mean_gen_tokens_per_sample") * trajectories,
    )


def configured(config: Config) -> dict[str, Any]:
    """Return what a configuration says of its workload: how much of it there is, and not how fast it is."""
    algorithm, agents = config.algorithm, config.agents
    asynchrony = algorithm.asynchrony
    return {
        "prompts": algorithm.num_prompts_per_step,
        "replicas": config.rollout.replicas,
        "places": config.rollout.max_concurrent_groups,
        "sequences": config.policy.generation.vllm_cfg.max_num_seqs,
        "age": algorithm.max_age,
        "policy": asynchrony.staleness_policy,
        "ahead": algorithm.ahead_steps,
        "drains": not (asynchrony.enabled and asynchrony.in_flight_weight_updates),
        "runners": agents.runners if config.has_episodes else None,
        "episode_places": agents.slots // algorithm.num_generations_per_prompt if config.has_episodes else 0,
    }


def change(work: Workload, before: Config, after: Config) -> Workload:
    """Return the workload that was measured with one configuration as it would be with another. Raises `ConfigError` if nothing would
    change, or if what changes can't be told from what was measured."""
    was, new = configured(before), configured(after)
    changed = {name: value for name, value in new.items() if value != was[name]}
    groups = [config.algorithm.num_generations_per_prompt for config in (before, after)]
    if not changed or groups[0] != groups[1]:
        raise ConfigError(
            f"a run that was measured with groups of {groups[0]} tells what another number of replicas, runners, places or prompts would "
            "do, or another age bound; change one of these alone, or plan a run's YAML with given rates"
        )
    if "prompts" in changed:  # of which some may be filtered
        changed["prompts"] = round(work.prompts * new["prompts"] / was["prompts"])
    return dataclasses.replace(work, **changed)


def _mean(steps: Sequence[Line], metric: str) -> float:
    return statistics.fmean(line.metrics.get(metric, 0.0) for line in steps)


def _groups_a_step(steps: Sequence[Line], prompts: int) -> int:
    """Return how many groups are generated for a step: dynamic sampling filters some of them."""
    scored, filtered = (_mean(steps, f"dynamic_sampling_{what}_groups") for what in ("scored", "filtered"))
    return round(prompts * scored / (scored - filtered)) if scored > filtered > 0 else prompts


def _scoring_s(steps: Sequence[Line]) -> float:
    """Return how long an environment works on a trajectory, over all environments alike."""
    times = [seconds for line in steps for name, seconds in line.metrics.items() if name.startswith("scoring_time/")]
    return statistics.fmean(times) if times else 0.0


def _scoring_places(now: Now | None) -> int | None:
    """Return how many trajectories the environments score at a time; None if one of them doesn't say."""
    places = [environment.capacity for environment in now.environments] if now is not None else []
    known = [capacity for capacity in places if capacity]
    return sum(known) if known and len(known) == len(places) else None


def read_generation(folder: Path, span: tuple[float, float], replicas: int) -> Generation:
    """Return what the replicas did between two times, from the history of groups. Raises as `measure` does."""
    whole, trained = _read_trajectories(folder / group_files.FOLDER, span)
    lengths = [tuple(each.tokens for each in group) for group in trained]
    most = max(map(len, lengths), default=0)
    # a group that another replica went on with has the rest of its trajectories in another lease
    lengths = [each for each in lengths if len(each) == most][-_GROUPS:]
    if not lengths:
        raise ConfigError(
            f"{folder} has no history of groups in these steps; choose --window all, or plan its configuration with given rates"
        )
    start, end, tokens = (np.array(column, dtype=float) for column in zip(*whole, strict=True))
    flow = _Concurrency(start, end)
    beside = flow.mean(start, end) / replicas
    token_s, per_sequence_s = fit_speed(tokens, end - start, beside)
    busy = flow.share(span)
    return Generation(lengths, token_s, per_sequence_s, busy)


class _Trajectory(NamedTuple):
    leased: float
    pushed: float
    tokens: float


def _read_trajectories(folder: Path, span: tuple[float, float]) -> tuple[list[_Trajectory], list[list[_Trajectory]]]:
    """Return all trajectories that were pushed between two times, and by group those of groups that became ready to be trained."""
    leased: dict[str, float] = {}
    pushed: dict[str, list[_Trajectory]] = collections.defaultdict(list)
    ended: list[str] = []
    seen: set[tuple[str, int]] = set()
    for file in group_files.list_files(folder):
        if file.last[0] / 1000 < span[0] - _BEFORE_S or file.first[0] / 1000 > span[1]:
            continue
        for event in group_files.iterate_events(file.path, _FIELDS):
            # an event may stand in two files
            if event.group is None or (event.id, event.part) in seen:
                continue
            seen.add((event.id, event.part))
            if event.what == "leased":
                leased[event.group] = event.time
            elif event.what == "pushed" and event.group in leased and span[0] <= event.time <= span[1]:
                tokens = float(event.tokens or 1)
                pushed[event.group].append(_Trajectory(leased[event.group], event.time, tokens))
            elif event.what in ("ready", "filtered"):
                ended.append(event.group)
    return [each for group in pushed.values() for each in group], [pushed[group] for group in ended if group in pushed]


class _Concurrency:
    """How many trajectories were being generated at each time."""

    def __init__(self, start: Floats, end: Floats) -> None:
        times = np.concatenate([start, end])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._count = np.cumsum(np.concatenate([np.ones(len(start)), -np.ones(len(end))])[order])
        self._sum = np.concatenate([[0.0], np.cumsum(self._count[:-1] * np.diff(self._times))])

    def mean(self, start: Floats, end: Floats) -> Floats:
        """Return the mean number between each two times."""
        between = np.interp(end, self._times, self._sum) - np.interp(start, self._times, self._sum)
        return between / np.maximum(end - start, _CLOCK_S)

    def share(self, span: tuple[float, float]) -> float:
        """Return the share of a span in which there was any."""
        inside = np.clip(self._times, *span)
        return float(np.sum(np.diff(inside)[self._count[:-1] > 0]) / (span[1] - span[0]))


def fit_speed(tokens: Floats, took: Floats, beside: Floats) -> tuple[float, float]:
    """Return `token_s` and `per_sequence_s` of trajectories that took so many seconds, each with so many sequences in its replica, itself
    included: by least squares, under the condition that all together take as long as they took, and neither is negative."""
    seconds, load = took.sum() / tokens.sum(), float((tokens * beside).sum() / tokens.sum())
    # what the load of one differs from the mean load, in tokens
    extra = tokens * (beside - load)
    slope = float(extra @ (took - tokens * seconds) / max(extra @ extra, 1e-12))
    per_sequence_s = min(max(slope, 0.0), MOST_SHARED * float(seconds) / load)
    return float(seconds) - per_sequence_s * load, per_sequence_s
