"""What a file of NeMo RL trains with: optimizers and schedules, ages, the value model and the teacher."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config
from headrace.config.loss import NoRatio, OnPolicyRatio
from headrace_services.trainer.learning.optimizer import LearningRate
from tests.unit.config.nemo_cases import read, refusal


def scheduler(config: Config) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_defaults=True) for item in config.policy.scheduler]


CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}}


def test_megatrons_optimizer_and_schedule_apply_where_megatron_is(tmp_path: Path) -> None:
    text = "policy: {megatron_cfg: {enabled: true, optimizer: {clip_grad: 0.5}}, dtensor_cfg: {enabled: false}}"
    config, translation = read(tmp_path, text)
    kwargs = config.policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.weight_decay, kwargs.betas, kwargs.eps) == (3e-7, 0.1, (0.9, 0.95), 1e-6)
    assert config.policy.max_grad_norm == 0.5
    ramp = {"start_factor": pytest.approx(0.1), "end_factor": 1.0, "total_iters": 10}
    assert scheduler(config) == [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": ramp}, CONSTANT, {"milestones": [10]}
    ]  # fmt: skip
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "policy.megatron_cfg.optimizer" in said["policy.optimizer"]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"lr_warmup_iters": 0}, []),
        (
            {"lr_warmup_iters": 0, "lr_decay_style": "cosine"},
            [
                ("CosineAnnealingLR", {"T_max": 1000, "eta_min": 3e-8}),
                ("ConstantLR", {"factor": pytest.approx(0.1), "total_iters": 10_000_000_000}),
            ],
        ),
        (
            {"lr_warmup_init": 0, "lr_decay_style": "linear"},
            [
                ("LinearLR", {"start_factor": 1e-8, "end_factor": 1.0, "total_iters": 10}),
                ("LinearLR", {"start_factor": 1.0, "end_factor": pytest.approx(0.1), "total_iters": 990}),
            ],
        ),
    ],
    ids=["constant", "cosine", "linear"],
)
def test_megatrons_schedules_in_torchs_words(tmp_path: Path, schedule: dict[str, Any], expected: list[Any]) -> None:
    given = ", ".join(f"{key}: {value}" for key, value in schedule.items())
    config, _ = read(tmp_path, f"policy: {{megatron_cfg: {{enabled: true, scheduler: {{{given}}}}}}}")
    named = [item for item in scheduler(config) if "name" in item]
    assert [(item["name"].rpartition(".")[2], item["kwargs"]) for item in named] == expected


def test_a_schedule_that_torch_has_not_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "policy: {megatron_cfg: {enabled: true, scheduler: {lr_decay_style: WSD}}}")
    (line,) = said
    assert "policy.megatron_cfg.scheduler: lr_decay_style 'WSD'" in line


def rates(config: Config, steps: int) -> list[float]:
    """The learning rates that torch's schedulers give, step by step."""
    rate = LearningRate(config.policy.optimizer.kwargs.lr, config.policy.scheduler, "policy")
    found = []
    for _ in range(steps):
        found.append(rate.value)
        rate.advance()
    return found


def megatrons_rate(step: int, *, style: str, lr: float, floor: float, warmup: int, start: float, until: int) -> float:
    """`OptimizerParamScheduler.get_lr` of Megatron-LM, restated."""
    if step < warmup:
        return start + (lr - start) * step / warmup
    if style == "constant":
        return lr
    if step > until:
        return floor
    done = (step - warmup) / (until - warmup)
    return floor + (lr - floor) * (1 - done if style == "linear" else 0.5 * (math.cos(math.pi * done) + 1))


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_rates_of_megatron_schedules_match_long_after_their_end(tmp_path: Path, style: str, warmup: int) -> None:
    schedule = f"{{lr_decay_style: {style}, lr_decay_iters: 12, lr_warmup_iters: {warmup}, lr_warmup_init: 3.0e-8}}"
    config, _ = read(tmp_path, f"policy: {{megatron_cfg: {{enabled: true, scheduler: {schedule}}}}}")
    expected = [
        megatrons_rate(step, style=style, lr=3e-7, floor=3e-8, warmup=warmup, start=3e-8, until=12)
        for step in range(40)
    ]
    assert rates(config, 40) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("{start_weight_decay: 0.3, end_weight_decay: 0.3}", 0.3),
        ("{start_weight_decay: 0.0, end_weight_decay: 0.0}", 0.0),
        ("{start_weight_decay: null, end_weight_decay: null}", 0.1),
        ("{}", 0.1),
    ],
)
def test_a_schedules_weight_decay_goes_before_the_optimizers(tmp_path: Path, schedule: str, expected: float) -> None:
    config, _ = read(tmp_path, f"policy: {{megatron_cfg: {{enabled: true, scheduler: {schedule}}}}}")
    assert config.policy.optimizer.kwargs.weight_decay == expected


def test_a_weight_decay_that_changes_is_refused(tmp_path: Path) -> None:
    text = "policy: {megatron_cfg: {enabled: true, scheduler: {start_weight_decay: 0.0, end_weight_decay: 0.1}}}"
    (line,) = refusal(tmp_path, text)
    assert line.startswith("policy.megatron_cfg.scheduler: start_weight_decay 0.0 with end_weight_decay 0.1: ")


@pytest.mark.parametrize("section", ["policy", "value"])
def test_a_frozen_router_stays_frozen_where_megatron_trains(tmp_path: Path, section: str) -> None:
    megatron = f"{section}: {{megatron_cfg: {{enabled: true, expert_model_parallel_size: 8, freeze_moe_router: true}}}}"
    config, _ = read(tmp_path, megatron)
    assert getattr(config, section).freeze_moe_router
    config, _ = read(tmp_path, megatron, f"{section}.megatron_cfg.enabled=false")
    assert not getattr(config, section).freeze_moe_router  # nothing of megatron_cfg is in force


def test_a_router_that_is_balanced_is_refused_where_there_are_experts(tmp_path: Path) -> None:
    keys = "fp8_cfg: {enabled: true}, moe_aux_loss_coeff: 0.1, moe_router_load_balancing_type: aux_loss"
    text = f"policy: {{megatron_cfg: {{enabled: true, expert_model_parallel_size: 8, {keys}}}}}"
    assert [line.split(": ")[0] for line in refusal(tmp_path, text)] == [
        "policy.megatron_cfg.fp8_cfg.enabled",
        "policy.megatron_cfg.moe_router_load_balancing_type",
        "policy.megatron_cfg.moe_aux_loss_coeff",
    ]


def test_a_truncation_without_a_bound_truncates_nothing_there_as_here(tmp_path: Path) -> None:
    loss = "truncated_importance_sampling_type: tis, truncated_importance_sampling_ratio: null"
    config, translation = read(tmp_path, f"loss_fn: {{{loss}, truncated_importance_sampling_ratio_min: 0.5}}")
    assert config.loss_fn.truncated_importance_sampling_type is None
    assert config.loss_fn.truncated_importance_sampling_ratio_min is None
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert "nothing is truncated" in said["loss_fn.truncated_importance_sampling_type"]


@pytest.mark.parametrize("form", ["force_on_policy_ratio", "disable_ppo_ratio"])
def test_a_clip_beside_a_ratio_that_is_not_clipped_is_left_out(tmp_path: Path, form: str) -> None:
    clip = "ratio_clip_min: 0.2, ratio_clip_max: 0.28, ratio_clip_c: 3.0, ratio_eps_max: 0.3"
    sequences = "sequence_level_importance_ratios: true, token_level_loss: false"
    config, translation = read(tmp_path, f"loss_fn: {{{form}: true, {clip}, {sequences}}}")
    assert (
        config.loss_fn.policy_term == {"force_on_policy_ratio": OnPolicyRatio(), "disable_ppo_ratio": NoRatio()}[form]
    )
    said = {key: says for says, keys in translation.replaced.items() for key in keys}
    assert form in said["loss_fn.ratio_clip_max"]
    assert form in said["loss_fn.sequence_level_importance_ratios"]
    weighed = f"loss_fn: {{{form}: true, use_importance_sampling_correction: true, {sequences}}}"
    assert read(tmp_path, weighed)[0].loss_fn.sequence_level_importance_ratios


def test_a_ratio_of_1_wins_over_none_as_their_gradients_are_equal(tmp_path: Path) -> None:
    config, _ = read(tmp_path, "loss_fn: {force_on_policy_ratio: true, disable_ppo_ratio: true}")
    assert config.loss_fn.policy_term == OnPolicyRatio()


def test_transformer_engine_s_fused_adam_is_adamw(tmp_path: Path) -> None:
    kwargs = "{lr: 1.0e-6, master_weights: true, exp_avg_dtype: torch.bfloat16}"
    config, _ = read(tmp_path, f"policy: {{optimizer: {{name: te.optimizers.FusedAdam, kwargs: {kwargs}}}}}")
    assert (config.policy.optimizer.name, config.policy.optimizer.kwargs.lr) == ("torch.optim.AdamW", 1e-6)


SINGLE = """
grpo: {async_grpo: null}
async_rl:
  sampler: {name: NAME, KEY: 3}
  recompute_kv_cache_after_weight_updates: true
  max_inflight_prompts: 8
  rollout_failure: {max_skipped_prompts: 0, native: {env_timeout_s: null}}
data_plane: {enabled: true}
"""


@pytest.mark.parametrize(
    ("name", "key", "policy"),
    [
        ("in_order", "max_lookahead_versions", "ordered"),
        ("weight_fifo", "max_staleness_versions", "drop"),
        ("windowed", "max_staleness_versions", "drop"),
    ],
)
def test_the_samplers_of_the_single_controller(tmp_path: Path, name: str, key: str, policy: str) -> None:
    config, _ = read(tmp_path, SINGLE.replace("NAME", name).replace("KEY", key))
    asynchrony = config.algorithm.asynchrony
    assert (config.algorithm.max_age, asynchrony.staleness_policy) == (3, policy)
    assert asynchrony.in_flight_weight_updates
    assert asynchrony.recompute_kv_cache_after_weight_updates


def test_the_first_form_of_the_single_controller(tmp_path: Path) -> None:
    text = "async_rl: {max_weight_staleness_versions: 2, over_sampling: OVER, force_in_order: false, max_buffered_rollouts: 9}"
    ordered, _ = read(tmp_path, text.replace("OVER", "false"))
    assert (ordered.algorithm.max_age, ordered.algorithm.asynchrony.staleness_policy) == (2, "ordered")
    over, _ = read(tmp_path, text.replace("OVER", "true"))
    assert (over.algorithm.max_age, over.algorithm.asynchrony.staleness_policy) == (2, "drop")
    strict, _ = read(tmp_path, text.replace("OVER", "false, batch_selection_strategy: strict_on_policy"))
    assert strict.algorithm.max_age == 0
    window, _ = read(tmp_path, text.replace("OVER", "false, batch_selection_strategy: staleness_window"))
    assert window.algorithm.max_age == 2


def test_a_multiple_of_the_batch_without_dynamic_sampling(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "grpo: {batch_multiplier: 3, use_dynamic_sampling: false}")
    assert config == read(tmp_path)[0]
    assert "grpo.batch_multiplier" in {key for keys in translation.replaced.values() for key in keys}
    config, _ = read(tmp_path, "grpo: {batch_multiplier: 3, use_dynamic_sampling: true}")
    assert config.algorithm.batch_multiplier == 3


def test_async_rl_does_nothing_beside_async_grpo(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "async_rl: {sampler: {name: weight_fifo, max_staleness_versions: 5}}")
    assert config.algorithm.max_age == 0
    assert ["async_rl"] in translation.replaced.values()


def test_a_sampler_of_ones_own_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "grpo: {async_grpo: null}\nasync_rl: {sampler: {name: custom, target: 'mine:Sampler'}}")
    assert {line.split(": ")[0] for line in said} == {"async_rl.sampler.target", "async_rl.sampler.name"}


def test_a_file_of_ppo(tmp_path: Path) -> None:
    text = """
grpo: null
ppo:
  num_prompts_per_step: 8
  num_generations_per_prompt: 4
  max_num_epochs: -1
  ppo_epochs: 2
  critic_ppo_epochs: ${ppo.ppo_epochs}
  warm_start_value_checkpoint: null
  adv_estimator: {name: gae, gae_lambda: 0.9, gae_gamma: 1, length_adaptive_alpha: 0.0}
  async_ppo: {enabled: true, max_trajectory_age_steps: 2, warmup_generation_lead_steps: null}
loss_fn: {reference_policy_kl_penalty: 0.0, use_importance_sampling_correction: true}
value_loss_fn: {scale: 0.4, cliprange: 0.2}
value:
  model_name: ${policy.model_name}
  tokenizer: {name: "${value.model_name}"}
  max_total_sequence_length: ${policy.max_total_sequence_length}
  reward_model_cfg: {enabled: true, reward_model_type: regression}
  automodel_cfg: {enabled: true, activation_checkpointing: false, tensor_parallel_size: 1}
  sequence_packing: {enabled: false}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0e-05}}
  scheduler: [{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}, {milestones: []}]
"""
    config, _ = read(tmp_path, text)
    assert config.ppo is not None
    assert (config.ppo.max_age, config.ppo.critic_ppo_epochs, config.ppo.adv_estimator.gae_lambda) == (2, 2, 0.9)
    assert config.ppo.max_num_epochs > 10**6
    assert (config.value.optimizer.kwargs.lr, config.value_loss_fn.scale) == (1e-5, 0.4)
    assert config.ppo.scheduler_counts == "epochs"  # of which a step has ppo_epochs, as it has calls of train() there
    assert config.policy.activation_checkpointing  # the policy's, not the value model's


DISTILLED = """
grpo: {adv_estimator: {name: opd}}
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {one: some/teacher, two: some/teacher}
  default_teacher_alias: one
  strict_agent_name_match: false
  non_colocated_teachers: {enabled: true, default_teacher_cfg: {num_nodes: 1, precision: bf16}}
  full: {enabled: false, teacher_payload: logits}
"""


def test_the_teacher_of_a_distillation_is_headrace_s(tmp_path: Path) -> None:
    config, translation = read(tmp_path, DISTILLED)
    assert config.grpo is not None
    assert config.grpo.adv_estimator.teacher_model_name == "some/teacher"
    assert translation.came_from["grpo", "adv_estimator", "teacher_model_name"][0] == "on_policy_distillation"
    own, _ = read(tmp_path, DISTILLED, "grpo.adv_estimator.teacher_model_name=mine")
    assert own.grpo is not None
    assert own.grpo.adv_estimator.teacher_model_name == "mine"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "on_policy_distillation.teacher_model_by_agent_name.two=another",
            "teacher_model_by_agent_name: another, some/teacher",
        ),
        ("on_policy_distillation.full.enabled=true", "the sampled tokens, not whole distributions"),
        ("on_policy_distillation.enabled=false", "opd without grpo.adv_estimator.teacher_model_name"),
    ],
    ids=["several", "whole-distributions", "off"],
)
def test_a_distillation_that_can_t_be_honoured_says_why(tmp_path: Path, override: str, problem: str) -> None:
    assert any(problem in line for line in refusal(tmp_path, DISTILLED, override))
