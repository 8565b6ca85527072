"""What reaches the loss, on a real model: rewards scaled and shaped, trajectories left out, advantages by each estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.records.score import LARGEST_REWARD
from headrace.records.trajectory import Span
from headrace_services.trainer.learning.batch import Batch
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.telemetry import alarm
from tests.integration.trainer.learner_cases import config, sampled
from tests.support.trainer import batch

GROUPS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "use_leave_one_out_baseline": False}


REWARDS = [float(i) for i in range(8)]


def two_groups(cut_off: Sequence[bool] = (False,) * 8, components: Sequence[dict[str, float]] | None = None) -> Batch:
    """Two groups of four; rewards 0 to 7."""
    trajectories = [
        msgspec.structs.replace(one, group_id=f"g{i // 4}", index=i % 4, finish_reason="length" if cut else "stop")
        for i, (one, cut) in enumerate(zip(sampled(8)[0], cut_off, strict=True))
    ]
    return batch(trajectories, REWARDS, components=components, environment="math")


def with_tokens(given: Batch) -> list[float]:
    """The mean advantages of trajectories that have a policy token."""
    return [mean for mean, length in zip(given.mean_advantages(), given.lengths, strict=True) if length]


def test_rewards_are_scaled_then_shaped_and_cut_offs_leave_the_loss(tiny_model: Path) -> None:
    shaping = {"enabled": True, "stop_properly_penalty_coef": 0.5}
    scaling = {"enabled": True, "source_max": 8.0, "target_max": 16.0}
    keys = {"reward_scaling": scaling, "reward_shaping": shaping, "overlong_filtering": True}
    cut_off = [False, True, False, False, True, False, False, False]
    learner = Learner(config(tiny_model, grpo={**GROUPS, **keys}))
    given = two_groups(cut_off)
    metrics = train_step(learner, given)
    shaped = [0.0, 1.0, 4.0, 6.0, 4.0, 10.0, 12.0, 14.0]
    np.testing.assert_allclose(given.rewards, shaped)
    np.testing.assert_array_equal(given.multipliers, [0.0 if t else 1.0 for t in cut_off])
    # those that left the loss are in the baselines, 2.75 and 10
    groups = np.array(shaped).reshape(2, 4)
    expected = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(with_tokens(given), expected.ravel())
    assert (metrics["reward"], metrics["unshaped_total_reward"]) == (np.mean(shaped), 7.0)
    assert metrics["num_valid_samples"] == 6


def test_gdpo_trains_on_components_and_names_who_gives_none(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model, grpo={**GROUPS, "adv_estimator": {"name": "gdpo"}}))
    with pytest.raises(ServiceError, match=r"'math'.*none.*gdpo"):
        train_step(learner, two_groups())
    components = [{"format": float(i % 2), "correct": float(i // 2 % 2)} for i in range(8)]
    given = two_groups(components=components)
    metrics = train_step(learner, given)
    assert metrics["groups_without_spread"] == 0.0
    # rewards differ, components don't
    equal = train_step(learner, two_groups(components=[{"format": 1.0, "correct": float(i // 4)} for i in range(8)]))
    assert (equal["groups_without_spread"], equal["reward_std"]) == (1.0, np.std(REWARDS))
    # each component is 0, 0, 1, 1 in some order in each group: ±0.5 / 0.577, and over the batch the sum is normalised
    total = np.array([c["format"] + c["correct"] - 1 for c in components])
    np.testing.assert_allclose(given.mean_advantages(), total / total.std(ddof=1), atol=1e-6)


def test_the_spread_of_rewards_is_measured_after_scaling(tiny_model: Path) -> None:
    scaling = {"enabled": True, "source_min": 4.0, "source_max": 6.0}  # the first group's rewards all become 0
    metrics = train_step(Learner(config(tiny_model, grpo={**GROUPS, "reward_scaling": scaling})), two_groups())
    assert metrics["groups_without_spread"] == 0.5
    assert metrics["reward_std"] == np.std([0, 0, 0, 0, 0, 0.5, 1, 1])


def test_the_alarm_is_raised_by_wrong_log_probabilities_alone(tiny_model: Path) -> None:
    settings = config(tiny_model, grpo=GROUPS)
    limits = alarm.alarm_limits(settings)
    first = two_groups()
    train_step(Learner(settings), first)
    assert first.old_logprobs is not None
    own = first.split(first.old_logprobs)

    def sampled_with(error: float, version: int) -> dict[str, float]:
        """The metrics of step 1 on what version `version` is said to have sampled, with log-probabilities `error` nats too low."""
        trajectories = []
        for one, logprobs in zip(first.trajectories, own, strict=True):
            written = one.logprobs.copy()
            written[one.loss_mask != 0] = logprobs - error
            spans = (Span(version, 0, written.size),)
            trajectories.append(msgspec.structs.replace(one, logprobs=written, spans=spans))
        return train_step(Learner(settings), batch(trajectories, REWARDS, step=1))

    healthy = sampled_with(0.0, version=1)
    assert healthy["on_policy_token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    assert healthy["off_policy_tokens"] == 0.0
    assert alarm.find_exceeded(healthy, limits) == []
    wrong = sampled_with(0.2, version=1)
    assert wrong["on_policy_token_mult_prob_error"] == pytest.approx(np.exp(0.2), abs=1e-5)
    assert [excess.metric for excess in alarm.find_exceeded(wrong, limits) if excess.on_policy] == [
        "on_policy_token_mult_prob_error",
        "on_policy_gen_kl_error",
    ]
    old = sampled_with(0.2, version=0)
    assert "on_policy_token_mult_prob_error" not in old
    assert old["off_policy_tokens"] == 1.0
    # an alarm once it lasts
    assert [excess.metric for excess in alarm.find_exceeded(old, limits)] == [alarm.OFF_POLICY_METRIC]


def kl_config(model: Path) -> Config:
    return config(
        model,
        grpo={**GROUPS, "adv_estimator": {"name": "reinforce_plus_plus"}},
        loss_fn={"use_kl_in_reward": True, "reference_policy_kl_penalty": 5.0},
        policy={"optimizer": {"kwargs": {"lr": 3e-3}}},
    )


def test_reinforce_plus_plus_takes_the_divergence_from_rewards(tiny_model: Path) -> None:
    learner = Learner(kl_config(tiny_model))
    for _ in range(3):  # the policy has moved away from the reference policy by then
        given = two_groups()
        train_step(learner, given)
    assert given.old_logprobs is not None
    assert given.ref_logprobs is not None
    assert given.advantages is not None
    np.testing.assert_array_equal(given.rewards, REWARDS)
    raw = []
    for reward, mean, ref, old in zip(
        REWARDS, [1.5] * 4 + [5.5] * 4, given.split(given.ref_logprobs), given.split(given.old_logprobs), strict=True
    ):
        d = ref.astype(np.float64) - old
        raw.append(reward - mean - 5.0 * np.minimum(np.exp(d) - 1 - d, 10.0))
    flat = np.concatenate(raw)
    assert np.abs(np.concatenate([r - r.mean() for r in raw if r.size])).max() > 0.1
    expected = (flat - flat.mean()) / flat.std()
    np.testing.assert_allclose(given.advantages, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"normalize_rewards": False},
        {"adv_estimator": {"name": "gdpo"}},
        {"adv_estimator": {"name": "reinforce_plus_plus"}},
    ],
)
def test_the_largest_accepted_rewards_leave_all_numbers_finite(tiny_model: Path, keys: dict[str, object]) -> None:
    learner = Learner(config(tiny_model, grpo={**GROUPS, **keys}))
    rewards = [LARGEST_REWARD, -LARGEST_REWARD] * 4
    given = two_groups(components=[{"a": reward, "b": -reward / 2} for reward in rewards])
    given.rewards[:] = rewards
    metrics = train_step(learner, given)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert all(bool(tensor.isfinite().all()) for _, tensor in learner.policy.weights())
