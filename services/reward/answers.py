"""Checks the answers of environments in other processes, and makes the answers that replace them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from headrace.env.environment import check_range
from headrace.env.wire import bounds, check_result, outcome_from_wire, outcome_to_wire
from headrace.v1 import environment_pb2, episode_pb2, trajectory_pb2

from .backend import Results, Trajectories


def check_results(
    results: Sequence[trajectory_pb2.Result],
    batch: Trajectories,
    who: str,
    environment: str,
    description: environment_pb2.DescribeResponse,
) -> Results:
    """Return the results that `who` gave for `batch`. A result that breaks the contract or the range of `description` becomes FAILED. All
    become FAILED if there are too few or too many."""
    if len(results) != len(batch):
        wrong = f"{who} returned {len(results)} results for {len(batch)} trajectories"
        return [make_result(trajectory_pb2.STATUS_FAILED, wrong, environment)] * len(batch)
    least, most = bounds(description)
    return [check_result(result, least, most) for result in results]


def check_outcome(
    outcome: episode_pb2.EpisodeOutcome, environment: str, description: environment_pb2.DescribeResponse
) -> episode_pb2.EpisodeOutcome:
    """Return the outcome of an episode of `environment`. It becomes FAILED if it breaks the contract or the range of `description`."""
    read = outcome_from_wire(outcome)
    if read.score is None:
        return outcome_to_wire(read)
    score = check_range(read.score, *bounds(description))
    build, name = score.build or description.build, score.environment or environment
    score = msgspec.structs.replace(score, build=build, environment=name)
    return outcome_to_wire(dataclasses.replace(read, score=score))


def make_outcome(status: trajectory_pb2.Status.ValueType, message: str, environment: str) -> episode_pb2.EpisodeOutcome:
    """Return the outcome of an episode that did not start, or did not end normally."""
    return episode_pb2.EpisodeOutcome(result=make_result(status, message, environment))


def make_result(status: trajectory_pb2.Status.ValueType, message: str, environment: str) -> trajectory_pb2.Result:
    """Return a result without a reward."""
    return trajectory_pb2.Result(status=status, message=message, environment=environment)
