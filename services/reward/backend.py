"""An environment as the hub calls it, and the metrics of its results."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import prometheus_client

from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2
from headrace.v1 import reward_pb2 as pb

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

    async def score(
        self, trajectories: Sequence[trajectory_pb2.Trajectory], timeout_s: float | None
    ) -> list[trajectory_pb2.Result]:
        """Return one result per trajectory, in order, within `timeout_s`. Does not raise."""

    async def describe(self) -> tuple[environment_pb2.DescribeResponse | None, str | None]:
        """Return the environment's description, or None if it can't be asked; and why it can't score now, or None if it can."""


@runtime_checkable
class RunsEpisodes(Protocol):
    """An environment whose program calls the policy itself."""

    async def run_episode(self, episode: episode_pb2.Episode, timeout_s: float) -> episode_pb2.EpisodeOutcome:
        """Run the episode, and return its outcome within `timeout_s`. Does not raise. Cancellation cancels the program."""


async def score_metered(
    name: str,
    environment: EnvironmentBackend,
    trajectories: Sequence[trajectory_pb2.Trajectory],
    timeout_s: float | None,
) -> list[trajectory_pb2.Result]:
    """Score `trajectories` with `environment`, and count the results under `name`."""
    started = time.monotonic()
    results = await environment.score(trajectories, timeout_s)
    SECONDS.labels(name).observe(time.monotonic() - started)
    count_results(name, results)
    return results


def count_results(name: str, results: Sequence[trajectory_pb2.Result]) -> None:
    for status, count in collections.Counter(result.status for result in results).items():
        RESULTS.labels(name, trajectory_pb2.Status.Name(status).removeprefix("STATUS_")).inc(count)
