"""The keys of TRL's `GRPOConfig`, `GRPOTrainer` and `LoraConfig` (TRL 1.16), and what each is here."""

from __future__ import annotations

from headrace.config.migrate.draft import NO_SUCH_LOSS, Row, direct, missing, replaced, used

_GPU = "headrace plans devices itself (`rollout`, `trainer`; docs/gpu.md)"
_HUB = "`headrace export RUN -o DIR` writes a model that can be uploaded"
_LOG = "metrics.jsonl has every step, and samples have every trajectory (docs/watching.md)"
_SEVERAL = "several reward functions"
_BATCH = "grpo.num_prompts_per_step, policy.train_global_batch_size, policy.train_micro_batch_size"
_OPTIMIZER = "the optimizer is AdamW or Adam: policy.optimizer"
_SCHEDULE = "policy.scheduler"
_PEFT = "an adapter (use_peft, LoraConfig)"
_VLLM = "use_vllm and vllm_importance_sampling_correction"
_TIS = "loss_fn.use_importance_sampling_correction and loss_fn.truncated_importance_sampling_*"

TABLE: tuple[Row, ...] = (
    # the trainer's arguments
    *used("model model_name_or_path", "policy.model_name"),
    *used("reward_funcs", "env.NAME.target, and a `combine` of several"),
    *used("reward_model_name_or_path", "env.NAME of type reward_model"),
    *used("train_dataset dataset_name", "data.train"),
    *used("dataset_config dataset_train_split", "data.train", only_with="dataset_name"),
    *used("eval_dataset", "data.validation"),
    *used("dataset_test_split", "data.validation", only_with="dataset_name and eval_strategy"),
    *used("peft_config use_peft", "policy.lora_cfg.enabled"),
    *used("r lora_r", "policy.lora_cfg.dim", only_with=_PEFT),
    *used("lora_alpha", "policy.lora_cfg.alpha", only_with=_PEFT),
    *used("lora_dropout", "policy.lora_cfg.dropout", only_with=_PEFT),
    *used("target_modules lora_target_modules", "policy.lora_cfg.target_modules", only_with=_PEFT),
    *used("exclude_modules", "policy.lora_cfg.exclude_modules", only_with=_PEFT),
    *replaced(
        "args processing_class task_type lora_task_type bias quantization_config", "taken from the model, or not needed"
    ),
    *replaced("callbacks", "`headrace status`, alarms (`run.stop_on`) and trackers watch a run from outside"),
    *missing("optimizers optimizer_cls_and_kwargs", _OPTIMIZER),
    *missing("reward_processing_classes", "the tokenizer of a reward model is its own"),
    *missing(
        "tools rollout_func environment_factory max_tool_calling_iterations",
        "write the loop as `episode` of an environment, with tools and turns of your own (docs/agents.md)",
    ),
    *missing(
        "use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_* use_bnb_nested_quant lora_modules_to_save "
        "lora_target_parameters modules_to_save",
        "an adapter is plain LoRA on linear layers of an unquantized model",
    ),
    # batches and steps
    *used("per_device_train_batch_size", _BATCH, 8),
    *used("gradient_accumulation_steps", _BATCH, 1),
    *used("steps_per_generation generation_batch_size", _BATCH),
    direct("num_generations", "grpo.num_generations_per_prompt", 8),
    *used("num_iterations", "1 alone: grpo makes one pass over a batch", 1),
    *used("max_steps", "grpo.max_num_steps", -1),
    *used("num_train_epochs", "grpo.max_num_epochs", 3.0),
    direct("seed", "grpo.seed", 42),
    *replaced("data_seed full_determinism", "grpo.seed draws the order of prompts; completions are not repeatable"),
    direct("shuffle_dataset", "data.shuffle", True),
    # the optimizer
    direct("learning_rate", "policy.optimizer.kwargs.lr", 1e-6),
    direct("weight_decay", "policy.optimizer.kwargs.weight_decay", 0.0),
    *used("adam_beta1", "policy.optimizer.kwargs.betas", 0.9),
    *used("adam_beta2", "policy.optimizer.kwargs.betas", 0.999),
    direct("adam_epsilon", "policy.optimizer.kwargs.eps", 1e-8),
    direct("max_grad_norm", "policy.max_grad_norm", 1.0),
    *missing("optim", _OPTIMIZER, "adamw_torch_fused", quiet=("adamw_torch", "adamw_hf")),
    *used("lr_scheduler_type", _SCHEDULE, "linear"),
    *used("lr_scheduler_kwargs warmup_ratio", _SCHEDULE),
    *used("warmup_steps", _SCHEDULE, 0),
    # the loss
    direct("beta", "loss_fn.reference_policy_kl_penalty", 0.0),
    *used("use_bias_correction_kl", "loss_fn.use_on_policy_kl_approximation", True, "beta"),
    *used("epsilon", "loss_fn.ratio_clip_min", 0.2),
    *used("epsilon_high", "loss_fn.ratio_clip_max"),
    direct("delta", "loss_fn.ratio_clip_c", None),
    *used("loss_type", "loss_fn.token_level_loss, constant_length or use_cispo", "dapo"),
    *used("importance_sampling_level", "loss_fn.sequence_level_importance_ratios", "token"),
    *used("scale_rewards", "grpo.normalize_rewards", "group"),
    *used("reward_weights", "env.reward.parts", only_with=_SEVERAL),
    *used("multi_objective_aggregation", "grpo.adv_estimator.name: gdpo", "sum_then_normalize", _SEVERAL),
    direct("mask_truncated_completions", "grpo.overlong_filtering", False),
    *used("vllm_importance_sampling_correction", _TIS, True, "use_vllm"),
    *used("vllm_importance_sampling_mode", _TIS, "sequence_mask", _VLLM),
    *used("vllm_importance_sampling_clip_max", _TIS, 3.0, _VLLM),
    *used("vllm_importance_sampling_cap", _TIS, None, _VLLM),
    *used("vllm_importance_sampling_clip_min", _TIS, None, _VLLM),
    *missing("sapo_temperature_* vespo_*", NO_SUCH_LOSS),
    *missing(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "the reference policy is the initial model; leave sync_ref_model false",
    ),
    *missing("entropy_coef", "the loss has no entropy bonus; a larger ratio_clip_max (0.28) keeps entropy up", 0.0),
    *missing("top_entropy_quantile", "all tokens enter the loss", 1.0),
    *missing("use_adaptive_entropy entropy_coef_* entropy_target", "the loss has no entropy bonus"),
    *missing(
        "off_policy_mask_threshold",
        "`loss_fn.truncated_importance_sampling_type: seq-mask-tis` masks sequences by their weights",
    ),
    *missing("router_aux_loss_coef", "`policy.freeze_moe_router: true` keeps the routers as they are"),
    # generation
    direct("max_completion_length", "policy.generation.max_new_tokens", 512),
    *used("max_prompt_length vllm_max_model_length", "policy.max_total_sequence_length"),
    direct("temperature", "policy.generation.temperature", 1.0),
    direct("top_p", "policy.generation.top_p", 1.0),
    *used("top_k", "policy.generation.top_k", 0),
    *missing("min_p", "the sampling is temperature, top_p and top_k"),
    *missing("repetition_penalty", "the sampling is temperature, top_p and top_k, which training can follow", 1.0),
    *used("generation_kwargs", "policy.generation.stop_strings, policy.generation.stop_token_ids"),
    *used("chat_template_kwargs", "policy.tokenizer.chat_template_kwargs"),
    *used("num_generations_eval", "grpo.val_num_generations_per_prompt", only_with="eval_strategy"),
    *replaced(
        "use_vllm vllm_mode vllm_model_impl vllm_server_* vllm_group_port vllm_enable_sleep_mode use_transformers_* "
        "transformers_continuous_batching_config cache_implementation use_cache ds3_gather_for_generation",
        "vLLM always generates, in its own processes, and gets the weights after each step",
    ),
    *used("vllm_gpu_memory_utilization", "policy.generation.vllm_cfg.gpu_memory_utilization"),
    *used("vllm_tensor_parallel_size", "policy.generation.vllm_cfg.tensor_parallel_size"),
    *missing("vllm_structured_outputs_regex", "completions are not constrained"),
    # the model
    *used("model_init_kwargs dtype torch_dtype", "policy.precision"),
    *used("bf16 fp16", "policy.precision"),
    *used("gradient_checkpointing", "policy.activation_checkpointing", True),
    direct("torch_compile", "policy.torch_compile", False),
    *missing("trust_remote_code", "a model's own code is not run; use an architecture of transformers"),
    *missing("cast_lm_head_to_fp32", "log-probabilities are computed from float32 logits"),
    *replaced(
        "disable_dropout bf16_full_eval fp16_full_eval torch_compile_* pad_to_multiple_of gradient_checkpointing_kwargs "
        "use_liger_kernel liger_kernel_config tf32 "
        "torch_empty_cache_steps "
        "attn_implementation model_revision average_tokens_across_devices",
        "the trainer's own (docs/batches.md)",
    ),
    # validation, checkpoints, logs
    *used("eval_strategy", "grpo.val_period", "no"),
    *used("eval_steps", "grpo.val_period"),
    *replaced("do_eval", "eval_strategy decides"),
    *missing("eval_delay", "validation begins with the first period", 0),
    *used("eval_on_start", "grpo.val_at_start", False),
    *used("save_strategy", "checkpointing.save_period", "steps"),
    *used("save_steps", "checkpointing.save_period", 500, "save_strategy steps"),
    *used("save_total_limit", "checkpointing.keep_top_k"),
    *used("save_only_model", "checkpointing.save_optimizer", False),
    *used(
        "metric_for_best_model load_best_model_at_end greater_is_better",
        "checkpointing.metric_name",
        only_with="eval_strategy and a best model",
    ),
    *used("output_dir", "run.dir"),
    *used("report_to", "logger.wandb_enabled, logger.tensorboard_enabled, logger.mlflow_enabled", "none"),
    *used("run_name", "logger.wandb.name"),
    *used("project", "logger.wandb.project"),
    *replaced(
        "log_* logging_* num_completions_to_print disable_tqdm include_num_input_tokens_seen trackio_* skip_memory_metrics",
        _LOG,
    ),
    *replaced("push_to_hub hub_*", _HUB),
    *replaced(
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
        "`headrace up` with the run's id continues it",
    ),
    *replaced(
        "remove_unused_columns label_names dataloader_* per_device_eval_batch_size eval_* prediction_loss_only do_train do_predict "
        "include_for_metrics batch_eval_metrics train_sampling_strategy length_column_name dataset_streaming ignore_bias_buffers",
        "the buffer has no loaders; every column reaches the environment",
    ),
    *replaced(
        "deepspeed fsdp fsdp_config ddp_* accelerator_config parallelism_config local_rank use_cpu save_on_each_node "
        "config_file num_processes "
        "enable_jit_checkpoint debug",
        _GPU,
    ),
    *used("config", "the keys in this file, which are read"),
    *missing(
        "auto_find_batch_size neftune_noise_alpha label_smoothing_factor optim_args optim_target_modules",
        "leave it out",
    ),
)
