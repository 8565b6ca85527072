"""What environments in other processes answer, and what is answered in their place."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.environment import ranged
from headrace.v1 import environment_pb2, trajectory_pb2
from headrace.wire import bounds, score_from_wire, score_to_wire


def accepted(
    results: Sequence[trajectory_pb2.Result],
    batch: Sequence[trajectory_pb2.Trajectory],
    who: str,
    environment: str,
    description: environment_pb2.DescribeResponse,
) -> list[trajectory_pb2.Result]:
    """The results for `batch`, which `who` gave, who describes itself so: those that break the contract or are out of the range are FAILED,
    and all are if there are too few or too many."""
    if len(results) != len(batch):
        wrong = f"{who} answered {len(results)} results for {len(batch)} trajectories"
        return [result_of(trajectory_pb2.STATUS_FAILED, wrong, environment)] * len(batch)
    least, most = bounds(description)
    return [score_to_wire(ranged(score_from_wire(result), least, most)) for result in results]


def result_of(status: trajectory_pb2.Status.ValueType, message: str, environment: str) -> trajectory_pb2.Result:
    """A result that is no reward."""
    return trajectory_pb2.Result(status=status, message=message, environment=environment)
