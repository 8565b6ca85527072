"""What is said of trajectories that another reward has scored again."""

from __future__ import annotations

import pytest

from headrace.env.kit.rescoring import Rescored, compare, rewards
from headrace.records.score import Score
from tests.support.buffer import make_group


def rescored(group: int, before: float, after: float | None) -> Rescored:
    score = Score("FAILED", message="no answer") if after is None else Score("SCORED", after)
    return Rescored(make_group(group), None, before, score)


def test_rewards_are_compared_over_the_groups_that_were_scored_whole() -> None:
    found = compare(
        [
            *(rescored(1, before, after) for before, after in ((0, 0), (1, 0))),
            *(rescored(2, before, after) for before, after in ((1, 1), (1, 0.1 + 0.2))),
            *(rescored(3, before, after) for before, after in ((5, None), (5, 9))),
        ]
    )
    assert (found.groups, found.trajectories, found.differing) == (2, 6, 3)
    assert found.failures == {"FAILED: no answer": 1}
    assert found.before is not None
    assert found.after is not None
    assert (found.before.mean, found.before.flat) == (0.75, 0.5)
    assert (found.after.mean, found.after.flat) == (pytest.approx(0.325), 0.5)
    assert found.before.spread == pytest.approx(0.25)


def test_a_difference_is_more_than_rounding_and_a_failure_is_none() -> None:
    assert not rescored(1, 0.3, 0.1 + 0.2).differs
    assert rescored(1, 0.3, 0.31).differs
    assert not rescored(1, 0.3, None).differs
    assert rescored(1, 0.3, None).change == 0


def test_of_no_group_nothing_is_said() -> None:
    assert rewards([]) is None
    found = compare([rescored(1, 1.0, None)])
    assert (found.groups, found.before, found.after) == (0, None, None)
