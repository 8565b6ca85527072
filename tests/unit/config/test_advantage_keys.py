"""Reward shaping, estimators and clips: what contradicts what is refused, naming both keys and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.config import Config, load

OPD = ("grpo.adv_estimator.name=opd", "grpo.adv_estimator.teacher_model_name=t")


def check(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text("run: {}\n")
    return load(path, overrides, {})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["grpo.reward_scaling.source_max=0"], r"source_min 0.0 is not below source_max 0.0"),
        (["grpo.reward_scaling.target_max=0"], "target_min and target_max are both 0.0"),
        (["grpo.adv_estimator.name=gae"], r"grpo.adv_estimator.name: gae is an estimator of ppo"),
        (["ppo.adv_estimator.name=gdpo"], r"ppo.adv_estimator.name: gdpo is an estimator of grpo"),
        (["grpo.adv_estimator.name=opd"], "opd without grpo.adv_estimator.teacher_model_name"),
        (["grpo.adv_estimator.teacher_model_name=x"], "name: opd"),
        (["grpo.adv_estimator.name=gspo"], "'gspo' should be 'grpo'"),
        (["grpo.adv_estimator.reward_weights=[1,2]"], r"reward_weights \[1.0, 2.0\] with name grpo"),
        (["grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.reward_weights=[1,.inf]"], r"reward_weights.1: .inf"),
        (["grpo.adv_estimator.minus_baseline=false"], "minus_baseline false with name grpo"),
        (["grpo.adv_estimator.kl_to_go=true"], "kl_to_go true with name grpo"),
        (["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.kl_to_go=true"], "kl_to_go true without"),
        (["loss_fn.use_kl_in_reward=true"], "loss_fn.use_kl_in_reward true with grpo.adv_estimator.name grpo"),
        (
            ["loss_fn.use_kl_in_reward=true", "ppo.adv_estimator.name=raw_reward"],
            "use_kl_in_reward true with ppo.adv_estimator.name raw_reward",
        ),
        (
            ["ppo.adv_estimator.name=raw_reward", "ppo.adv_estimator.length_adaptive_alpha=0.05"],
            "length_adaptive_alpha 0.05 with name raw_reward",
        ),
        (["ppo.adv_estimator.gae_lambda=1.5"], "ppo.adv_estimator.gae_lambda: 1.5"),
        (
            [
                "grpo.num_generations_per_prompt=1",
                "grpo.use_leave_one_out_baseline=false",
                "grpo.adv_estimator.use_leave_one_out_baseline=true",
            ],
            "num_generations_per_prompt 1 with grpo.adv_estimator.name grpo, which compares",
        ),
        (["grpo.num_generations_per_prompt=1", "grpo.use_leave_one_out_baseline=false"], "every advantage would be 0"),
        (
            ["grpo.num_generations_per_prompt=1", "grpo.adv_estimator.name=reinforce_plus_plus"],
            "num_generations_per_prompt 1 with grpo.adv_estimator.name reinforce_plus_plus",
        ),
        (["ppo.num_generations_per_prompt=1", "ppo.use_dynamic_sampling=true"], "every group would be filtered"),
        (
            [*OPD, "grpo.use_dynamic_sampling=true"],
            "use_dynamic_sampling true with grpo.adv_estimator.name opd",
        ),
        ([*OPD, "grpo.reward_shaping.enabled=true"], "reward_shaping.enabled true with grpo.adv_estimator.name opd"),
        (
            ["grpo.adv_estimator.name=gdpo", "grpo.reward_shaping.enabled=true"],
            "reward_shaping.enabled true with grpo.adv_estimator.name gdpo.*length as a component",
        ),
        (
            ["grpo.advantage_clip_low=0", "grpo.advantage_clip_high=0"],
            r"advantage_clip_low 0.0 is not below advantage_clip_high 0.0",
        ),
        (["grpo.advantage_clip_low=2"], r"grpo.advantage_clip_low: 2"),
        (["grpo.advantage_clip_high=-2"], r"grpo.advantage_clip_high: -2"),
        (["grpo.seq_logprob_error_threshold=0.5"], "grpo.seq_logprob_error_threshold: 0.5"),
        (
            ["grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=600"],
            "overlong_buffer_length 600 is more than max_response_length 512",
        ),
        (["grpo.reward_shaping.stop_properly_penalty_coef=2"], "stop_properly_penalty_coef: 2 "),
    ],
)
def test_what_cannot_go_together_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "grpo.num_generations_per_prompt=1",
            "grpo.adv_estimator.name=reinforce_plus_plus",
            "grpo.adv_estimator.minus_baseline=false",
        ],
        ["ppo.num_generations_per_prompt=1"],
        ["grpo.num_generations_per_prompt=1", *OPD],
        [
            "grpo.adv_estimator.name=reinforce_plus_plus",
            "grpo.adv_estimator.kl_to_go=true",
            "loss_fn.use_kl_in_reward=true",
        ],
        ["ppo.adv_estimator.name=gae", "loss_fn.use_kl_in_reward=true"],
        ["grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.reward_weights=[1,0.5]", "grpo.use_dynamic_sampling=true"],
        # the overlong buffer is not in force
        [
            "grpo.reward_shaping.enabled=true",
            "grpo.reward_shaping.overlong_buffer_length=600",
            "grpo.reward_shaping.stop_properly_penalty_coef=0.5",
        ],
        ["grpo.reward_shaping.overlong_buffer_length=600"],
        ["ppo.reward_shaping.enabled=true", "ppo.reward_shaping.overlong_buffer_length=512"],
    ],
)
def test_what_can_go_together_is_taken(tmp_path: Path, overrides: list[str]) -> None:
    check(tmp_path, *overrides)


def test_the_overlong_limit_is_the_context_unless_it_is_given(tmp_path: Path) -> None:
    assert check(tmp_path, "policy.max_total_sequence_length=700").max_response_length == 700
    assert check(tmp_path, "grpo.reward_shaping.max_response_length=80").max_response_length == 80


def test_keys_that_do_nothing_are_warned_of(tmp_path: Path) -> None:
    on = "grpo.reward_shaping.enabled=true"
    coefficient = "grpo.reward_shaping.stop_properly_penalty_coef=0.5"
    buffer = "grpo.reward_shaping.overlong_buffer_penalty=2"
    assert check(tmp_path, on, coefficient).warnings == []
    assert check(tmp_path, on, buffer, "grpo.reward_shaping.max_response_length=256").warnings == []
    assert check(tmp_path, on, coefficient, buffer).warnings == [
        "grpo.reward_shaping.overlong_buffer_penalty has no effect: stop_properly_penalty_coef replaces the overlong "
        "penalty; leave one of the two out"
    ]
    path = tmp_path / "run.yaml"
    path.write_text(
        "grpo: {reward_shaping: {enabled: true, stop_properly_penalty_coef: 0.5, overlong_buffer_penalty: 2}}\n"
        "data: {train: {dataset_name: arithmetic, env_name: math}}\nenv: {math: {}}\n"
    )
    said = CliRunner().invoke(app, ["config", "check", str(path)])
    assert said.exit_code == 0
    assert said.stderr.startswith("warning: grpo.reward_shaping.overlong_buffer_penalty has no effect")
    assert "valid" in said.stdout


def test_a_penalty_that_no_answer_is_long_enough_for_is_warned_of(tmp_path: Path) -> None:
    on, episodes = "grpo.reward_shaping.enabled=true", "env={game: {command: [./play], episodes: true}}"
    [said] = check(tmp_path, on).warnings
    for words in ("reward_shaping has no effect", "after 384 tokens", "max_response_length to 256"):
        assert words in said
    assert check(tmp_path, on, "policy.generation.max_new_tokens=385").warnings == []
    assert check(tmp_path, on, episodes).warnings == []  # its policy writes several answers


def test_a_factor_that_raises_negative_rewards_is_warned_of(tmp_path: Path) -> None:
    shaping = ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=0")
    scaling = ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=-1")
    [said] = check(tmp_path, *shaping, *scaling).warnings
    assert "stop_properly_penalty_coef 0 with reward_scaling down to -1" in said
    assert check(tmp_path, *shaping, scaling[0]).warnings == []


def test_greedy_completions_that_are_all_the_same_are_warned_of(tmp_path: Path) -> None:
    greedy, several = "policy.generation.val_temperature=0", "grpo.val_num_generations_per_prompt=4"
    [said] = check(tmp_path, greedy, several).warnings
    assert "pass_k is the accuracy" in said
    assert check(tmp_path, greedy).warnings == check(tmp_path, several).warnings == []
