"""What `headrace config show` says of the age policy, and of what a step does."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cli.config import age_bound, optimizer_steps
from headrace.config import Config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"enabled": False}, ["strictly on-policy", "weights t alone", "at most 8 groups"]),
        ({}, ["ordered", "no token older than weights t - 2", "at most 24 groups", "none dropped"]),
        (
            {"staleness_policy": "drop", "ahead_steps": 5},
            ["drop", "no token older than weights t - 2", "at most 48 groups", "over age by then is generated again"],
        ),
        ({"staleness_policy": "drop"}, ["at most 24 groups"]),
        (
            {"staleness_policy": "mask", "ahead_steps": 5},
            ["mask: tokens older than weights t - 2 leave the policy loss", "at most 48 groups", "without a younger token"],
        ),
    ],
)  # fmt: skip
def test_the_policy_s_bound_and_promise_are_said(settings: dict[str, Any], says: list[str]) -> None:
    ages = {"enabled": True, "max_trajectory_age_steps": 2, **settings}
    said = age_bound(Config.model_validate({"grpo": {"num_prompts_per_step": 8, "async_grpo": ages}}))
    assert all(words in said for words in says), said


P8N4 = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"grpo": P8N4}, "grpo: 8 x 4 trajectories a step, 1 optimizer step"),
        ({"grpo": P8N4, "policy": {"train_global_batch_size": 16}}, "grpo: 8 x 4 trajectories a step, 2 optimizer steps"),
        (
            {"ppo": {**P8N4, "policy_training_start_step": 5}, "value": {"train_global_batch_size": 8}},
            "ppo: 8 x 4 trajectories a step, 1 optimizer step in each of 4 passes of the policy from step 5 on, 4 optimizer "
            "steps in each of 4 passes of the value model",
        ),
        (
            {"ppo": {**P8N4, "ppo_epochs": 1, "adv_estimator": {"name": "raw_reward"}}},
            "ppo: 8 x 4 trajectories a step, 1 optimizer step of the policy, no value model",
        ),
    ],
    ids=["one", "several", "ppo", "no value model"],
)  # fmt: skip
def test_the_optimizer_steps_of_a_step_are_said(settings: dict[str, Any], says: str) -> None:
    assert optimizer_steps(Config.model_validate(settings)) == says
