"""The table of NeMo RL's keys: every key of theirs is decided, every key of ours that it names is there, and the docs say it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.explain import known_keys, pattern
from headrace.config.loading import NEMO_RL_KEYS
from headrace.config.nemo_rl.rules import TABLE
from headrace.config.nemo_rl.translate import IMPLIED
from headrace.config.nemo_rl.values import CONDITIONS, CONVERSIONS

ROOT = Path(__file__).resolve().parents[3]

# NeMo RL's keys, section by section
SHARED = """
num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps val_period val_start_at
val_at_start val_at_end max_val_samples val_batch_size val_num_generations_per_prompt stop_at_validation_metric
stop_at_validation_threshold skip_reference_policy_logprobs_calculation seed overlong_filtering use_dynamic_sampling
dynamic_sampling_max_gen_batches batch_multiplier calculate_advantages_on_gpu seq_logprob_error_threshold
invalid_tool_call_advantage malformed_thinking_advantage deduplicate_multimodal_data debug_payload_metrics
reward_scaling.enabled reward_scaling.source_min reward_scaling.source_max reward_scaling.target_min reward_scaling.target_max
reward_shaping.enabled reward_shaping.overlong_buffer_length reward_shaping.overlong_buffer_penalty
reward_shaping.max_response_length reward_shaping.stop_properly_penalty_coef adv_estimator.name
"""
ASYNC = "enabled max_trajectory_age_steps max_generation_failures in_flight_weight_updates recompute_kv_cache_after_weight_updates"
MODEL = """
model_name tokenizer.name tokenizer.chat_template_kwargs train_global_batch_size train_micro_batch_size max_total_sequence_length
precision make_sequence_length_divisible_by max_grad_norm hf_config_overrides optimizer.name optimizer.kwargs.lr
optimizer.kwargs.weight_decay optimizer.kwargs.betas optimizer.kwargs.eps optimizer.kwargs.foreach optimizer.kwargs.fused scheduler
automodel_cfg.enabled automodel_cfg.tensor_parallel_size automodel_cfg.context_parallel_size automodel_cfg.sequence_parallel
automodel_cfg.activation_checkpointing automodel_cfg.cpu_offload automodel_cfg.custom_parallel_plan automodel_cfg.lora_cfg.enabled
automodel_cfg.lora_cfg.dim automodel_cfg.lora_cfg.alpha automodel_cfg.lora_cfg.dropout automodel_cfg.lora_cfg.dropout_position
automodel_cfg.lora_cfg.lora_A_init automodel_cfg.lora_cfg.target_modules automodel_cfg.lora_cfg.exclude_modules
automodel_cfg.lora_cfg.match_all_linear automodel_cfg.lora_cfg.use_triton megatron_cfg.peft.dim megatron_cfg.peft.alpha
megatron_cfg.peft.dropout megatron_cfg.peft.dropout_position megatron_cfg.peft.lora_A_init_method megatron_cfg.peft.lora_B_init_method
megatron_cfg.peft.target_modules megatron_cfg.peft.exclude_modules megatron_cfg.peft.a2a_experimental megatron_cfg.peft.lora_dtype
megatron_cfg.enabled megatron_cfg.tensor_model_parallel_size megatron_cfg.env_vars.A megatron_cfg.model_overrides.a
megatron_cfg.empty_unused_memory_level megatron_cfg.activation_checkpointing megatron_cfg.recompute_granularity
megatron_cfg.recompute_method megatron_cfg.recompute_num_layers megatron_cfg.recompute_modules
megatron_cfg.num_layers_in_first_pipeline_stage megatron_cfg.num_layers_in_last_pipeline_stage megatron_cfg.pipeline_dtype
megatron_cfg.sequence_parallel megatron_cfg.defer_fp32_logits megatron_cfg.apply_rope_fusion megatron_cfg.bias_activation_fusion
megatron_cfg.force_reconvert_from_hf megatron_cfg.attention_backend megatron_cfg.moe_per_layer_logging
megatron_cfg.moe_enable_deepep megatron_cfg.moe_token_dispatcher_type megatron_cfg.inference_moe_token_dispatcher_type
megatron_cfg.inference_grouped_gemm_backend megatron_cfg.moe_router_num_groups megatron_cfg.moe_router_group_topk
megatron_cfg.transformer_impl megatron_cfg.cuda_graph_impl megatron_cfg.cuda_graph_modules megatron_cfg.cuda_graph_warmup_steps
megatron_cfg.moe_pad_experts_for_cuda_graph_inference megatron_cfg.moe_shared_expert_overlap
megatron_cfg.fine_grained_activation_offloading megatron_cfg.offload_modules megatron_cfg.use_gloo_process_groups
megatron_cfg.moe_grouped_gemm megatron_cfg.moe_flex_dispatcher_backend megatron_cfg.moe_hybridep_num_sms
megatron_cfg.hybridep_num_ranks_per_nvlink_domain megatron_cfg.hybridep_use_mnnvl megatron_cfg.gradient_accumulation_fusion
megatron_cfg.use_fused_weighted_squared_relu megatron_cfg.use_fused_linear_logprobs megatron_cfg.fused_linear_logprobs_chunk_size
megatron_cfg.mtp_num_layers megatron_cfg.clear_memory_caches_before_refit megatron_cfg.moe_permute_fusion
megatron_cfg.allow_unpacked_context_parallel megatron_cfg.converter_type megatron_cfg.checkpoint.async_save
megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32 megatron_cfg.optimizer.bf16 megatron_cfg.optimizer.fp16
megatron_cfg.optimizer.params_dtype megatron_cfg.optimizer.sgd_momentum megatron_cfg.optimizer.use_distributed_optimizer
megatron_cfg.optimizer.use_precision_aware_optimizer megatron_cfg.optimizer.optimizer_cpu_offload
megatron_cfg.optimizer.optimizer_offload_fraction megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d
megatron_cfg.moe_hybridep_prepad_packed_inputs megatron_cfg.moe_hybridep_pad_uneven_dispatch_inputs
megatron_cfg.moe_mlp_glu_interleave_size megatron_cfg.use_transformer_engine_op_fuser megatron_cfg.inference_cuda_graph_scope
megatron_cfg.radio_force_cpe_eval_mode megatron_cfg.freeze_vision_model megatron_cfg.freeze_vision_projection
megatron_cfg.freeze_sound_encoder megatron_cfg.freeze_sound_projection megatron_cfg.freeze_config.freeze_language_model
megatron_cfg.fp8_cfg.fp8 megatron_cfg.fp8_cfg.fp8_recipe megatron_cfg.fp8_cfg.fp8_param megatron_cfg.fp8_cfg.force_clear_fp8_caches
megatron_cfg.fp8_cfg.fp8_quantizer_factory megatron_cfg.fp4_cfg.enabled megatron_cfg.fp4_cfg.fp4 megatron_cfg.fp4_cfg.fp4_recipe
megatron_cfg.fp4_cfg.fp4_param megatron_cfg.te_precision_config_file megatron_cfg.first_last_layers_bf16
megatron_cfg.num_layers_at_start_in_bf16 megatron_cfg.num_layers_at_end_in_bf16 megatron_cfg.fp32_lm_head
megatron_cfg.layernorm_epsilon megatron_cfg.train_iters megatron_cfg.mtp_loss_scaling_factor megatron_cfg.mtp_use_repeated_layer
megatron_cfg.mtp_detach_heads megatron_cfg.scheduler.start_weight_decay megatron_cfg.scheduler.end_weight_decay
megatron_cfg.scheduler.weight_decay_incr_style megatron_cfg.optimizer.optimizer
automodel_cfg.automodel_kwargs.use_liger_kernel automodel_cfg.automodel_kwargs.force_hf
automodel_cfg.automodel_kwargs.backend._target_ automodel_cfg.automodel_kwargs.backend.attn automodel_cfg.automodel_kwargs.backend.linear
automodel_cfg.automodel_kwargs.backend.rms_norm automodel_cfg.automodel_kwargs.backend.experts
automodel_cfg.automodel_kwargs.backend.dispatcher automodel_cfg.automodel_kwargs.backend.enable_deepep
automodel_cfg.automodel_kwargs.backend.rope_fusion automodel_cfg.automodel_kwargs.backend.fake_balanced_gate
automodel_cfg.automodel_kwargs.backend.enable_hf_state_dict_adapter automodel_cfg.automodel_kwargs.backend.enable_fsdp_optimizations
automodel_cfg.automodel_kwargs.backend.gate_precision automodel_cfg.automodel_kwargs.freeze_config.freeze_vision_tower
automodel_cfg.automodel_kwargs.freeze_config.freeze_audio_tower automodel_cfg.automodel_kwargs.freeze_config.freeze_language_model
automodel_cfg.moe_parallelizer.ignore_router_for_ac automodel_cfg.moe_parallelizer.reshard_after_forward
automodel_cfg.moe_parallelizer.lm_head_precision automodel_cfg.moe_parallelizer.wrap_outer_model
automodel_cfg._v2 automodel_cfg.env_vars.A automodel_cfg.expert_parallel_size automodel_cfg.dp_replicate_size
automodel_cfg.defer_fsdp_grad_sync automodel_cfg.clear_cache_every_n_steps
megatron_cfg.pipeline_model_parallel_size megatron_cfg.context_parallel_size megatron_cfg.expert_model_parallel_size
megatron_cfg.expert_tensor_parallel_size megatron_cfg.freeze_moe_router megatron_cfg.moe_router_dtype
megatron_cfg.moe_router_load_balancing_type megatron_cfg.fp8_cfg.enabled megatron_cfg.peft.enabled megatron_cfg.optimizer.lr
megatron_cfg.optimizer.min_lr megatron_cfg.optimizer.weight_decay megatron_cfg.optimizer.adam_beta1
megatron_cfg.optimizer.adam_beta2 megatron_cfg.optimizer.adam_eps megatron_cfg.optimizer.clip_grad
megatron_cfg.scheduler.lr_warmup_iters megatron_cfg.scheduler.lr_warmup_init megatron_cfg.scheduler.lr_decay_style
megatron_cfg.scheduler.lr_decay_iters dynamic_batching.enabled dynamic_batching.train_mb_tokens
dynamic_batching.logprob_mb_tokens dynamic_batching.sequence_length_round sequence_packing.enabled
sequence_packing.train_mb_tokens sequence_packing.logprob_mb_tokens sequence_packing.algorithm
sequence_packing.sequence_length_round
"""
SOURCE = "dataset_name data_path input_key output_key subset split split_validation_size seed repeat prompt_file system_prompt_file"
KEYS = {
    "grpo": SHARED,
    "grpo ": "normalize_rewards use_leave_one_out_baseline advantage_clip_low advantage_clip_high",
    "grpo.adv_estimator": "normalize_rewards use_leave_one_out_baseline minus_baseline reward_weights",
    "grpo.async_grpo": ASYNC,
    "reward_penalties": "penalize_duplicated_reasoning penalize_empty_final_answer penalize_unwanted_tokens "
    "penalize_malformed_think_tag token_ids",
    "ppo": SHARED,
    "ppo ": "ppo_epochs critic_ppo_epochs policy_training_start_step warm_start_value_checkpoint",
    "ppo.adv_estimator": "gae_lambda gae_gamma normalize_advantages gae_lambda_value gae_lambda_policy length_adaptive_alpha",
    "ppo.async_ppo": "enabled max_trajectory_age_steps warmup_generation_lead_steps in_flight_weight_updates "
    "recompute_kv_cache_after_weight_updates drop_incomplete_targets_on_restore",
    "async_rl": "sampler.name sampler.max_lookahead_versions sampler.max_staleness_versions sampler.sample_freshest_first "
    "sampler.target min_groups_for_streaming_train max_inflight_prompts max_buffered_rollouts "
    "recompute_kv_cache_after_weight_updates diagnostics rollout_failure.max_skipped_prompts "
    "rollout_failure.native.generation_timeout_s stall_watchdog.interval_s generation_fleet_health.enabled "
    "generation_router.enabled",
    "loss_fn": "reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value ratio_clip_min "
    "ratio_clip_max ratio_clip_c use_on_policy_kl_approximation use_importance_sampling_correction "
    "truncated_importance_sampling_type truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min "
    "sequence_level_importance_ratios token_level_loss force_on_policy_ratio use_kl_in_reward use_cispo disable_ppo_ratio "
    "positive_example_nll_weight",
    "value_loss_fn": "scale cliprange",
    "policy": MODEL + " logprob_batch_size generation_batch_size logprob_chunk_size offload_optimizer_for_logprob "
    "tokenizer.use_fastokens draft.enabled draft.loss_weight router_replay.enabled",
    "policy.generation": "backend max_new_tokens temperature top_p top_k val_temperature val_top_p val_top_k stop_token_ids "
    "stop_strings refit_transport port_range_low colocated.enabled colocated.resources.num_nodes vllm_cfg.async_engine "
    "vllm_cfg.precision vllm_cfg.kv_cache_dtype vllm_cfg.logprobs_mode vllm_cfg.tensor_parallel_size "
    "vllm_cfg.pipeline_parallel_size vllm_cfg.expert_parallel_size vllm_cfg.gpu_memory_utilization vllm_cfg.enforce_eager "
    "vllm_cfg.max_model_len vllm_cfg.enable_vllm_metrics_logger vllm_cfg.vllm_metrics_logger_interval "
    "vllm_cfg.num_first_layers_in_bf16 vllm_cfg.num_last_layers_in_bf16 vllm_kwargs",
    "value": MODEL + " reward_model_cfg.enabled reward_model_cfg.reward_model_type",
    "data": "max_input_seq_length shuffle num_workers use_multiple_dataloader num_prompts_per_dataloader custom_dataloader",
    "data.train.0": SOURCE + " processor env_name",
    "data.validation.0": SOURCE + " processor env_name",
    "data.default": SOURCE + " processor env_name",
    "env": "math.num_workers math.math_verify_impl math.verifier_type math_multi_reward.num_workers "
    "math_multi_reward.math_verify_impl code code_jaccard vlm nemo_gym "
    "reward_model.enabled reward_model.model_name reward_model.tokenizer.name reward_model.precision reward_model.batch_size "
    "reward_model.checkpoint_path reward_model.max_model_len reward_model.resources.gpus_per_node reward_model.dtensor_cfg.enabled",
    "logger": "log_dir wandb_enabled tensorboard_enabled mlflow_enabled swanlab_enabled monitor_gpus num_val_samples_to_print "
    "wandb.project wandb.name swanlab.project mlflow.experiment_name mlflow.run_name gpu_monitoring.collection_interval "
    "gpu_monitoring.flush_interval",
    "checkpointing": "enabled checkpoint_dir metric_name higher_is_better keep_top_k save_period ft_save_period ft_keep_latest_k "
    "checkpoint_must_save_by save_optimizer model_save_format save_consolidated",
    "cluster": "gpus_per_node num_nodes master_port_range_low segment_size",
    "data_plane": "enabled impl",
    "on_policy_distillation": "enabled teacher_model_by_agent_name.default_teacher default_teacher_alias strict_agent_name_match "
    "deduplicate_shared_teacher_checkpoints non_colocated_teachers.enabled non_colocated_teachers.default_teacher_cfg.num_nodes "
    "full.enabled full.teacher_payload",
}


@pytest.mark.parametrize("section", KEYS)
def test_every_key_of_theirs_is_decided(section: str) -> None:
    keys = [tuple(f"{section.strip()}.{key}".split(".")) for key in KEYS[section].split()]
    assert [".".join(key) for key in keys if TABLE.find(key) is None] == []


def test_every_key_of_ours_that_the_table_names_is_there() -> None:
    named = {rule.target(rule.parts) for rule in TABLE.rules if rule.does in ("used", "renamed")}
    # `*` stands for the number of a data set
    named |= {tuple(key.split(".")) for key in IMPLIED}
    assert sorted(".".join(key) for key in named if pattern(key) not in known_keys()) == []


def test_every_row_says_what_it_has_to() -> None:
    for rule in TABLE.rules:
        assert rule.does in ("used", "renamed", "replaced", "refused"), rule.key
        assert "<" not in rule.key + rule.to, rule.key
        assert bool(rule.to) == (rule.does == "renamed"), rule.key
        assert rule.says or rule.does in ("used", "renamed"), rule.key
        assert not rule.says.endswith("."), rule.key
        assert "**" not in rule.parts[:-1], rule.key


def test_every_function_that_rows_can_name_is_named() -> None:
    assert {*CONVERSIONS.values()} <= {rule.convert for rule in TABLE.rules}
    assert {*CONDITIONS.values()} <= {rule.fine for rule in TABLE.rules}


def test_no_key_is_decided_twice() -> None:
    keys = [rule.key for rule in TABLE.rules]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []


def test_no_file_of_ours_has_the_marks_of_theirs() -> None:
    assert not {tuple(key.split(".")) for key in NEMO_RL_KEYS} & known_keys().keys()


def test_the_page_is_current(tmp_path: Path) -> None:
    fresh = tmp_path / "from-nemo-rl.md"
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_nemo_rl.py", fresh], check=True)
    assert fresh.read_text() == (ROOT / "docs" / "from-nemo-rl.md").read_text(), "run `make docs`"
