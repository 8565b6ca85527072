"""To which of several hubs the scorer sends an environment's work."""

from __future__ import annotations

import pytest

from headrace.v1 import environment_pb2
from headrace.v1.reward_pb2 import AttachedProcess, EnvironmentStatus
from headrace_services.replay.scorer import routes


def status(build: str, *ages_s: int, idle_s: int | None = None) -> EnvironmentStatus:
    """Processes at work that were attached so long ago, and one that is not at work."""
    processes = [AttachedProcess(build=build, age_ms=1000 * age_s, works=True) for age_s in ages_s]
    if idle_s is not None:
        processes.append(AttachedProcess(build="other", age_ms=1000 * idle_s))
    return EnvironmentStatus(ready=True, description=environment_pb2.DescribeResponse(build=build), processes=processes)


AWAY = EnvironmentStatus(ready=False, message="nobody is attached")


@pytest.mark.parametrize(
    ("statuses", "places"),
    [
        ([status("1", 5)], [0]),
        ([status("1", 5), status("1", 9)], [0, 1]),
        ([status("1", 5), status("2", 3), status("1", 1), None], [0, 2]),
        ([status("1", 5), status("2", 3, 60)], [1]),
        ([status("1", 5), status("2", 9, idle_s=1)], [0]),
        ([AWAY, status("1", 5)], [1]),
        ([AWAY, None], [0]),
        ([None], [0]),
        ([status("a"), status("a")], [0, 1]),  # built in, or served
        ([], []),
    ],
)
def test_work_goes_to_the_newest_ready_build(statuses: list[EnvironmentStatus | None], places: list[int]) -> None:
    assert routes(statuses) == places
