"""The mean and the spread of a group's rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from headrace.run.group_rewards import mean, spread


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 0.0], (0.5, 0.5)), ([], (None, None)), ([1.0, None], (None, None)), ([3.0], (3.0, 0.0))],
)
def test_mean_and_spread(rewards: Sequence[float | None], expected: tuple[float | None, float | None]) -> None:
    assert (mean(rewards), spread(rewards)) == expected


@pytest.mark.parametrize("count", range(2, 20))
def test_the_spread_is_zero_exactly_where_all_are_equal(count: int) -> None:
    for reward in (0.1, 0.7, 1 / 3):
        assert spread([reward] * count) == 0
        assert spread([*[reward] * count, math.nextafter(reward, 1)]) != 0
