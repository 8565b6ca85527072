"""An environment as the hub calls it, and the metrics of its results."""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import prometheus_client

from headrace.env.wire import score_from_wire
from headrace.records.score import NOT_APPLICABLE, Score
from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb

Trajectories = Sequence[trajectory_pb2.Trajectory]
Results = list[trajectory_pb2.Result]
# An environment's description, or None if it can't be asked; and why it can't score now, or None if it can.
Described = tuple[environment_pb2.DescribeResponse | None, str | None]

RESULTS = prometheus_client.Counter(
    "headrace_reward_results", "Results given by environments", ["environment", "status"]
)
SECONDS = prometheus_client.Histogram(
    "headrace_reward_batch_seconds", "Time an environment took for its part of one Score call", ["environment"]
)


class EnvironmentBackend(Protocol):
    """An environment as the hub calls it, wherever it runs."""

    kind: pb.EnvironmentStatus.Kind.ValueType
    # Whether the run waits for it while it can't score. If not, the hub is not ready then.
    awaited: bool

    async def score(self, trajectories: Trajectories, timeout_s: float | None) -> Results:
        """Return one result per trajectory, in order, within `timeout_s`. Does not raise."""

    async def describe(self) -> Described:
        """Return the environment's description. Does not raise."""


@runtime_checkable
class RunsEpisodes(Protocol):
    """An environment whose program calls the policy itself."""

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """Run the episode, and return its outcome within `timeout_s`. Does not raise. Cancellation cancels the program."""


async def score_metered(
    name: str, environment: EnvironmentBackend, trajectories: Trajectories, timeout_s: float | None
) -> Results:
    """Score `trajectories` with `environment`, and count the results under `name`."""
    started = time.monotonic()
    results = await environment.score(trajectories, timeout_s)
    SECONDS.labels(name).observe(time.monotonic() - started)
    count_results(name, results)
    return results


async def score_as(
    name: str, environment: EnvironmentBackend, trajectories: Trajectories, timeout_s: float | None
) -> Results:
    """Score trajectories of another environment with this one, as if they were sent to it under its own `name`."""
    copies = copy.deepcopy(list(trajectories))
    for each in copies:
        each.environment = name
    return await score_metered(name, environment, copies, timeout_s)


def count_results(name: str, results: Sequence[trajectory_pb2.Result]) -> None:
    for status, count in collections.Counter(map(_name_status, results)).items():
        RESULTS.labels(name, status).inc(count)


def _name_status(result: trajectory_pb2.Result) -> str:
    if result.status == trajectory_pb2.STATUS_INVALID and does_not_apply(score_from_wire(result)):
        return NOT_APPLICABLE.upper()
    return plain_status(result)


def plain_status(result: trajectory_pb2.Result) -> str:
    return trajectory_pb2.Status.Name(result.status).removeprefix("STATUS_")


def does_not_apply(score: Score) -> bool:
    """Whether an environment has no opinion of the completion: a reward function of TRL's that returned None for it."""
    return score.status == "INVALID" and score.metadata.get(NOT_APPLICABLE) is True
