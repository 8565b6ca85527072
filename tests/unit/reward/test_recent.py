"""What an environment answered in the last minute."""

from __future__ import annotations

from headrace.v1 import trajectory_pb2
from headrace.v1.trajectory_pb2 import Result
from headrace_services.reward.recent import RecentResults


def scored(took_ms: float | None) -> Result:
    return Result(status=trajectory_pb2.STATUS_SCORED, reward=0.0, took_ms=took_ms)


def test_times_are_those_of_scores_and_failures_are_counted_apart() -> None:
    recent = RecentResults(100.0)
    failures = [trajectory_pb2.STATUS_FAILED, trajectory_pb2.STATUS_TIMED_OUT, trajectory_pb2.STATUS_NOT_STARTED]
    recent.note([scored(took) for took in range(1, 100)], 9.0, 110.0)
    recent.note([scored(None), *(Result(status=status) for status in failures)], 2.0, 110.0)
    found = recent.summary(110.0)
    assert (found.window_ms, found.scored, found.failed) == (10_000, 100, 2)
    assert (found.p50_ms, found.p99_ms) == (50.0, 99.0)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    recent = RecentResults(0.0)
    recent.note([scored(10.0)] * 3, 1.0, 1.0)
    recent.note([scored(20.0)], 1.0, 50.0)
    found = recent.summary(70.0)
    assert (found.window_ms, found.scored, found.p50_ms) == (60_000, 1, 20.0)
    found = recent.summary(200.0)
    assert (found.scored, found.failed, found.p50_ms, found.p99_ms) == (0, 0, 0.0, 0.0)
