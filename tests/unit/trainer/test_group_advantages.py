"""Advantages of trajectories within their group."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.grpo import GRPOAdvEstimatorConfig
from headrace_services.replay import library
from headrace_services.trainer.learning.algorithms.statistics import (
    ROUNDING,
    all_equal,
    baseline_metrics,
    baselines,
    group_advantages,
)
from tests.unit.trainer.advantage_cases import configured

BOTH = pytest.mark.parametrize("leave_one_out", [False, True])

rewards = st.integers(2, 9).flatmap(
    lambda n: st.lists(st.lists(st.floats(-100, 100), min_size=n, max_size=n), min_size=1, max_size=4)
)


@pytest.mark.parametrize(
    ("leave_one_out", "normalize", "expected"),
    [
        (False, True, [1.5, -0.5, -0.5, -0.5]),
        # the winner's own peers are all equal: no deviation to divide by
        (True, True, [1.0, -0.57735, -0.57735, -0.57735]),
        (False, False, [0.75, -0.25, -0.25, -0.25]),
        (True, False, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_one_winner_of_four(leave_one_out: bool, normalize: bool, expected: list[float]) -> None:
    found = group_advantages(np.array([[1.0, 0, 0, 0]]), leave_one_out=leave_one_out, normalize=normalize)
    np.testing.assert_allclose(found, [expected], atol=3e-6)


def test_a_group_of_two_has_no_leave_one_out_deviation() -> None:
    found = group_advantages(np.array([[0.25, 0.75]]), leave_one_out=True, normalize=True)
    np.testing.assert_array_equal(found, [[-0.5, 0.5]])


def test_a_group_of_two_is_normalised_by_its_own_deviation() -> None:
    found = group_advantages(np.array([[0.25, 0.75]]), leave_one_out=False, normalize=True)
    np.testing.assert_allclose(found, [[-(0.5**0.5), 0.5**0.5]], rtol=1e-5)


def test_a_group_of_one_is_its_own_baseline() -> None:
    with np.errstate(invalid="raise"):  # it has no deviation, not one that is no number
        assert group_advantages(np.array([[0.7]]), leave_one_out=False, normalize=True).tolist() == [[0.0]]
    assert [part.tolist() for part in baselines(np.array([[0.7]]), leave_one_out=False)] == [[[0.7]], [[0.0]]]
    with pytest.raises(ValueError, match="no other trajectories"):
        group_advantages(np.array([[0.7]]), leave_one_out=True, normalize=True)


def test_all_values_of_a_group_have_to_be_equal() -> None:
    assert all_equal(np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])).tolist() == [True, False, False]
    # rounding has no advantage either
    assert all_equal(np.array([[0.3, 0.1 + 0.2], [0.3, 0.3001]])).tolist() == [True, False]


def test_dynamic_sampling_and_the_trainer_agree_on_what_is_rounding() -> None:
    (found,) = re.findall(r"ROUNDING = (\S+)", library.built_in().source())
    assert float(found) == ROUNDING


@pytest.mark.parametrize(("leave_one_out", "percentages"), [(False, (25.0, 50.0, 25.0)), (True, (37.5, 62.5, 0.0))])
def test_baselines_of_0_and_of_1_are_counted(leave_one_out: bool, percentages: tuple[float, ...]) -> None:
    config = configured(GRPOAdvEstimatorConfig(), n=2, use_leave_one_out_baseline=leave_one_out)
    whole = 0.7 + 0.2 + 0.1  # less than 1 by rounding
    found = baseline_metrics(config, np.array([0.0, 0.0, whole, 1.0, 1.0, 1.0, 0.0, 1.0]))
    assert found == dict(zip((f"baseline_reward/pct_{one}" for one in ("0", "1", "mixed")), percentages, strict=True))


@BOTH
@given(value=st.floats(-1e6, 1e6), n=st.integers(2, 16))
def test_equal_rewards_have_no_advantage_at_all(leave_one_out: bool, value: float, n: int) -> None:
    found = group_advantages(np.full((2, n), value), leave_one_out=leave_one_out, normalize=True)
    np.testing.assert_array_equal(found, np.zeros((2, n)))


@BOTH
@pytest.mark.parametrize("n", [4, 8, 16])
def test_one_odd_reward_never_makes_an_advantage_of_thousands(leave_one_out: bool, n: int) -> None:
    """`E[x²] - E[x]²` gives 18,610 for n = 16, 1 and fifteen times 0.15."""
    grid = np.arange(0, 1.0001, 0.05)
    a, b = (x.ravel() for x in np.meshgrid(grid, grid))
    groups = np.concatenate([a[:, None], np.repeat(b[:, None], n - 1, axis=1)], axis=1)
    found = group_advantages(groups, leave_one_out=leave_one_out, normalize=True)
    assert np.abs(found).max() <= n**0.5


@BOTH
@pytest.mark.parametrize(
    "alike",
    [[0.1 + 0.2, 0.3, 0.3, 0.3], [float(np.float32(0.1) + np.float32(0.7)), 0.8, 0.8, 0.8], [1e9 + 1e-6, 1e9, 1e9]],
)
def test_rewards_that_differ_by_rounding_are_equal(leave_one_out: bool, alike: list[float]) -> None:
    """Beside an odd one, the first of these made an advantage of 600,000."""
    for rewards in (alike, [*alike, 2 * alike[0]]):
        found = group_advantages(np.array([rewards]), leave_one_out=leave_one_out, normalize=True)
        assert np.abs(found).max() <= max(2 * alike[0], len(rewards) ** 0.5)
    assert np.abs(group_advantages(np.array([alike]), leave_one_out=leave_one_out, normalize=True)).max() < 1e-6


@given(rewards=rewards)
def test_whole_group_advantages_sum_to_zero(rewards: list[list[float]]) -> None:
    found = group_advantages(np.array(rewards), leave_one_out=False, normalize=True)
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-6)


@BOTH
@given(rewards=rewards)
def test_matches_numpy_of_each_trajectory_s_peers(leave_one_out: bool, rewards: list[list[float]]) -> None:
    table = np.array(rewards)
    found = group_advantages(table, leave_one_out=leave_one_out, normalize=True)
    for row, advantages in zip(table, found, strict=True):
        for i, advantage in enumerate(advantages):
            peers = np.delete(row, i) if leave_one_out else row
            std = peers.std(ddof=1) if len(peers) > 1 and len(set(peers)) > 1 else 0.0
            expected = row[i] - (peers[0] if len(set(peers)) == 1 else peers.mean())
            if std > ROUNDING * np.abs(peers).max():
                expected /= std + 1e-6
            np.testing.assert_allclose(advantage, expected, rtol=1e-6, atol=1e-6)


@given(rewards=rewards, seed=st.integers(0, 99))
def test_order_within_a_group_does_not_matter(rewards: list[list[float]], seed: int) -> None:
    table = np.array(rewards)
    order = np.random.default_rng(seed).permutation(table.shape[1])
    found = group_advantages(table, leave_one_out=True, normalize=True)
    np.testing.assert_allclose(
        group_advantages(table[:, order], leave_one_out=True, normalize=True), found[:, order], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("bad", [np.zeros(4), np.zeros((2, 0)), np.array([[0.0, np.nan]]), np.array([[np.inf, 1.0]])])
def test_bad_rewards_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"shape|not finite"):
        group_advantages(bad, leave_one_out=False, normalize=True)
