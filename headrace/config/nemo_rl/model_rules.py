"""Rules for `policy` and `value`: the model, how it is trained in parallel, and how it generates."""

from __future__ import annotations

from typing import Any

from headrace.config.nemo_rl.rules import Rule, Whole, look, names, off, only, refused, renamed, replaced, used

PARALLEL = "FSDP2 shards the model over trainer.num_processes ranks (torchrun); sharding does not change the numbers"
_OFFLOAD = "the trainer has its own GPUs, so nothing is offloaded for generation"
_KERNELS = "torch and transformers choose the kernels; the mathematics is the same"
_ROUTER_COMPUTES = "the router computes like transformers' model"
_ROUTER = "only the policy's loss trains the router of a mixture of experts"


_TEXT_ALONE = "only the language model is trained"
_NO_FP8 = "training in fp8 or fp4 is not supported; set it to false"


def _precision_is(section: str) -> Any:
    """Return a check that a type is the one that the model is trained in."""

    def fine(value: Any, whole: Whole) -> bool:
        name = value.removeprefix("torch.") if isinstance(value, str) else value
        return off(value, whole) or name in ("auto", look(whole, f"{section}.precision"))

    return fine


def _frozen(at: str) -> list[Rule]:
    """Rules for frozen parts: those of images and sound do not exist here; the language model can't be frozen."""
    return [
        *replaced(
            _TEXT_ALONE,
            *names(
                at,
                "freeze_vision_* freeze_sound_* freeze_audio_* freeze_vision_model freeze_vision_tower freeze_vision_projection "
                "freeze_sound_encoder freeze_sound_projection freeze_audio_tower",
            ),
        ),
        *refused(
            "the language model can't be frozen, since it is what is trained; set it to false",
            f"{at}.freeze_language_model",
        ),
    ]


def _dense(section: str) -> Any:
    """Return a check that is true if nothing indicates a mixture of experts: no experts are spread over ranks."""

    def fine(value: Any, whole: Whole) -> bool:
        spread = (
            look(whole, f"{section}.megatron_cfg.expert_model_parallel_size", 1),
            look(whole, f"{section}.automodel_cfg.expert_parallel_size", 1),
        )
        return off(value, whole) or all(size in (None, 1) for size in spread)

    return fine


def _precision(value: Any) -> Any:
    if value == "fp8":
        raise ValueError("'fp8': rollouts have the dtype of the weights; set it to bfloat16")
    return value


def _kv_cache_dtype(value: Any) -> Any:
    return "fp8" if value == "fp8_e4m3" else value  # two names of the same type


def _max_length(section: str) -> Any:
    def fine(value: Any, whole: Whole) -> bool:
        return value is None or value == look(whole, f"{section}.max_total_sequence_length")

    return fine


def _fused_adam(value: Any) -> Any:
    """Convert Transformer Engine's fused Adam, which decouples weight decay, to AdamW."""
    return "torch.optim.AdamW" if isinstance(value, str) and value.endswith(".FusedAdam") else value


def _optimizer(section: str) -> list[Rule]:
    return [
        *used(f"{section}.optimizer", "name", "FusedAdam of Transformer Engine is torch.optim.AdamW", _fused_adam),
        *replaced(
            "weights and the optimizer's state are float32, sharded",
            *names(
                f"{section}.optimizer.kwargs",
                "master_weights master_weight_dtype store_param_remainders exp_avg_dtype exp_avg_sq_dtype",
            ),
        ),
        *used(f"{section}.optimizer.kwargs", "lr weight_decay betas eps foreach fused"),
        *used(section, "scheduler", "the list of torch's schedulers, with its milestones"),
        *used(section, "max_grad_norm"),
    ]


def _activation_checkpointing(section: str, at: str) -> list[Rule]:
    if section == "policy":
        return [renamed(f"{at}.activation_checkpointing", "policy.activation_checkpointing")]
    return replaced("policy.activation_checkpointing applies to both models", f"{at}.activation_checkpointing")


def _lora(section: str, at: str, init: str, layers: list[Rule]) -> list[Rule]:
    """Return the rules for an adapter in section `at`. `init` is its key for the initialization of A; `layers` are the policy's rules for
    which layers have one."""
    if section != "policy":
        return [
            *refused("all weights of the value model are trained; set it to false", f"{at}.enabled"),
            *replaced("no adapter", f"{at}.**"),
        ]
    return [
        *layers,
        *(renamed(f"{at}.{key}", f"policy.lora_cfg.{key}") for key in ("enabled", "dim", "alpha", "dropout")),
        renamed(f"{at}.{init}", "policy.lora_cfg.init"),
        *refused(
            "dropout applies to the adapter's inputs; set it to pre, or dropout to 0",
            f"{at}.dropout_position",
            fine=lambda value, whole: (
                value in (None, "pre")
                or not any(look(whole, f"{name}.dropout") for name in (at, at.replace("automodel_cfg", "dtensor_cfg")))
            ),
        ),
        *replaced(_KERNELS, f"{at}.use_triton", f"{at}.a2a_experimental"),
        *replaced("an adapter is float32, like all trained weights", f"{at}.lora_dtype"),
        *refused("B is 0 at the start; set it to zero", f"{at}.lora_B_init_method", fine=only("zero")),
    ]


def _automodel(section: str) -> list[Rule]:
    at = f"{section}.automodel_cfg"
    return [
        *_activation_checkpointing(section, at),
        *replaced(
            PARALLEL,
            *names(
                at,
                "enabled _v2 tensor_parallel_size context_parallel_size sequence_parallel expert_parallel_size "
                "pipeline_parallel_size data_parallel_size dp_replicate_size custom_parallel_plan defer_fsdp_grad_sync "
                "env_vars.** mesh_axes fsdp_reshard_after_forward reshard_after_forward clear_cache_every_n_steps "
                "moe_parallelizer.ignore_router_for_ac moe_parallelizer.reshard_after_forward moe_parallelizer.wrap_outer_model "
                "moe_mesh.**",
            ),
        ),
        *refused(
            "the output layer has the precision of the model (policy.precision); leave it out",
            f"{at}.moe_parallelizer.lm_head_precision",
            fine=_precision_is(section),
        ),
        *replaced(_OFFLOAD, f"{at}.cpu_offload"),
        *replaced(
            _KERNELS,
            *names(
                f"{at}.automodel_kwargs",
                "use_liger_kernel use_sdpa_patching sdpa_method attn_implementation force_hf",
            ),
        ),
        *(
            rule
            for backend in ("automodel_kwargs.backend", "backend")
            for rule in _automodel_backend(f"{at}.{backend}")
        ),
        *_frozen(f"{at}.automodel_kwargs.freeze_config"),
        *refused(
            "only the router can be frozen (policy.freeze_moe_router); leave it out",
            f"{at}.automodel_kwargs.freeze_config.freeze_modules",
        ),
        *refused(
            "policy.precision sets the type; leave it out",
            f"{at}.automodel_kwargs.torch_dtype",
            f"{at}.automodel_kwargs.dtype",
            fine=_precision_is(section),
        ),
        *replaced(
            "every checkpoint is complete, in safetensors that transformers loads",
            *names(at, "model_save_format save_consolidated single_rank_consolidation consolidation_timeout_minutes"),
        ),
        *_lora(
            section,
            f"{at}.lora_cfg",
            "lora_A_init",
            [
                renamed(f"{at}.lora_cfg.target_modules", "policy.lora_cfg.target_modules"),
                renamed(f"{at}.lora_cfg.exclude_modules", "policy.lora_cfg.exclude_modules"),
                *replaced(
                    "policy.lora_cfg.target_modules; an empty list means all linear layers",
                    f"{at}.lora_cfg.match_all_linear",
                ),
            ],
        ),
        *refused(_NO_FP8, f"{at}.fp8_cfg.enabled", f"{at}.fp8.enabled"),
        *replaced(
            "no fp8",
            *(
                key
                for fp8 in ("fp8_cfg", "fp8")
                for key in names(
                    f"{at}.{fp8}",
                    "recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
                    "force_recompute_fp8_weight_in_bwd filter_fqns emulate",
                )
            ),
        ),
    ]


def _automodel_backend(at: str) -> list[Rule]:
    return [
        *replaced(
            _KERNELS,
            *names(
                at,
                "_target_ attn linear rms_norm rope_fusion experts dispatcher dispatcher_num_sms dispatcher_share_token_dispatcher "
                "dispatcher_async_dispatch enable_deepep enable_hf_state_dict_adapter enable_fsdp_optimizations",
            ),
        ),
        *replaced(_ROUTER_COMPUTES, f"{at}.gate_precision"),
        *refused(
            "a fake router is only for benchmarks; leave it out",
            f"{at}.fake_balanced_gate",
            f"{at}.fake_gate_noise",
            fine=only(0),
        ),
        *refused(_NO_FP8, f"{at}.te_fp8"),
    ]


def _megatron(section: str) -> list[Rule]:
    """Return the rules for `megatron_cfg`. If it is enabled, optimizer and schedule are Megatron's; otherwise none of it is read."""
    at = f"{section}.megatron_cfg"
    return [
        *(
            renamed(f"{at}.optimizer.{theirs}", f"{section}.optimizer.kwargs.{ours}", gathered=True)
            for theirs, ours in (("lr", "lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps"))
        ),
        *(
            renamed(f"{at}.scheduler.{key}", f"{section}.optimizer.kwargs.weight_decay", says, gathered=True)
            for key in ("start_weight_decay", "end_weight_decay")
            for says in ("it overrides the optimizer's, and must not change",)
        ),
        *(
            renamed(f"{at}.optimizer.{beta}", f"{section}.optimizer.kwargs.betas", gathered=True)
            for beta in ("adam_beta1", "adam_beta2")
        ),
        renamed(f"{at}.optimizer.clip_grad", f"{section}.max_grad_norm"),
        *refused(
            "only adam is supported, Megatron's name of AdamW; set it to adam",
            f"{at}.optimizer.optimizer",
            fine=only("adam"),
        ),
        *replaced("the optimizer is AdamW", f"{at}.optimizer.sgd_momentum"),
        *replaced(
            "policy.precision and float32 master weights; the optimizer's state is on the GPU, sharded",
            *names(
                f"{at}.optimizer",
                "bf16 fp16 params_dtype main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders "
                "use_distributed_optimizer use_layer_wise_distributed_optimizer use_megatron_fsdp use_precision_aware_optimizer "
                "overlap_param_gather overlap_param_gather_with_optimizer_step optimizer_cpu_offload optimizer_offload_fraction "
                "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
            ),
        ),
        *(
            renamed(f"{at}.scheduler.{key}", f"{section}.scheduler", gathered=True)
            for key in ("lr_warmup_iters", "lr_warmup_init", "lr_decay_style", "lr_decay_iters")
        ),
        renamed(f"{at}.optimizer.min_lr", f"{section}.scheduler", "where a decay ends", gathered=True),
        *replaced("weight decay is constant", f"{at}.scheduler.weight_decay_incr_style"),
        *refused("schedules count steps; give lr_warmup_iters and lr_decay_iters", f"{at}.scheduler.**"),
        *_activation_checkpointing(section, at),
        *refused(_NO_FP8, f"{at}.fp8_cfg.enabled", f"{at}.fp4_cfg.enabled"),
        *replaced(
            "no fp8",
            *names(
                at,
                "fp8_cfg.fp8 fp8_cfg.fp8_recipe fp8_cfg.fp8_param fp8_cfg.fp8_quantizer_factory fp8_cfg.force_clear_fp8_caches "
                "fp4_cfg.fp4 fp4_cfg.fp4_recipe fp4_cfg.fp4_param first_last_layers_bf16 num_layers_at_start_in_bf16 "
                "num_layers_at_end_in_bf16 moe_router_padding_for_fp8 moe_router_padding_for_quantization",
            ),
        ),
        *refused("a precision for each layer is not supported; leave it out", f"{at}.te_precision_config_file"),
        *refused(
            "the output layer has the precision of the model (policy.precision); set it to false",
            f"{at}.fp32_lm_head",
            fine=lambda value, whole: off(value, whole) or look(whole, f"{section}.precision") == "float32",
        ),
        *_frozen(at),
        *_frozen(f"{at}.freeze_config"),
        *replaced(_TEXT_ALONE, f"{at}.radio_force_cpe_eval_mode"),
        *replaced("max_num_steps of grpo or ppo", f"{at}.train_iters"),
        *refused("elastic models are not supported; leave it out", f"{at}.flex_routers", f"{at}.flextron_*"),
        *refused(
            "the model's own configuration sets it; write rms_norm_eps in policy.hf_config_overrides",
            f"{at}.layernorm_epsilon",
        ),
        *_lora(
            section,
            f"{at}.peft",
            "lora_A_init_method",
            refused(
                "Megatron's layer names differ from those in the model's files; give those in policy.lora_cfg, or leave it out for all",
                f"{at}.peft.target_modules",
                f"{at}.peft.exclude_modules",
            ),
        ),
        *refused("multi-token prediction is not supported; set it to 0", f"{at}.mtp_num_layers", fine=only(0)),
        *refused(
            "multi-token prediction is not supported",
            *(f"{at}.mtp_{key}" for key in ("loss_scaling_factor", "use_repeated_layer", "detach_heads")),
            fine=lambda value, whole: not look(whole, f"{at}.mtp_num_layers"),
        ),
        renamed(f"{at}.freeze_moe_router", f"{section}.freeze_moe_router"),
        *refused(
            f"{_ROUTER}; set it to 0",
            f"{at}.moe_router_bias_update_rate",
            f"{at}.moe_aux_loss_coeff",
            fine=lambda value, whole: value == 0 or _dense(section)(value, whole),
        ),
        *refused(
            f"{_ROUTER}; set it to none",
            f"{at}.moe_router_load_balancing_type",
            fine=lambda value, whole: value == "none" or _dense(section)(value, whole),
        ),
        *replaced("policy.logprob_chunk_size", f"{at}.use_linear_ce_fusion_loss", f"{at}.linear_ce_fusion_chunk_size"),
        *refused(
            "the model's own configuration decides it; set it in policy.hf_config_overrides",
            *names(at, "model_overrides.** moe_router_* moe_z_loss_coeff moe_*capacity* moe_*drop*"),
        ),
        *replaced(
            _ROUTER_COMPUTES,
            *names(at, "moe_router_dtype moe_router_fusion moe_router_enable_expert_bias"),
        ),
        *replaced(
            PARALLEL,
            *names(
                at,
                "enabled tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size sequence_parallel "
                "expert_model_parallel_size expert_tensor_parallel_size virtual_pipeline_model_parallel_size "
                "dynamic_context_parallel.** distributed_data_parallel_config.** num_layers_in_first_pipeline_stage "
                "num_layers_in_last_pipeline_stage pipeline_dtype pipeline_model_parallel_layout pipeline_model_parallel_comm_backend "
                "pipeline_model_parallel_split_rank hierarchical_context_parallel_sizes allow_unpacked_context_parallel "
                "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split expert_model_parallel_num_sms "
                "data_parallel_size use_gloo_process_groups nccl_communicator_config_path nccl_ub env_vars.** tp_comm_overlap "
                "overlap_p2p_comm overlap_moe_expert_parallel_comm moe_shared_expert_overlap hybridep_num_ranks_per_nvlink_domain "
                "hybridep_use_mnnvl",
            ),
        ),
        *replaced(
            _KERNELS,
            *names(
                at,
                "attention_backend defer_fp32_logits params_dtype use_fused_linear_logprobs fused_linear_logprobs_chunk_size "
                "use_fused_weighted_squared_relu apply_rope_fusion bias_activation_fusion bias_dropout_fusion bias_swiglu_fusion "
                "masked_softmax_fusion gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl moe_permute_fusion "
                "moe_grouped_gemm moe_use_legacy_grouped_gemm moe_enable_deepep moe_deepep_num_sms moe_token_dispatcher_type "
                "moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_hybridep_prepad_packed_inputs "
                "moe_hybridep_pad_uneven_dispatch_inputs moe_mlp_glu_interleave_size moe_apply_probs_on_input moe_layer_recompute "
                "moe_pad_experts_for_cuda_graph_inference inference_moe_token_dispatcher_type inference_grouped_gemm_backend "
                "inference_cuda_graph_scope enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope cuda_graph_modules "
                "cuda_graph_warmup_steps transformer_impl use_transformer_engine_op_fuser te_rng_tracker use_te_rng_tracker "
                "use_te_activation_func",
            ),
        ),
        *replaced(
            "policy.activation_checkpointing recomputes whole layers; nothing is offloaded",
            *names(
                at,
                "recompute_granularity recompute_method recompute_num_layers recompute_modules distribute_saved_activations "
                "fine_grained_activation_offloading offload_modules cpu_offloading cpu_offloading_num_layers "
                "cpu_offloading_activations cpu_offloading_weights clear_memory_caches_before_refit empty_unused_memory_level",
            ),
        ),
        *replaced(
            "models are loaded and saved as Hugging Face safetensors",
            *names(
                at, "converter_type megatron_recipe force_reconvert_from_hf force_overwrite_initial_ckpt checkpoint.**"
            ),
        ),
        *replaced("the trainer's own metrics", *names(at, "moe_per_layer_logging track_moe_metrics")),
    ]


_ROWS = "rows are padded to their longest sequence, or packed, and lengths need not be divisible"

POLICY = [
    *used(
        "policy",
        "model_name train_global_batch_size train_micro_batch_size logprob_batch_size max_total_sequence_length precision "
        "logprob_chunk_size",
    ),
    *used("policy.tokenizer", "name chat_template_kwargs"),
    *replaced("tokenizers are transformers' own, the fast ones where they exist", "policy.tokenizer.use_fastokens"),
    *refused(
        "models for images, audio and video are not supported; use a text model",
        "policy.tokenizer.is_tokenizer_processor",
    ),
    *refused(
        "a custom template belongs in the tokenizer; save a tokenizer with it and name that in policy.tokenizer.name",
        "policy.tokenizer.chat_template",
        fine=lambda value, whole: value == "default",
    ),
    *_optimizer("policy"),
    *used("policy.dynamic_batching", "enabled train_mb_tokens logprob_mb_tokens sequence_length_round"),
    *used("policy.sequence_packing", "enabled train_mb_tokens logprob_mb_tokens sequence_length_round algorithm"),
    *replaced(
        "micro-batches come in the packer's order, and the loss is computed once per row",
        "policy.sequence_packing.microbatch_order",
        "policy.sequence_packing.fuse_loss",
    ),
    *refused(
        "custom workers can't be loaded; leave it out",
        "policy.worker_extension_cls_fqn",
        "policy.generation.worker_extension_cls_fqn",
    ),
    *replaced(_ROWS, "policy.make_sequence_length_divisible_by"),
    *replaced("rollout.max_concurrent_groups", "policy.generation_batch_size"),
    *replaced(_OFFLOAD, "policy.offload_optimizer_for_logprob", "policy.fsdp_offload_enabled"),
    *replaced("weights are sent in buckets of weight_channel.bucket_bytes", "policy.refit_buffer_size_gb"),
    renamed(
        "policy.activation_checkpointing_enabled", "policy.activation_checkpointing", "its name in the first releases"
    ),
    *_automodel("policy"),
    *_megatron("policy"),
    *refused("draft models are not supported; set it to false", "policy.draft.enabled"),
    *replaced("no draft model", "policy.draft.**"),
    *refused("router replay is not supported; set it to false", "policy.router_replay.enabled"),
    *replaced("no router is replayed", "policy.router_replay.**"),
    *refused("a policy is a causal language model; set it to false", "policy.reward_model_cfg.enabled"),
    *replaced("only for reward models", "policy.reward_model_cfg.**"),
    *refused("models for images, audio and video are not supported; use a text model", "policy.is_vlm"),
    *used("policy", "hf_config_overrides"),
]

_ENGINE = "left to vLLM"

GENERATION = [
    *used(
        "policy.generation",
        "max_new_tokens temperature top_p top_k val_temperature val_top_p val_top_k stop_token_ids stop_strings",
    ),
    *replaced("completions are generated by vLLM", "policy.generation.backend"),
    *used("policy.generation.vllm_cfg", "tensor_parallel_size gpu_memory_utilization enforce_eager"),
    *used("policy.generation.vllm_cfg", "precision", "float32, bfloat16 or float16; fp8 is refused", _precision),
    *replaced("replicas are always asynchronous", "policy.generation.vllm_cfg.async_engine"),
    *replaced(
        "vllm_cfg.tensor_parallel_size shards a replica, and rollout.replicas adds more of them",
        *(
            f"policy.generation.vllm_cfg.{key}"
            for key in (
                "pipeline_parallel_size",
                "expert_parallel_size",
                "data_parallel_size",
                "enable_expert_parallel",
            )
        ),
    ),
    *refused(
        "policy.max_total_sequence_length bounds prompt and completion together; give max_model_len that value",
        "policy.generation.vllm_cfg.max_model_len",
        fine=_max_length("policy"),
    ),
    *used("policy.generation.vllm_cfg", "kv_cache_dtype", "auto, bfloat16 or fp8", _kv_cache_dtype),
    *refused(
        "rollout log-probabilities are those with which the tokens were sampled; set it to processed_logprobs",
        "policy.generation.vllm_cfg.logprobs_mode",
        fine=only("processed_logprobs"),
    ),
    *refused(
        "rollouts use vllm_cfg.precision in every layer; set it to 0",
        "policy.generation.vllm_cfg.num_first_layers_in_bf16",
        "policy.generation.vllm_cfg.num_last_layers_in_bf16",
        fine=lambda value, whole: (
            off(value, whole) or value == 0 or look(whole, "policy.generation.vllm_cfg.precision") != "fp8"
        ),
    ),
    *replaced(
        "weights arrive through weight_channel, and a replica verifies them by log-probabilities",
        "policy.generation.vllm_cfg.refit_with_reload_api",
        "policy.generation.vllm_cfg.load_format",
        "policy.generation.vllm_cfg.*refit*",
        "policy.generation.refit*.**",
        "policy.generation.real_quant_*",
    ),
    *replaced(
        "each replica's /metrics, and the dashboard",
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger",
        "policy.generation.vllm_cfg.vllm_metrics_logger_interval",
        "policy.generation.vllm_cfg.use_tqdm",
    ),
    *replaced(
        "each replica serves /v1/chat/completions and /v1/completions",
        "policy.generation.vllm_cfg.expose_http_server",
        "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.**",
        "policy.generation.vllm_cfg.http_server_serving_chat_kwargs",
    ),
    *replaced(
        _ENGINE,
        *names(
            "policy.generation.vllm_cfg",
            "use_deep_gemm use_activation_scale pow2_activation_scaling_factors pow2_weight_scaling_factors is_mx "
            "skip_tokenizer_init env_vars.** compilation_config.** sleep_level quantization_* enable_prefix_caching "
            "enable_chunked_prefill reset_encoder_cache_after_weight_update",
        ),
    ),
    *(
        renamed(
            f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs.{parser}",
            f"policy.generation.vllm_cfg.{parser}",
        )
        for parser in ("tool_parser", "reasoning_parser")
    ),
    renamed("policy.generation.vllm_kwargs.max_num_seqs", "policy.generation.vllm_cfg.max_num_seqs"),
    *replaced(
        "it changes only the speed, not the completions",
        "policy.generation.vllm_kwargs.speculative_config.**",
    ),
    *replaced(
        _ENGINE,
        *names(
            "policy.generation.vllm_kwargs",
            "compilation_config.** max_num_batched_tokens attention_backend moe_backend "
            "enable_chunked_prefill enable_prefix_caching disable_custom_all_reduce block_size all2all_backend "
            "enable_expert_parallel mamba_ssm_cache_dtype swap_space *_backend",
        ),
    ),
    *refused(
        "arguments that may change vLLM's samples are not passed on; leave it out",
        "policy.generation.vllm_kwargs.**",
        "policy.generation.vllm_kwargs",
    ),
    *replaced(
        "completions are generated by vLLM",
        *names("policy.generation", "mcore_generation_config.** sglang_*.** trtllm_*.** dynamo_*.** megatron_*.**"),
    ),
    *replaced(
        "generation and training run in separate processes: rollout.replicas on one machine, or `headrace rollout` on any number",
        "policy.generation.colocated.**",
    ),
    *replaced(
        "rollout.port",
        "policy.generation.port_range_*",
        "policy.generation.ports.**",
    ),
]

VALUE = [
    *used("value", "model_name train_global_batch_size train_micro_batch_size precision"),
    *_optimizer("value"),
    *replaced("the policy's tokenizer", "value.tokenizer.**"),
    *used("value", "hf_config_overrides"),
    *refused(
        "the value model reads the policy's sequences; set it to the value of policy.max_total_sequence_length",
        "value.max_total_sequence_length",
        fine=lambda value, whole: value is None or value == look(whole, "policy.max_total_sequence_length"),
    ),
    *replaced("the policy's: policy.logprob_batch_size", "value.logprob_batch_size"),
    *replaced(_ROWS, "value.make_sequence_length_divisible_by"),
    *replaced(
        "always a regression head on the backbone",
        "value.reward_model_cfg.enabled",
    ),
    *refused(
        "the head is a regression head; set it to regression",
        "value.reward_model_cfg.reward_model_type",
        fine=only("regression"),
    ),
    *replaced(
        "the value model is batched like the policy: policy.dynamic_batching, policy.sequence_packing",
        "value.dynamic_batching.**",
        "value.sequence_packing.**",
    ),
    *replaced(_OFFLOAD, "value.offload_optimizer_for_logprob"),
    *_automodel("value"),
    *_megatron("value"),
]
