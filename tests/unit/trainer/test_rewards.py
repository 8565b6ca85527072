"""Rewards on their way from the environment to the estimators: scaled, then shaped by length."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services.trainer.learning.advantages import (
    AllRanks,
    Settings,
    components_of,
    leave_out_truncated,
    mask_logprob_errors,
    reward_metrics,
    scale_rewards,
    shape_rewards,
)
from services.trainer.learning.tokens import Episode, Float64

from headrace.config.advantages import AdvEstimator, RewardScaling, RewardShaping
from headrace.config.loss import LossFn
from headrace.errors import ServiceError
from tests.unit.trainer.advantage_cases import Alone, Batch, batches, episode, on_ranks

NONE = np.zeros(1, dtype=bool)
TO_1 = RewardScaling(enabled=True, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)


def test_rewards_are_scaled_as_nemo_rl_does() -> None:
    found = scale_rewards(np.array([[-5.0, 0.0], [0.5, 2.0], [1.0, 7.0]]), TO_1)
    np.testing.assert_allclose(found, [[-1.0, -1.0], [-0.5, 1.0], [0.0, 1.0]])


def test_rewards_stay_as_they_are_unless_scaling_is_turned_on() -> None:
    rewards = np.array([[-5.0, 7.0]])
    assert scale_rewards(rewards, RewardScaling(source_max=2.0)) is rewards


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (99, 0.95), (100, 1.0), (130, 1.0)],
)
def test_the_overlong_penalty_grows_over_the_buffer_and_is_floored(length: int, penalty: float) -> None:
    """Without a floor a completion of 130 tokens would lose 2.5."""
    shaping = RewardShaping(enabled=True, overlong_buffer_length=20)
    found = shape_rewards(np.array([0.25]), np.array([length]), ~NONE, shaping, 100)
    np.testing.assert_allclose(found, [0.25 - penalty])


@settings(max_examples=40)
@given(
    length=st.integers(0, 300),
    longest=st.integers(1, 200),
    buffer=st.integers(1, 200),
    penalty=st.floats(0, 5),
    reward=st.floats(-3, 3),
)
def test_the_overlong_penalty_is_dapo_s(length: int, longest: int, buffer: int, penalty: float, reward: float) -> None:
    shaping = RewardShaping(enabled=True, overlong_buffer_length=buffer, overlong_buffer_penalty=penalty)
    if length <= longest - buffer:
        punishment = 0.0
    elif length <= longest:
        punishment = ((longest - buffer) - length) / buffer
    else:
        punishment = -1.0
    found = shape_rewards(np.array([reward]), np.array([length]), NONE, shaping, longest)
    np.testing.assert_allclose(found, [reward + penalty * punishment], atol=1e-12)


def test_stopping_properly_takes_the_place_of_the_overlong_buffer() -> None:
    shaping = RewardShaping(enabled=True, overlong_buffer_length=20, stop_properly_penalty_coef=0.25)
    truncated = np.array([True, False, True])
    found = shape_rewards(np.array([1.0, 1.0, -2.0]), np.array([130, 130, 1]), truncated, shaping, 100)
    np.testing.assert_array_equal(found, [0.25, 1.0, -0.5])


def test_rewards_stay_as_they_are_unless_shaping_is_turned_on() -> None:
    rewards = np.array([1.0])
    shaping = RewardShaping(stop_properly_penalty_coef=0.0)
    assert shape_rewards(rewards, np.array([999]), ~NONE, shaping, 10) is rewards


def test_truncated_completions_leave_the_loss_only_where_that_is_asked_for() -> None:
    multipliers, truncated = np.array([1.0, 0.5, 0.0]), np.array([True, False, False])
    np.testing.assert_array_equal(leave_out_truncated(multipliers, truncated, True), [0.0, 0.5, 0.0])
    np.testing.assert_array_equal(leave_out_truncated(multipliers, truncated, False), multipliers)


def test_a_truncated_completion_stays_in_the_baseline_of_the_others() -> None:
    rewards, out = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]
    kept = Batch(tuple(episode(i, 4, reward=r) for i, r in enumerate(rewards)), 4)
    filtered = Batch(tuple(dataclasses.replace(e, multiplier=m) for e, m in zip(kept.episodes, out, strict=True)), 4)
    found = [b.estimates(Settings(AdvEstimator()), LossFn()).advantages for b in (kept, filtered)]
    np.testing.assert_array_equal(found[0], found[1])


def test_components_are_scaled_and_ordered_by_name() -> None:
    scores = [{"format": 2.0, "correct": 0.0}, {"correct": 1.0, "format": -9.0}]
    found = components_of(scores, ["math", "math"], [1.0, 2.0], TO_1)
    assert list(found) == ["correct", "format"]
    np.testing.assert_allclose(found["correct"], [-1.0, 0.0])
    np.testing.assert_allclose(found["format"], [1.0, -1.0])


@pytest.mark.parametrize(
    ("scores", "weights", "words"),
    [
        ([{}, {}], None, "environment 'math' scored with reward components none: gdpo weighs two or more"),
        ([{"a": 1.0}, {"a": 0.0}], None, "environment 'math' scored with reward components a: gdpo"),
        (
            [{"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0}],
            None,
            "environment 'code' scored with reward components a, c, environment 'math' with a, b",
        ),
        (
            [{"a": 1.0, "b": 0.0}] * 2,
            [1.0],
            "reward_weights has 1 entries, and environment 'math' scored with 2 .*: a, b;",
        ),
    ],
    ids=["none", "one", "different", "weights"],
)
def test_components_that_gdpo_cannot_weigh_are_an_error_that_names_the_environment(
    scores: list[dict[str, float]], weights: list[float] | None, words: str
) -> None:
    with pytest.raises(ServiceError, match=words):
        components_of(scores, ["math", "code"], weights, TO_1)


def test_rewards_are_measured_as_they_are_trained_on_and_before_shaping() -> None:
    before, after = np.array([1.0, 0.0]), np.array([0.5, 0.0])
    assert reward_metrics(before, before, RewardShaping()) == {"reward": 0.5}
    assert reward_metrics(before, after, RewardShaping(enabled=True)) == {"reward": 0.25, "unshaped_total_reward": 0.5}


def _errors(episodes: tuple[Episode, ...], gen: list[Float64]) -> list[float]:
    return [
        float(np.mean([np.exp(abs(g - s)) for g, s in zip(gs, e.start, strict=True)])) if e.length else 1.0
        for e, gs in zip(episodes, gen, strict=True)
    ]


@settings(max_examples=60)
@given(
    batch=batches(),
    threshold=st.sampled_from([None, 1.0, 1.5, 3.0]),
    far=st.sampled_from([0.0, 0.5, 2.0, 80.0]),
    data=st.data(),
)
def test_sequences_whose_mean_error_is_above_the_threshold_leave_the_loss(
    batch: Batch, threshold: float | None, far: float, data: st.DataObject
) -> None:
    episodes = batch.episodes
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    gen = [e.start + rng.uniform(-far, far) * rng.random(e.length) for e in episodes]
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(episodes), max_size=len(episodes)))

    def of_rank(rank: int, ranks: AllRanks) -> tuple[Float64, dict[str, float]]:
        mine = [i for i, owner in enumerate(owners) if owner == rank]
        return mask_logprob_errors(threshold, [episodes[i] for i in mine], [gen[i] for i in mine], len(episodes), ranks)

    both = on_ranks(of_rank, 2)
    found = np.zeros(len(episodes))
    for rank, (multipliers, _) in enumerate(both):
        found[[i for i, owner in enumerate(owners) if owner == rank]] = multipliers
    metrics = both[0][1]
    assert metrics == both[1][1]

    errors = _errors(episodes, gen)
    valid = [i for i, e in enumerate(episodes) if e.length and e.multiplier > 0]
    masked = [i for i in valid if threshold is not None and errors[i] > threshold]
    kept = [i for i in valid if i not in masked]
    np.testing.assert_array_equal(found, [0.0 if i in masked else e.multiplier for i, e in enumerate(episodes)])
    expected = {
        "num_masked_seqs_by_logprob_error": len(masked),
        "masked_correct_pct": float(np.mean([episodes[i].reward == 1 for i in masked])) if masked else 0.0,
    }
    for suffix, group in (("", valid), ("_after_mask", kept)):
        of_group = [errors[i] for i in group] or [0.0]
        expected[f"max_seq_mult_prob_error{suffix}"] = max(of_group)
        expected[f"mean_seq_mult_prob_error{suffix}"] = float(np.mean(of_group))
        expected[f"min_seq_mult_prob_error{suffix}"] = min(of_group)
    assert metrics == pytest.approx(expected)


def test_a_sequence_whose_log_probabilities_are_not_numbers_leaves_the_loss() -> None:
    episodes = [episode(0, start=np.array([0.0, np.nan, 0.0])), episode(1, start=np.zeros(3))]
    found, metrics = mask_logprob_errors(2.0, episodes, [np.zeros(3), np.zeros(3)], 2, Alone())
    np.testing.assert_array_equal(found, [0.0, 1.0])
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["max_seq_mult_prob_error_after_mask"] == 1.0
