"""Trajectories as a step sees them, and how a batch is split over mini-batches, whichever rank has which."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_cases import group, reservation
from services.trainer.control.shares import assign
from services.trainer.learning.experience import (
    Experience,
    Trace,
    experience_of,
    mini_batches,
    problem_with,
)
from services.trainer.network.rows import TokenSequence

from headrace.trajectory import Score, Span, Trajectory

TRAJECTORY = Trajectory(
    group_id="g",
    attempt=1,
    index=3,
    prompt_token_ids=np.array([1, 2], np.int32),
    completion_token_ids=np.array([3, 4, 5, 6, 7], np.int32),
    logprobs=-np.arange(1, 6, dtype=np.float32),
    loss_mask=np.array([1, 0, 1, 1, 1], np.uint8),
    spans=(Span(2, 0, 2), Span(3, 2, 3), Span(5, 3, 5)),
    finish_reason="length",
    text="",
    replica="r",
)
SCORE = Score("SCORED", 0.5, components={"form": 1.0}, environment="math")


def of(step: int = 5, max_age: int = 9) -> Experience:
    return experience_of(TRAJECTORY, SCORE, group=1, place=7, step=step, max_age=max_age, multiplier=2.0)


def test_what_the_environment_wrote_is_nowhere() -> None:
    found = of()
    assert found.gen.tolist() == [-1, -3, -4, -5]
    assert found.behind.tolist() == [3, 2, 0, 0]
    assert found.tokens.policy_tokens == 4
    assert (found.reward, found.components, found.environment) == (0.5, {"form": 1.0}, "math")
    assert found.truncated
    assert found.name == "trajectory 'g'[3]"


@pytest.mark.parametrize(
    ("max_age", "expected"), [(3, [1, 1, 1, 1]), (2, [0, 1, 1, 1]), (1, [0, 0, 1, 1]), (0, [0, 0, 1, 1])]
)
def test_law_2_tokens_over_age_do_not_count(max_age: int, expected: list[int]) -> None:
    found = of(max_age=max_age)
    assert found.mask.tolist() == [bool(x) for x in expected]
    assert found.tokens.policy_tokens == 4  # they stay in what is computed over the whole sequence


GOOD = of()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gen": np.array([-1, np.nan, -1, -1], np.float32)}, "behaviour log-probability is not finite"),
        ({"gen": np.array([-1], np.float32)}, "gen has 1 entries for 4"),
        ({"mask": np.array([True])}, "mask has 1 entries for 4"),
        ({"reward": float("inf")}, "its reward is inf"),
        ({"multiplier": -1.0}, "multiplier is -1"),
        (
            {"tokens": TokenSequence(np.array([], np.int32), np.ones(5, np.int32), TRAJECTORY.loss_mask)},
            "prompt of 0 and a completion of 5",
        ),
        (
            {"tokens": TokenSequence(np.array([1], np.int32), np.ones(3, np.int32), TRAJECTORY.loss_mask)},
            "loss_mask has 5 entries for 3",
        ),
        ({"tokens": TokenSequence(np.array([20], np.int32), np.ones(5, np.int32), TRAJECTORY.loss_mask)}, "of 20"),
    ],
    ids=["nan", "short", "mask", "reward", "multiplier", "prompt", "loss mask", "vocabulary"],
)
def test_problems_are_named(change: dict[str, Any], says: str) -> None:
    assert problem_with(GOOD, 20, 7) is None
    assert says in (problem_with(dataclasses.replace(GOOD, **change), 20, 7) or "")
    assert "7 tokens, more than policy.max_total_sequence_length 6" in (problem_with(GOOD, 20, 6) or "")


def test_the_advantage_of_a_trajectory_is_the_mean_over_its_tokens() -> None:
    def mean(advantages: list[float]) -> float:
        return Trace(GOOD, 0.5, 2.0, np.array(advantages)).mean_advantage

    assert mean([0.1] * 7) == 0.1  # to the last bit where all are the same
    assert mean([1.0, -2.0, 4.0]) == pytest.approx(1.0)
    assert mean([]) == 0


@given(sizes=st.tuples(st.integers(1, 6), st.integers(1, 5)), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_an_optimizer_step_has_the_same_trajectories_for_any_number_of_ranks(
    sizes: tuple[int, int], ranks: int, seed: int
) -> None:
    size, count = sizes
    groups, per_group = size * count, 2
    lengths = np.random.default_rng(seed).integers(1, 50, groups * per_group).tolist()
    made = [group(f"g{place}") for place in range(groups)]
    shares = assign(reservation(*(one.id for one in made), lengths=lengths), made, ranks, size * per_group)
    places = [a.place for share in shares for a in share]
    assert sorted(places) == list(range(groups * per_group))
    for share in shares:
        assert all(made[a.group].id == a.group_id and a.place // per_group == a.group for a in share)
    own = [[dataclasses.replace(GOOD, place=a.place) for a in share] for share in shares]
    chosen = [mini_batches(batch, size * per_group, groups * per_group) for batch in own]
    for step in range(count):
        found = sorted(own[rank][i].place for rank in range(ranks) for i in chosen[rank][step])
        assert found == list(range(step * size * per_group, (step + 1) * size * per_group))
        counts = [len(chosen[rank][step]) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1
