"""Which replica a call goes to, and how an episode ends."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.records.score import Score
from headrace_services.agents.decisions import Finish, Outcome, choose, finish
from tests.support.gateways import replica

SCORED = Score("SCORED", 1.0, build="b")
FAILED = Score("FAILED", message="it raised")


@pytest.mark.parametrize(
    ("replicas", "parent", "refused", "chosen"),
    [
        ([replica("a"), replica("b")], None, set(), "b"),
        ([replica("a"), replica("b")], "a", set(), "a"),
        ([replica("a"), replica("b")], "a", {"a"}, "b"),
        ([replica("a"), replica("b")], "gone", set(), "b"),
        ([replica("a", state="STALE")], "a", set(), None),
        ([replica("b", version=2), replica("a", version=4)], None, set(), "a"),
        ([], None, set(), None),
    ],
)
def test_a_call_goes_to_its_parents_replica_or_to_the_least_loaded(
    replicas: Any, parent: Any, refused: Any, chosen: Any
) -> None:
    assert choose(replicas, {"a": 5, "b": 2}, 3, parent, refused) == chosen


def outcome(**changes: Any) -> Outcome:
    return Outcome(
        **({"score": SCORED, "hung": None, "limit": None, "refused": False, "trained": 2, "paths": 1} | changes)
    )


def status(result: Finish) -> str:
    return "graded" if result.score is None else result.score.status


@pytest.mark.parametrize(
    ("ended", "settings", "expected", "with_trajectory"),
    [
        ({}, {}, "SCORED", True),
        ({"score": FAILED}, {}, "FAILED", False),
        ({"score": Score("INVALID", message="no such game")}, {}, "INVALID", False),
        ({"score": Score("NOT_STARTED", message="no room")}, {"graded": True}, "NOT_STARTED", False),
        ({"score": None}, {}, "FAILED", False),
        ({"score": None}, {"graded": True}, "graded", True),
        ({}, {"graded": True}, "graded", True),
        ({"score": FAILED}, {"graded": True}, "FAILED", False),
        ({"score": None, "hung": "agents.think_s"}, {}, "TIMED_OUT", False),
        ({"score": None, "hung": "agents.think_s"}, {"graded": True}, "TIMED_OUT", False),
        ({"trained": 0}, {}, "FAILED", False),
        ({"trained": 0, "score": None}, {"graded": True}, "FAILED", False),
        ({"paths": 2}, {}, "SCORED", True),
        ({"paths": 2}, {"branches": "refuse"}, "FAILED", False),
        ({"paths": 1}, {"branches": "refuse"}, "SCORED", True),
        # a limit of the run
        ({"limit": "calls", "refused": True}, {}, "SCORED", True),
        ({"limit": "calls", "refused": True, "score": FAILED}, {}, "FAILED", False),
        ({"limit": "calls", "refused": True, "score": FAILED}, {"graded": True}, "graded", True),
        ({"limit": "calls", "refused": True, "score": None, "hung": "agents.finish_s"}, {}, "TIMED_OUT", False),
        (
            {"limit": "calls", "refused": True, "score": None, "hung": "agents.finish_s"},
            {"graded": True},
            "graded",
            True,
        ),
        ({"limit": "calls", "refused": True}, {"on_limit": "fail"}, "FAILED", False),
        ({}, {"on_limit": "fail"}, "SCORED", True),
        (
            {"limit": "calls", "refused": True, "score": None, "hung": "agents.finish_s"},
            {"on_limit": -1.0},
            "SCORED",
            True,
        ),
        ({"limit": "calls", "refused": True, "trained": 0}, {"on_limit": -1.0}, "FAILED", False),
        (
            {"limit": "calls", "refused": True, "score": Score("INTERRUPTED", message="lost")},
            {"graded": True},
            "INTERRUPTED",
            False,
        ),
        (
            {"limit": "calls", "refused": True, "score": Score("INTERRUPTED", message="lost")},
            {"on_limit": 0.5},
            "INTERRUPTED",
            False,
        ),
        # an answer that was cut off, and no refusal
        ({"limit": "cut off"}, {"graded": True}, "graded", True),
        ({"limit": "cut off"}, {"on_limit": "fail"}, "FAILED", False),
        ({"limit": "cut off"}, {"on_limit": 0.5}, "SCORED", True),
        ({"limit": "cut off", "score": FAILED}, {"graded": True}, "FAILED", False),
        ({"limit": "cut off", "score": FAILED}, {"on_limit": 0.5}, "FAILED", False),
        ({"limit": "cut off", "score": None, "hung": "agents.think_s"}, {"graded": True}, "TIMED_OUT", False),
    ],
)
def test_how_an_episode_ends(ended: Any, settings: Any, expected: str, with_trajectory: bool) -> None:
    chosen = {"on_limit": "grade", "branches": "allow", "graded": False} | settings
    result = finish(outcome(**ended), **chosen)
    assert (status(result), result.with_trajectory) == (expected, with_trajectory)
    if chosen["on_limit"] in (-1.0, 0.5) and expected == "SCORED":
        assert result.score.reward == chosen["on_limit"]


def test_what_hung_names_its_clock() -> None:
    result = finish(
        outcome(score=None, hung="no call for 5 s (agents.think_s)"), on_limit="grade", branches="allow", graded=False
    )
    assert "agents.think_s" in result.score.message
