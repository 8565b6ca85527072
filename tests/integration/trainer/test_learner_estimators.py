"""What reaches the loss, on a real model: rewards scaled and shaped, trajectories left out, advantages by each estimator."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from learner_cases import config, experiences

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.learning.experience import Experience
from services.trainer.learning.learner import Learner

GROUPS = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "use_leave_one_out_baseline": False}


def batch() -> list[Experience]:
    """Two groups of four; rewards 0 to 7."""
    return [dataclasses.replace(e, group=i // 4, reward=float(i)) for i, e in enumerate(experiences(8))]


def of(learner: Learner, name: str) -> np.ndarray:
    return np.array([getattr(trace, name) for trace in learner.traces])


def test_rewards_are_scaled_then_shaped_and_what_was_cut_off_leaves_the_loss(tiny_model: Path) -> None:
    shaping = {"enabled": True, "stop_properly_penalty_coef": 0.5}
    scaling = {"enabled": True, "source_max": 8.0, "target_max": 16.0}
    keys = {"reward_scaling": scaling, "reward_shaping": shaping, "overlong_filtering": True}
    cut_off = [False, True, False, False, True, False, False, False]
    learner = Learner(config(tiny_model, grpo={**GROUPS, **keys}))
    metrics = learner.step([dataclasses.replace(e, truncated=t) for e, t in zip(batch(), cut_off, strict=True)])
    shaped = [0.0, 1.0, 4.0, 6.0, 4.0, 10.0, 12.0, 14.0]
    np.testing.assert_allclose(of(learner, "reward"), shaped)
    np.testing.assert_array_equal(of(learner, "multiplier"), [0.0 if t else 1.0 for t in cut_off])
    # those that left the loss are in the baselines, 2.75 and 10
    groups = np.array(shaped).reshape(2, 4)
    expected = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose([t.mean_advantage for t in learner.traces if t.advantages.size], expected.ravel())
    assert (metrics["reward"], metrics["unshaped_total_reward"]) == (np.mean(shaped), 7.0)
    assert metrics["num_valid_samples"] == 6


def test_gdpo_trains_on_reward_components_and_says_which_environment_has_none(tiny_model: Path) -> None:
    learner = Learner(config(tiny_model, grpo={**GROUPS, "adv_estimator": {"name": "gdpo"}}))
    with pytest.raises(ServiceError, match="environment 'math' scored with reward components none: gdpo"):
        learner.step(batch())
    rows = [{"format": float(i % 2), "correct": float(i // 2 % 2)} for i in range(8)]
    learner.step([dataclasses.replace(e, components=c) for e, c in zip(batch(), rows, strict=True)])
    # each component is 0, 0, 1, 1 in some order in each group: ±0.5 / 0.577, and over the batch the sum is normalised
    total = np.array([c["format"] + c["correct"] - 1 for c in rows])
    found = [t.mean_advantage for t in learner.traces]
    np.testing.assert_allclose(found, total / total.std(ddof=1), atol=1e-6)


def kl_config(model: Path) -> Config:
    return config(
        model,
        grpo={**GROUPS, "adv_estimator": {"name": "reinforce_plus_plus"}},
        loss_fn={"use_kl_in_reward": True, "reference_policy_kl_penalty": 5.0},
        policy={"optimizer": {"kwargs": {"lr": 3e-3}}},
    )


def test_reinforce_plus_plus_takes_the_divergence_from_the_reference_policy_from_rewards(tiny_model: Path) -> None:
    learner = Learner(kl_config(tiny_model))
    for _ in range(3):  # the policy has moved away from the reference policy by then
        learner.step(batch())
    raw = []
    for trace, mean in zip(learner.traces, [1.5] * 4 + [5.5] * 4, strict=True):
        assert trace.start is not None
        assert trace.ref is not None
        d = trace.ref.astype(np.float64) - trace.start
        raw.append(trace.reward - mean - 5.0 * np.minimum(np.exp(d) - 1 - d, 10.0))
    flat = np.concatenate(raw)
    assert np.abs(np.concatenate([r - r.mean() for r in raw if r.size])).max() > 0.1
    expected = (flat - flat.mean()) / flat.std()
    np.testing.assert_allclose(np.concatenate([t.advantages for t in learner.traces]), expected, rtol=1e-6, atol=1e-6)
