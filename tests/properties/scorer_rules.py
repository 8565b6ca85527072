"""What scorers do."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from headrace.records.score import Score, Status
from headrace.replay import ScoringJob
from tests.properties.caller import Caller, deliveries, new_each_time

FAILURES: tuple[Status, ...] = ("FAILED", "TIMED_OUT", "INVALID", "INTERRUPTED", "NOT_STARTED", "UNSENDABLE")
statuses: st.SearchStrategy[Status] = st.sampled_from(("SCORED",) * 9 + FAILURES)
rewards = st.sampled_from([1.0, 0.0, 0.5, 0.1 + 0.4 - 1e-9, 2.0, -1.0])
builds = st.sampled_from(("first",) * 4 + ("second",))
Said = tuple[Status, float, str]
said = st.tuples(statuses, rewards, builds)


class ScorerRules(Caller):
    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[ScoringJob] = []

    @rule(most=st.sampled_from([1, 2, 3, 8]), how=new_each_time)
    def take_scoring(self, most: int, how: str) -> None:
        self.jobs += self.call("take_scoring", dict.fromkeys(self.all_environments, most), how=how) or []

    @precondition(lambda self: self.jobs)
    @rule(said=st.lists(said, min_size=1, max_size=6), skip=st.integers(0, 3), how=deliveries)
    def score(self, said: Sequence[Said], skip: int, how: str) -> None:
        """Some of the newest, together; whether a trajectory was scored or failed is said of each."""
        jobs = self.jobs[: len(self.jobs) - skip][-len(said) :]
        scores = [
            Score("SCORED", reward, build=build) if status == "SCORED" else Score(status, message="no")
            for status, reward, build in said
        ]
        if jobs:
            self.call("score_many", list(zip(jobs, scores, strict=False)), how=how)

    @precondition(lambda self: self.jobs)
    @rule(newest=st.integers(1, 6), how=deliveries)
    def renew_scoring(self, newest: int, how: str) -> None:
        self.call("renew_scoring", self.jobs[-newest:], how=how)

    @rule(how=deliveries)
    def release_scoring(self, how: str) -> None:
        self.call("release_scoring", how=how)
