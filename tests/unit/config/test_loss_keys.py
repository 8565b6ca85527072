"""Keys of `loss_fn` and `value_loss_fn` that contradict each other or other sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError
from headrace.config import LossConfig, ValueLossConfig, load
from headrace.config.loss import Clip, ClippedRatio, ClippedWeight, NoRatio, OnPolicyRatio, PolicyTerm
from headrace.config.yaml_text import dump
from tests.support.configurations import refusal

TIS = {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0}
ICEPOP = {
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": 5.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}
IS = {"use_importance_sampling_correction": True}
GSPO = {"token_level_loss": False, "sequence_level_importance_ratios": True}


def overrides(keys: dict[str, object]) -> list[str]:
    return [f"loss_fn.{key}={'null' if value is None else str(value).lower()}" for key, value in keys.items()]


def given(tmp_path: Path, text: str = "{}") -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"sequence_level_importance_ratios": True}, "token_level_loss"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({"use_cispo": True, **GSPO}, "sequence_level_importance_ratios"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "ratio_clip_c 3.0"),
        ({"use_cispo": True, "token_level_loss": False}, "token_level_loss"),
        (TIS, "use_importance_sampling_correction"),
        ({**IS, "truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_ratio"),
        ({**IS, "truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_type"),
        ({**IS, "truncated_importance_sampling_ratio_min": 0.5}, "truncated_importance_sampling_type"),
        ({**IS, **ICEPOP, "truncated_importance_sampling_ratio_min": None}, "truncated_importance_sampling_ratio_min"),
        ({**IS, **ICEPOP, "truncated_importance_sampling_ratio_min": 6.0}, "ratio_min 6.0 is above"),
        (
            {**IS, **ICEPOP, "truncated_importance_sampling_type": "seq-mask-tis", **GSPO},
            "sequence_level_importance_ratios",
        ),
        ({**IS, "prev_logprobs_source": "generation"}, "prev_logprobs_source generation"),
        ({"proximal": "interpolate", "prev_logprobs_source": "generation"}, "proximal interpolate"),
        ({"force_on_policy_ratio": True, "prev_logprobs_source": "generation"}, "force_on_policy_ratio"),
        ({"proximal": "recompute", "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        ({"proximal": "recompute", "force_on_policy_ratio": True}, "force_on_policy_ratio"),
        ({"force_on_policy_ratio": True, "disable_ppo_ratio": True}, "disable_ppo_ratio"),
        *(
            ({form: True, **unread}, next(iter(unread)))
            for form in ("disable_ppo_ratio", "force_on_policy_ratio")
            for unread in (
                {"ratio_clip_min": 0.1},
                {"ratio_clip_max": 0.28},
                {"ratio_clip_c": 3.0},
                {"sequence_level_importance_ratios": True, "token_level_loss": False},
            )
        ),
        ({"constant_length": 100, "token_level_loss": False}, "constant_length 100"),
        ({"ratio_clip_c": 1.0}, "ratio_clip_c"),
        ({"truncated_importance_sampling_ratio": 0.0}, "truncated_importance_sampling_ratio"),
        ({"reference_policy_kl_type": "k4"}, "'k1', 'k2' or 'k3'"),
        ({"probability_difference_mask": 1.0}, "probability_difference_mask"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "+".join(value),
)
def test_keys_that_contradict_each_other_are_one_line_that_names_them(
    tmp_path: Path, keys: dict[str, object], names: str
) -> None:
    message = refusal(given(tmp_path), *overrides(keys))
    assert message.startswith("loss_fn")
    assert names in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    "keys",
    [
        GSPO,
        {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0, **IS},
        {**IS, **TIS},
        {"proximal": "interpolate", **TIS},
        {**IS, **ICEPOP, "force_on_policy_ratio": True},
        {"constant_length": 1024},
        {"disable_ppo_ratio": True},
        {"disable_ppo_ratio": True, **GSPO, **IS},
        {"force_on_policy_ratio": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "ratio_clip_c": None},
        {"ratio_clip_max": ".inf", "ratio_clip_min": 1.0, "probability_difference_mask": 0.2},
    ],
    ids=lambda keys: "+".join(keys),
)
def test_published_recipes_and_ours_are_accepted_and_come_back(tmp_path: Path, keys: dict[str, object]) -> None:
    config = load(given(tmp_path), overrides(keys), {})
    assert load(given(tmp_path, dump(config)), [], {}) == config


@pytest.mark.parametrize(
    ("keys", "term"),
    [
        ({}, ClippedRatio(Clip(0.8, 1.2), None, of_sequences=False)),
        ({"ratio_clip_max": 0.5, "ratio_clip_c": 3.0}, ClippedRatio(Clip(0.8, 1.5), 3.0, of_sequences=False)),
        (GSPO, ClippedRatio(Clip(0.8, 1.2), None, of_sequences=True)),
        ({"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 5.0}, ClippedWeight(Clip(0.0, 6.0))),
        ({"force_on_policy_ratio": True}, OnPolicyRatio()),
        ({"disable_ppo_ratio": True, **GSPO, **IS}, NoRatio()),
    ],
    ids=["ratio", "dual clip", "sequences", "cispo", "on policy", "no ratio"],
)
def test_the_keys_choose_one_form_of_the_policy_term(keys: dict[str, Any], term: PolicyTerm) -> None:
    assert LossConfig(**keys).policy_term == term


def test_decoupled_ppo_weighs_by_importance_without_being_told() -> None:
    assert LossConfig(proximal="interpolate").weighs_by_importance
    assert LossConfig(use_importance_sampling_correction=True).weighs_by_importance
    assert not LossConfig().weighs_by_importance


def test_the_kl_penalty_is_in_the_loss_or_in_the_reward() -> None:
    assert LossConfig().kl_in_loss
    assert not LossConfig(reference_policy_kl_penalty=0).kl_in_loss
    assert not LossConfig(use_kl_in_reward=True).kl_in_loss


def test_the_value_loss_can_go_without_a_clip() -> None:
    assert ValueLossConfig(cliprange=None).cliprange is None
    with pytest.raises(ValueError, match="cliprange"):
        ValueLossConfig(cliprange=0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}\npolicy: {train_global_batch_size: 8}",
            "loss_fn.force_on_policy_ratio true with policy.train_global_batch_size 8 of the 16 trajectories",
        ),
        ("ppo: {ppo_epochs: 2}", "loss_fn.force_on_policy_ratio true with ppo.ppo_epochs 2"),
    ],
    ids=["batch", "epochs"],
)
def test_a_ratio_forced_to_1_needs_one_optimizer_step_a_batch(tmp_path: Path, text: str, said: str) -> None:
    path = given(tmp_path, text)
    load(path, [], {})
    assert refusal(path, "loss_fn.force_on_policy_ratio=true").startswith(said)


def test_a_skipped_reference_policy_leaves_no_penalty(tmp_path: Path) -> None:
    path = given(tmp_path, "grpo: {skip_reference_policy_logprobs_calculation: true}")
    with pytest.raises(ConfigError, match=r"loss_fn\.reference_policy_kl_penalty 0\.01.*reference policy"):
        load(path, [], {})
    load(path, ["loss_fn.reference_policy_kl_penalty=0"], {})


@pytest.mark.parametrize(
    ("keys", "corrects"),
    [
        ({}, False),
        ({"prev_logprobs_source": "generation"}, True),
        (IS, True),
        ({"proximal": "interpolate"}, True),
        ({"probability_difference_mask": 0.2}, True),
        ({"disable_ppo_ratio": True, "prev_logprobs_source": "generation"}, False),
        ({"disable_ppo_ratio": True, **IS}, True),
        ({"force_on_policy_ratio": True}, False),
    ],
)
@pytest.mark.parametrize(
    "algorithm", ["grpo: {async_grpo: {%s}}", "ppo: {ppo_epochs: 1, async_ppo: {%s}}"], ids=["grpo", "ppo"]
)
def test_tokens_of_older_weights_that_nothing_corrects_are_warned_of(
    tmp_path: Path, algorithm: str, keys: dict[str, object], corrects: bool
) -> None:
    said = load(given(tmp_path, algorithm % "enabled: true"), overrides(keys), {}).warnings
    assert any("sampled them" in warning for warning in said) is not corrects
    on_policy = load(given(tmp_path, algorithm % "enabled: true, max_trajectory_age_steps: 0"), overrides(keys), {})
    assert on_policy.warnings == []
