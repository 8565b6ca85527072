"""Rewards on their way from the environment to the estimators: scaled, then shaped by length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ServiceError
from headrace.config.algorithm import RewardScalingConfig, RewardShapingConfig
from headrace.config.grpo import GRPOAdvEstimatorConfig
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.learning.algorithms.gdpo import reject_odd_ones, scaled_components
from headrace_services.trainer.learning.batch import Batch, BatchRejected
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.rewards import (
    mask_by_logprob_error,
    mask_truncated,
    scale_rewards,
    shape_rewards,
)
from headrace_services.trainer.learning.step import train_step
from tests.support.trainer import batch, on_ranks
from tests.unit.trainer.advantage_cases import batches, by_trajectory, configured, estimates, made, of_length

NONE = np.zeros(1, dtype=bool)
TO_1 = RewardScalingConfig(enabled=True, source_min=1.0, source_max=3.0, target_min=-1.0, target_max=1.0)


def test_rewards_are_scaled_as_nemo_rl_does() -> None:
    found = scale_rewards(np.array([[-5.0, 1.0], [1.5, 3.0], [2.0, 7.0]]), TO_1)
    np.testing.assert_allclose(found, [[-1.0, -1.0], [-0.5, 1.0], [0.0, 1.0]])


def test_rewards_stay_as_they_are_unless_scaling_is_turned_on() -> None:
    rewards = np.array([[-5.0, 7.0]])
    assert scale_rewards(rewards, RewardScalingConfig(source_max=2.0)) is rewards


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (99, 0.95), (100, 1.0), (130, 1.0)]
)
def test_the_overlong_penalty_grows_over_the_buffer_and_is_floored(length: int, penalty: float) -> None:
    """Without a floor a completion of 130 tokens would lose 2.5."""
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=20)
    found = shape_rewards(np.array([0.25]), np.array([length]), ~NONE, shaping, 100)
    np.testing.assert_allclose(found, [0.25 - penalty])


@given(
    length=st.integers(0, 300),
    longest=st.integers(1, 200),
    buffer=st.integers(1, 200),
    penalty=st.floats(0, 5),
    reward=st.floats(-3, 3),
)
def test_the_overlong_penalty_is_dapo_s(length: int, longest: int, buffer: int, penalty: float, reward: float) -> None:
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=buffer, overlong_buffer_penalty=penalty)
    if length <= longest - buffer:
        punishment = 0.0
    elif length <= longest:
        punishment = ((longest - buffer) - length) / buffer
    else:
        punishment = -1.0
    found = shape_rewards(np.array([reward]), np.array([length]), NONE, shaping, longest)
    np.testing.assert_allclose(found, [reward + penalty * punishment], atol=1e-12)


def test_stopping_properly_takes_the_place_of_the_overlong_buffer() -> None:
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=20, stop_properly_penalty_coef=0.25)
    truncated = np.array([True, False, True])
    found = shape_rewards(np.array([1.0, 1.0, -2.0]), np.array([130, 130, 1]), truncated, shaping, 100)
    np.testing.assert_array_equal(found, [0.25, 1.0, -0.5])


def test_rewards_stay_as_they_are_unless_shaping_is_turned_on() -> None:
    rewards = np.array([1.0])
    shaping = RewardShapingConfig(stop_properly_penalty_coef=0.0)
    assert shape_rewards(rewards, np.array([999]), ~NONE, shaping, 10) is rewards


def test_truncated_completions_leave_the_loss_only_on_request() -> None:
    multipliers, truncated = np.array([1.0, 0.5, 0.0]), np.array([True, False, False])
    np.testing.assert_array_equal(mask_truncated(multipliers, truncated, True), [0.0, 0.5, 0.0])
    np.testing.assert_array_equal(mask_truncated(multipliers, truncated, False), multipliers)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ({}, {"reward": 0.5}),
        ({"enabled": True, "stop_properly_penalty_coef": 0.5}, {"reward": 0.25, "unshaped_total_reward": 0.5}),
    ],
    ids=["scaled", "shaped"],
)
def test_rewards_are_measured_as_trained_and_before_shaping(
    tiny_model: Path, shaping: dict[str, object], expected: dict[str, float]
) -> None:
    config = configured(
        GRPOAdvEstimatorConfig(),
        n=2,
        reward_scaling={"enabled": True, "source_max": 2.0},
        reward_shaping=shaping,
        policy={"model_name": str(tiny_model), "max_total_sequence_length": 8},
    )
    whole = batch([of_length(3, place, 2, finish_reason="length") for place in range(2)], [2.0, 0.0])
    metrics = train_step(Learner(config), whole)
    assert {name: metrics[name] for name in metrics if name.endswith("reward")} == expected
    assert whole.rewards.sum() == 2 * expected["reward"]


def test_a_truncated_completion_stays_in_the_baseline_of_the_others() -> None:
    rewards, out = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]
    config = configured(GRPOAdvEstimatorConfig(), n=4)
    found = [estimates(made(rewards, 4, multipliers=of_batch), config).advantages for of_batch in (None, out)]
    np.testing.assert_array_equal(found[0], found[1])


def test_components_are_scaled_and_ordered_by_name() -> None:
    scores = [{"format": 3.0, "correct": 1.0}, {"correct": 2.0, "format": -9.0}]
    found = scaled_components(scores, ["math", "math"], [1.0, 2.0], TO_1)
    assert list(found) == ["correct", "format"]
    np.testing.assert_allclose(found["correct"], [-1.0, 0.0])
    np.testing.assert_allclose(found["format"], [1.0, -1.0])


@pytest.mark.parametrize(
    ("scores", "weights", "words"),
    [
        ([{}, {}], None, "'math' scored with reward components none"),
        ([{"a": 1.0}, {"a": 0.0}], None, "'math' scored with reward components a,"),
        ([{"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0}], None, "'code' scored with reward components a, c"),
        ([{"a": 1.0, "b": 0.0}] * 2, [1.0], "reward_weights has 1 entries"),
    ],
    ids=["none", "one", "different", "weights"],
)
def test_components_that_gdpo_cant_weigh_name_their_environment(
    scores: list[dict[str, float]], weights: list[float] | None, words: str
) -> None:
    with pytest.raises(ServiceError, match=words):
        scaled_components(scores, ["math", "code"], weights, TO_1)


def test_a_group_with_odd_components_is_rejected_and_the_run_goes_on() -> None:
    usual = {"a": 1.0, "b": 0.0}
    reject_odd_ones([(usual, "math", "g0"), (usual, "math", "g1"), ({"x": 0.0, "y": 1.0}, "code", "g2")])
    with pytest.raises(BatchRejected, match=r"'g1'.*components a,.*'math'.*a, b") as caught:
        reject_odd_ones(
            [(usual, "math", "g0"), (usual, "math", "g0"), ({"a": 1.0}, "math", "g1"), (usual, "math", "g1")]
        )
    assert set(caught.value.groups) == {"g1"}


def mean_errors(batch: Batch) -> list[float]:
    assert batch.old_logprobs is not None
    rollout, old = (by_trajectory(batch, x.astype(np.float64)) for x in (batch.rollout_logprobs, batch.old_logprobs))
    return [
        float(np.mean([np.exp(abs(g - s)) for g, s in zip(gs, ss, strict=True)])) if gs.size else 1.0
        for gs, ss in zip(rollout, old, strict=True)
    ]


@settings(max_examples=60)
@given(
    batch=batches(),
    threshold=st.sampled_from([None, 1.0, 1.5, 3.0]),
    far=st.sampled_from([0.0, 0.5, 2.0, 80.0]),
    data=st.data(),
)
def test_trajectories_of_too_large_a_mean_error_leave_the_loss(
    batch: Batch, threshold: float | None, far: float, data: st.DataObject
) -> None:
    size = len(batch)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    assert batch.old_logprobs is not None
    apart = rng.uniform(-far, far, size)[batch.trajectory] * rng.random(batch.trajectory.size)
    batch.rollout_logprobs = (batch.old_logprobs + apart).astype(np.float32)
    owners = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))

    def of_rank(ranks: Ranks) -> tuple[Batch, dict[str, float]]:
        mine = batch.take([i for i, owner in enumerate(owners) if owner == ranks.rank])
        return mine, mask_by_logprob_error(mine, threshold, ranks)

    both = on_ranks(of_rank, 2)
    found = np.zeros(size)
    for share, _ in both:
        found[share.places] = share.multipliers
    metrics = both[0][1]
    assert metrics == both[1][1]

    errors, rewards = mean_errors(batch), [score.reward for score in batch.scores]
    valid = [i for i, t in enumerate(batch.trajectories) if t.loss_mask.any() and batch.multipliers[i] > 0]
    masked = [i for i in valid if threshold is not None and errors[i] > threshold]
    kept = [i for i in valid if i not in masked]
    np.testing.assert_array_equal(found, [0.0 if i in masked else w for i, w in enumerate(batch.multipliers)])
    expected = {
        "num_masked_seqs_by_logprob_error": len(masked),
        "masked_correct_pct": float(np.mean([rewards[i] == 1 for i in masked])) if masked else 0.0,
    }
    for suffix, group in (("", valid), ("_after_mask", kept)):
        of_group = [errors[i] for i in group] or [0.0]
        expected[f"max_seq_mult_prob_error{suffix}"] = max(of_group)
        expected[f"mean_seq_mult_prob_error{suffix}"] = float(np.mean(of_group))
        expected[f"min_seq_mult_prob_error{suffix}"] = min(of_group)
    assert metrics == pytest.approx(expected)


def test_a_trajectory_with_log_probabilities_not_numbers_is_left_out() -> None:
    batch = made([0.0, 0.0], old_logprobs=[0.0, np.nan, 0.0, 0.0, 0.0, 0.0])
    batch.rollout_logprobs = np.zeros(6, np.float32)
    metrics = mask_by_logprob_error(batch, 2.0, Ranks())
    np.testing.assert_array_equal(batch.multipliers, [0.0, 1.0])
    assert metrics["num_masked_seqs_by_logprob_error"] == 1
    assert metrics["max_seq_mult_prob_error_after_mask"] == 1.0


def test_a_trajectory_whose_mean_error_is_the_threshold_stays() -> None:
    batch = made([0.0], old_logprobs=-np.ones(3))
    mask_by_logprob_error(batch, 1.0, Ranks())
    np.testing.assert_array_equal(batch.multipliers, [1.0])


def test_a_reward_of_1_but_for_rounding_is_a_correct_one() -> None:
    """0.7 + 0.2 + 0.1 is less than 1. One near 1 is not it, nor is more."""
    batch = made([0.7 + 0.2 + 0.1, 1.0, 0.999, 2.0], old_logprobs=-np.ones(12))
    batch.rollout_logprobs = np.zeros(12, np.float32)
    assert mask_by_logprob_error(batch, 1.5, Ranks())["masked_correct_pct"] == 0.5


def test_a_token_outside_top_k_or_top_p_is_no_disagreement() -> None:
    batch = made([0.0], old_logprobs=[-1.0, -np.inf, -1.0])
    metrics = mask_by_logprob_error(batch, 1.5, Ranks())
    np.testing.assert_array_equal(batch.multipliers, [1.0])
    assert metrics["max_seq_mult_prob_error"] == 1.0
