"""Rules for `grpo`, `ppo`, `async_rl`, `loss_fn` and `value_loss_fn`."""

from __future__ import annotations

from typing import Any

from headrace.config.nemo_rl.rules import Rule, Whole, look, off, only, refused, renamed, replaced, used

_GYM = "environments of NeMo Gym can't be used; serve your own with headrace.serve() or attach it, and name it in env.<name>.target"


def _period(value: Any) -> Any:
    return 0 if isinstance(value, int | float) and value < 0 else value


def _epochs(value: Any) -> Any:
    """Convert `-1`, which async PPO requires there, to no limit."""
    return 1_000_000_000 if value == -1 else value


def _shared(section: str) -> list[Rule]:
    """Return the rules for keys that `grpo` and `ppo` share; `section` is one of the two."""
    return [
        *used(
            section,
            "num_prompts_per_step num_generations_per_prompt max_num_steps val_at_start val_at_end max_val_samples "
            "use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier overlong_filtering seed "
            "seq_logprob_error_threshold skip_reference_policy_logprobs_calculation advantage_clip_low advantage_clip_high "
            "val_start_at val_num_generations_per_prompt stop_at_validation_metric stop_at_validation_threshold",
        ),
        renamed(
            f"{section}.num_val_generations_per_prompt",
            f"{section}.val_num_generations_per_prompt",
            "its name in earlier releases",
        ),
        *used(section, "max_num_epochs", "-1 is no limit; it applies to asynchronous runs too", _epochs),
        *used(section, "val_period", "below 0 is 0: never", _period),
        *used(f"{section}.reward_scaling", "enabled source_min source_max target_min target_max"),
        *used(
            f"{section}.reward_shaping",
            "enabled overlong_buffer_length overlong_buffer_penalty max_response_length stop_properly_penalty_coef",
        ),
        *used(f"{section}.adv_estimator", "name"),
        *refused(
            "a rollout is one turn; set it to 1",
            f"{section}.max_rollout_turns",
            fine=only(1),
        ),
        *replaced(
            "validation goes through the buffer like training, without its own batches", f"{section}.val_batch_size"
        ),
        *replaced(
            "advantages are computed on the CPU, in microseconds per group",
            f"{section}.calculate_advantages_on_gpu",
        ),
        *replaced("measured by /metrics and `headrace status`", f"{section}.debug_payload_metrics"),
        *refused(
            "models for images, audio and video are not supported; use a text model",
            f"{section}.deduplicate_multimodal_data",
        ),
        *refused(
            _GYM,
            f"{section}.invalid_tool_call_*",
            f"{section}.malformed_thinking_advantage",
            f"{section}.penalize_*",
        ),
    ]


def _asynchrony(section: str) -> list[Rule]:
    return [
        *used(
            section,
            "enabled max_trajectory_age_steps in_flight_weight_updates recompute_kv_cache_after_weight_updates",
        ),
        *replaced(
            "a group gets up to replay.max_attempts attempts, then it fails with the reason",
            f"{section}.max_generation_failures",
        ),
        *replaced(
            "the buffer keeps every trajectory when the trainer restarts; only what is missing is generated again",
            f"{section}.drop_incomplete_targets_on_restore",
        ),
    ]


_SAMPLER = "in_order is ordered, the others are drop (async_ppo under ppo)"

_SINGLE_CONTROLLER = [
    renamed("async_rl.sampler.name", "grpo.async_grpo.staleness_policy", _SAMPLER, gathered=True),
    renamed("async_rl.max_weight_staleness_versions", "grpo.async_grpo.max_trajectory_age_steps", gathered=True),
    *(
        renamed(f"async_rl.{key}", "grpo.async_grpo.staleness_policy", gathered=True)
        for key in ("over_sampling", "force_in_order")
    ),
    renamed("async_rl.sampler.max_lookahead_versions", "grpo.async_grpo.max_trajectory_age_steps", gathered=True),
    renamed("async_rl.sampler.max_staleness_versions", "grpo.async_grpo.max_trajectory_age_steps", gathered=True),
    renamed(
        "async_rl.recompute_kv_cache_after_weight_updates",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates",
        gathered=True,
    ),
    *replaced("the lowest ticket goes first, so no group waits forever", "async_rl.sampler.sample_freshest_first"),
    *refused("custom samplers can't be loaded; choose grpo.async_grpo.staleness_policy", "async_rl.sampler.target"),
    *replaced(
        "a step trains on a whole batch of groups while the next one is generated",
        "async_rl.min_groups_for_streaming_train",
    ),
    *replaced("rollout.max_concurrent_groups per replica, and the age bound", "async_rl.max_inflight_prompts"),
    *replaced("the age bound, and replay.max_bytes", "async_rl.max_buffered_rollouts"),
    *replaced("the dashboard, and `headrace groups`", "async_rl.diagnostics"),
    *replaced(
        "replay.max_attempts, replay.group_deadline_s and replay.max_scoring_attempts; a group that fails is replaced by the next",
        "async_rl.rollout_failure.**",
    ),
    *replaced(
        "replay.group_deadline_s and trainer.fleet_deadline_s end what hangs",
        "async_rl.stall_watchdog.**",
        "async_rl.watchdog.**",
    ),
    *replaced(
        "replicas pull their work, and the leases of a dead one expire: rollout.dead_after_s, trainer.fleet_deadline_s",
        "async_rl.generation_fleet_health.**",
        "async_rl.generation_router.**",
    ),
]

LOSS = [
    *used(
        "loss_fn",
        "reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value ratio_clip_min "
        "ratio_clip_max ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction "
        "truncated_importance_sampling_type truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min "
        "sequence_level_importance_ratios token_level_loss force_on_policy_ratio use_kl_in_reward use_cispo disable_ppo_ratio "
        "positive_example_nll_weight",
    ),
    renamed("loss_fn.ratio_eps_min", "loss_fn.ratio_clip_min", "its name in the first releases"),
    renamed("loss_fn.ratio_eps_max", "loss_fn.ratio_clip_max", "its name in the first releases"),
    *replaced(
        "probs_ratio, probs_ratio_clamped and their extremes are always reported",
        "loss_fn.cispo_diagnostics",
        "loss_fn.cispo_diag_grpo_eps",
        "loss_fn.cispo_diag_low_prob_threshold",
    ),
    *used("value_loss_fn", "scale cliprange"),
]


def _no_tokens(value: Any, whole: Whole) -> bool:
    """Whether the token ids have no effect, because no penalty that reads them is on."""
    penalties = look(whole, "reward_penalties") or {}
    return not any(value for key, value in penalties.items() if key.startswith("penalize_"))


def _sampled_alone(value: Any, whole: Whole) -> bool:
    return off(look(whole, "on_policy_distillation.full.enabled"), whole)


_DISTILLATION = [
    renamed(
        "on_policy_distillation.teacher_model_by_agent_name.*",
        "grpo.adv_estimator.teacher_model_name",
        "one teacher for all prompts; several names may name the same model",
        gathered=True,
    ),
    *replaced(
        "grpo.adv_estimator.name opd distills from grpo.adv_estimator.teacher_model_name",
        "on_policy_distillation",
        "on_policy_distillation.enabled",
        "on_policy_distillation.teacher_model_by_agent_name",
    ),
    *replaced(
        "one teacher for all prompts",
        "on_policy_distillation.default_teacher_alias",
        "on_policy_distillation.strict_agent_name_match",
        "on_policy_distillation.deduplicate_shared_teacher_checkpoints",
    ),
    *replaced(
        "the trainer's own processes hold the teacher, sharded like the policy",
        "on_policy_distillation.non_colocated_teachers.**",
    ),
    *refused(
        "the teacher scores the sampled tokens, not whole distributions; set on_policy_distillation.full.enabled to false",
        "on_policy_distillation.full.**",
        "on_policy_distillation.full",
        fine=_sampled_alone,
        once=True,
    ),
]

ALGORITHM = [
    *_shared("grpo"),
    *used("grpo", "normalize_rewards use_leave_one_out_baseline"),
    *used("grpo.adv_estimator", "normalize_rewards use_leave_one_out_baseline minus_baseline reward_weights"),
    *_asynchrony("grpo.async_grpo"),
    *_shared("ppo"),
    *used("ppo", "ppo_epochs critic_ppo_epochs policy_training_start_step"),
    *used(
        "ppo.adv_estimator",
        "gae_lambda gae_gamma normalize_advantages gae_lambda_value gae_lambda_policy length_adaptive_alpha",
    ),
    *_asynchrony("ppo.async_ppo"),
    *replaced(
        "generation runs ahead by the age bound from the first step, even while only the critic is trained",
        "ppo.async_ppo.warmup_generation_lead_steps",
    ),
    *refused(
        "NeMo RL checkpoints can't be read; set value.model_name to a Hugging Face model, or to value/ of a Headrace checkpoint",
        "ppo.warm_start_value_checkpoint",
    ),
    *_SINGLE_CONTROLLER,
    *LOSS,
    *refused(_GYM, "reward_penalties.*"),
    *refused(_GYM, "reward_penalties.token_ids.**", "reward_penalties.token_ids", fine=_no_tokens),
    *_DISTILLATION,
    *refused(
        "Headrace trains by reinforcement learning; leave this section out",
        *(
            f"{section}.**"
            for section in (
                "sft",
                "dpo",
                "rm",
                "eval",
                "distillation",
                "critic_pretraining",
                "teacher",
                "cross_tokenizer",
            )
        ),
        once=True,
    ),
]
