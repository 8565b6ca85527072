"""The keys of verl's configuration (verl 0.9), and what each is here."""

from __future__ import annotations

from headrace.config.migrate.draft import NO_SUCH_LOSS, Row, direct, missing, replaced, used

ACTOR, ROLLOUT, REF, MODEL, CRITIC = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.model.",
    "critic.",
)
_ENGINE = "headrace shards models by FSDP2 and plans devices itself (docs/gpu.md)"
_VLLM = "vLLM always generates, in its own processes; its sizes are policy.generation.vllm_cfg"
_SCHEDULE = "policy.scheduler"
_PACKING = "policy.sequence_packing"
_GAE, _FILTER, _IN_REWARD = "the estimator gae", "algorithm.filter_groups.enable", "algorithm.use_kl_in_reward"
_DYNAMIC, _OVERLONG, _WANDB = "use_dynamic_bsz", "overlong_buffer.enable", "wandb in trainer.logger"
_REWARD = "env.NAME.target: FILE.py:FUNCTION"
# How verl divides a model among devices, and computes it.
_SHARDING = (
    "strategy fsdp_config.* megatron.* veomni.* torchtitan.* automodel.* mindspeed.* engine.* ulysses_sequence_parallel_size "
    "use_torch_compile use_fused_kernels use_remove_padding use_prefix_grouper pad_to_length* rollout_n qat.* profiler* "
    "freeze_vision_tower router_replay.* use_rollout_log_probs log_prob_use_dynamic_bsz load_weight nccl_timeout "
    "recompute_old_log_prob tiled_mlp.* model.* model_config.* entropy_from_logits_* entropy_checkpointing"
)


def _within(prefix: str, names: str) -> str:
    return " ".join(prefix + name for name in names.split())


TABLE: tuple[Row, ...] = (
    # the algorithm
    *used("algorithm.adv_estimator", "grpo.adv_estimator.name, or a section `ppo` for gae", "gae"),
    *used("algorithm.norm_adv_by_std_in_grpo", "grpo.normalize_rewards", True, "the estimator grpo"),
    *used("algorithm.gamma", "ppo.adv_estimator.gae_gamma", 1.0, _GAE),
    *used("algorithm.lam", "ppo.adv_estimator.gae_lambda", 1.0, _GAE),
    *used("algorithm.use_kl_in_reward", "loss_fn.use_kl_in_reward", False),
    *used("algorithm.kl_ctrl.kl_coef", "loss_fn.reference_policy_kl_penalty", 0.001, _IN_REWARD),
    *used("algorithm.kl_penalty", "loss_fn.reference_policy_kl_type", "kl", _IN_REWARD),
    *missing("algorithm.kl_ctrl.type", "the coefficient is fixed", "fixed"),
    *missing("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the coefficient is fixed", quiet=(10000, 0.1)),
    *used("algorithm.filter_groups.enable", "grpo.use_dynamic_sampling", False),
    *used("algorithm.filter_groups.max_num_gen_batches", "grpo.dynamic_sampling_max_gen_batches", 0, _FILTER),
    *replaced(
        "algorithm.filter_groups.max_inflight_gen_batches",
        "the buffer keeps as many groups in flight as the age allows",
    ),
    *missing(
        "algorithm.filter_groups.metric",
        "groups are filtered by their rewards",
        "reward",
        quiet=("acc", "score", "seq_reward", "seq_final_reward"),
    ),
    *used("algorithm.rollout_correction.rollout_is", "loss_fn.use_importance_sampling_correction"),
    *used(
        "algorithm.rollout_correction.rollout_is_threshold",
        "loss_fn.truncated_importance_sampling_ratio",
        2.0,
        "rollout_is",
    ),
    *used("algorithm.rollout_correction.bypass_mode", "loss_fn.prev_logprobs_source: generation", False),
    *missing(
        "algorithm.rollout_correction.*", "loss_fn.truncated_importance_sampling_type has tis, icepop and seq-mask-tis"
    ),
    *missing("algorithm.use_pf_ppo algorithm.pf_ppo.*", "batches are not reweighted"),
    # data
    *used("data.train_files", "data.train[].data_path", "~/data/rlhf/gsm8k/train.parquet"),
    *used("data.val_files", "data.validation[].data_path", "~/data/rlhf/gsm8k/test.parquet"),
    *used("data.prompt_key", "data.default.input_key", "prompt"),
    *used("data.train_batch_size", "{section}.num_prompts_per_step", 1024),
    *used("data.gen_batch_size", "grpo.batch_multiplier", only_with=_FILTER),
    *used("data.max_prompt_length", "data.max_input_seq_length", 512),
    *used("data.max_response_length", "policy.generation.max_new_tokens", 512),
    *used("data.filter_overlong_prompts", "data.overlong_prompts", False),
    *missing("data.truncation", "a prompt is never cut: `data.overlong_prompts` refuses it or leaves it out", "error"),
    direct("data.shuffle", "data.shuffle", True),
    *used("data.seed", "{section}.seed"),
    *used("data.val_max_samples", "{section}.max_val_samples", -1),
    *missing("data.train_max_samples", "write the rows that are wanted to a file of their own", -1),
    *used("data.apply_chat_template_kwargs* data.chat_template_kwargs*", "policy.tokenizer.chat_template_kwargs"),
    *used("data.tokenizer", "policy.tokenizer.name"),
    *missing(
        "data.custom_cls.* data.tool_config_path data.function_tool_path data.mm_processor_kwargs*",
        "rows of your own: data.train[].dataset_name FILE.py:NAME; tools: docs/agents.md",
    ),
    *missing(
        "data.image_* data.video_* data.audio_*",
        "models of text alone are trained: choose a data set whose prompts are text",
    ),
    *replaced("data.reward_fn_key", "the function gets the column data_source"),
    *replaced(
        "data.return_* data.dataloader_num_workers data.val_batch_size data.validation_shuffle "
        "data.filter_overlong_prompts_workers data.use_shm "
        "data.filter_accuracy data.accuracy_* data.need_tools_kwargs data.trust_remote_code",
        "the buffer has no loaders",
    ),
    # the policy's training
    *used(_within(ACTOR, "optim.lr"), "policy.optimizer.kwargs.lr", 1e-6),
    *used(_within(ACTOR, "optim.weight_decay"), "policy.optimizer.kwargs.weight_decay", 0.01),
    *used(_within(ACTOR, "optim.betas"), "policy.optimizer.kwargs.betas", [0.9, 0.999]),
    *used(_within(ACTOR, "optim.clip_grad grad_clip"), "policy.max_grad_norm", 1.0),
    *used(_within(ACTOR, "optim.lr_warmup_steps"), _SCHEDULE, -1),
    *used(_within(ACTOR, "optim.lr_warmup_steps_ratio"), _SCHEDULE, 0.0),
    *used(_within(ACTOR, "optim.lr_scheduler_type"), _SCHEDULE, "constant"),
    *used(_within(ACTOR, "optim.warmup_style optim.lr_decay_style"), _SCHEDULE),
    *used(_within(ACTOR, "optim.min_lr_ratio"), _SCHEDULE, 0.0),
    *used(_within(ACTOR, "optim.total_training_steps"), _SCHEDULE, -1),
    *missing(
        ACTOR + "optim.optimizer", "the optimizer is AdamW or Adam: policy.optimizer", "AdamW", quiet=("adam", "Adam")
    ),
    *replaced(
        _within(
            ACTOR, "optim.optimizer_impl optim.num_cycles optim.zero_indexed_step optim.override_optimizer_config*"
        ),
        "torch.optim.AdamW, and torch's schedules",
    ),
    *missing(
        _within(
            ACTOR,
            "optim.lr_decay_steps optim.lr_warmup_init optim.min_lr optim.weight_decay_incr_style optim.lr_wsd_* "
            "optim.use_checkpoint_opt_param_scheduler",
        ),
        "write torch's schedule: policy.scheduler",
    ),
    *used(
        _within(ACTOR, "ppo_mini_batch_size"),
        "policy.train_global_batch_size (there in prompts, here in completions)",
        256,
    ),
    *used(_within(ACTOR, "ppo_micro_batch_size_per_gpu ppo_micro_batch_size"), "policy.train_micro_batch_size"),
    *used(_within(ACTOR, "use_dynamic_bsz"), _PACKING + ".enabled", False),
    *used(_within(ACTOR, "ppo_max_token_len_per_gpu"), _PACKING + ".train_mb_tokens", 16384, _DYNAMIC),
    *used(_within(ACTOR, "clip_ratio"), "loss_fn.ratio_clip_min, loss_fn.ratio_clip_max", 0.2),
    *used(_within(ACTOR, "clip_ratio_low"), "loss_fn.ratio_clip_min", 0.2),
    *used(_within(ACTOR, "clip_ratio_high"), "loss_fn.ratio_clip_max", 0.2),
    *used(_within(ACTOR, "clip_ratio_c"), "loss_fn.ratio_clip_c", 3.0, "policy_loss.loss_mode vanilla"),
    *used(_within(ACTOR, "loss_agg_mode"), "loss_fn.token_level_loss, loss_fn.constant_length", "token-mean"),
    *used(_within(ACTOR, "loss_scale_factor"), "loss_fn.constant_length", only_with="seq-mean-token-sum-norm"),
    *used(_within(ACTOR, "policy_loss.loss_mode"), "loss_fn.sequence_level_importance_ratios", "vanilla"),
    *missing(_within(ACTOR, "policy_loss.* tau_pos tau_neg"), NO_SUCH_LOSS),
    *missing(
        _within(ACTOR, "entropy_coeff"),
        "the loss has no entropy bonus; a larger ratio_clip_max (0.28) keeps entropy up",
        0,
    ),
    *used(_within(ACTOR, "use_kl_loss"), "loss_fn.reference_policy_kl_penalty", False),
    *used(_within(ACTOR, "kl_loss_coef"), "loss_fn.reference_policy_kl_penalty", 0.001, "use_kl_loss"),
    *used(_within(ACTOR, "kl_loss_type"), "loss_fn.reference_policy_kl_type", "low_var_kl", "use_kl_loss"),
    *used(_within(ACTOR, "ppo_epochs"), "ppo.ppo_epochs; 1 alone under grpo", 1),
    *missing(_within(ACTOR, "shuffle"), "a mini-batch is the next completions of the batch, by position"),
    *replaced(
        _within(ACTOR, "entropy_from_logits_* entropy_checkpointing calculate_* data_loader_seed"),
        "the trainer's own (docs/batches.md)",
    ),
    *replaced(_within(ACTOR, "checkpoint.*"), "a checkpoint has weights, optimizer and the run's state: checkpointing"),
    *replaced(_within(ACTOR, _SHARDING) + " " + _within(REF, _SHARDING), _ENGINE),
    *used(_within(REF, "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size"), "policy.logprob_batch_size"),
    *used(_within(REF, "log_prob_max_token_len_per_gpu"), _PACKING + ".logprob_mb_tokens", only_with=_DYNAMIC),
    # the model
    *used(_within(MODEL, "path"), "policy.model_name", "~/models/deepseek-llm-7b-chat"),
    *used(_within(MODEL, "tokenizer_path"), "policy.tokenizer.name"),
    *used(_within(MODEL, "enable_gradient_checkpointing"), "policy.activation_checkpointing", True),
    *used(_within(MODEL, "override_config*"), "policy.hf_config_overrides"),
    *used(_within(MODEL, "lora_rank"), "policy.lora_cfg.enabled, policy.lora_cfg.dim", 0),
    *used(_within(MODEL, "lora_alpha"), "policy.lora_cfg.alpha", 16, "lora_rank"),
    *used(_within(MODEL, "target_modules"), "policy.lora_cfg.target_modules", "all-linear", "lora_rank"),
    *used(_within(MODEL, "exclude_modules"), "policy.lora_cfg.exclude_modules", only_with="lora_rank"),
    *used(_within(MODEL, "use_remove_padding"), _PACKING + ".enabled", True),
    *missing(
        _within(MODEL, "trust_remote_code custom_chat_template external_lib lora_adapter_path mtp.enable"),
        "an architecture and tokenizer of transformers, and a new adapter",
    ),
    *replaced(
        _within(
            MODEL,
            "use_shm enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.* mtp.* "
            "lora.* hf_config_path moe_config.*",
        ),
        "the trainer's own (docs/batches.md)",
    ),
    # generation
    *used(_within(ROLLOUT, "n"), "{section}.num_generations_per_prompt", 1),
    *used(_within(ROLLOUT, "temperature"), "policy.generation.temperature", 1.0),
    *used(_within(ROLLOUT, "top_p"), "policy.generation.top_p", 1.0),
    *used(_within(ROLLOUT, "top_k"), "policy.generation.top_k", -1),
    *missing(
        _within(ROLLOUT, "prompt_length response_length"), "give data.max_prompt_length and data.max_response_length"
    ),
    *used(_within(ROLLOUT, "max_model_len"), "policy.max_total_sequence_length"),
    *used(_within(ROLLOUT, "val_kwargs.n"), "{section}.val_num_generations_per_prompt", 1),
    *used(_within(ROLLOUT, "val_kwargs.temperature"), "policy.generation.val_temperature", 0.0),
    *used(_within(ROLLOUT, "val_kwargs.do_sample"), "policy.generation.val_temperature", False),
    *used(_within(ROLLOUT, "val_kwargs.top_p"), "policy.generation.val_top_p", 1.0, "val_kwargs.do_sample"),
    *used(_within(ROLLOUT, "val_kwargs.top_k"), "policy.generation.val_top_k", -1, "val_kwargs.do_sample"),
    *used(_within(ROLLOUT, "tensor_model_parallel_size"), "policy.generation.vllm_cfg.tensor_parallel_size", 2),
    *used(_within(ROLLOUT, "gpu_memory_utilization"), "policy.generation.vllm_cfg.gpu_memory_utilization", 0.5),
    *used(_within(ROLLOUT, "enforce_eager"), "policy.generation.vllm_cfg.enforce_eager", False),
    *used(_within(ROLLOUT, "max_num_batched_tokens"), "policy.generation.vllm_cfg.max_num_batched_tokens", 8192),
    *used(_within(ROLLOUT, "max_num_seqs"), "policy.generation.vllm_cfg.max_num_seqs", 1024),
    *used(_within(ROLLOUT, "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size"), "policy.logprob_batch_size"),
    *used(_within(ROLLOUT, "log_prob_max_token_len_per_gpu"), _PACKING + ".logprob_mb_tokens", only_with=_DYNAMIC),
    *missing(_within(ROLLOUT, "ignore_eos"), "a completion ends at its end token"),
    *missing(
        _within(ROLLOUT, "multi_turn.*"),
        "write the loop as `episode` of an environment, with tools and turns of your own (docs/agents.md)",
        quiet=(1, "sglang", "hermes"),
    ),
    *missing(_within(ROLLOUT, "quantization*"), "policy.generation.vllm_cfg.precision is float32, bfloat16 or float16"),
    *replaced(
        _within(
            ROLLOUT,
            "name mode dtype free_cache_engine load_format layered_summon data_parallel_size expert_parallel_size "
            "pipeline_model_parallel_size enable_chunked_prefill enable_prefix_caching disable_log_stats "
            "skip_tokenizer_init engine_kwargs.* agent.* checkpoint_engine.* trace.* profiler.* prometheus.* "
            "update_weights_bucket_megabytes limit_images cudagraph_capture_sizes scheduling_policy nnodes "
            "n_gpus_per_node full_determinism seed over_sample_rate multi_stage_wake_up calculate_log_probs "
            "log_prob_use_dynamic_bsz logprobs_mode enable_rollout_routing_replay skip.* skip_* do_sample "
            "use_fire_sampling mtp.* disaggregation.* enable_sleep_mode moe_load_balance_metrics_interval "
            "router_config_path mtp qat tokenizer_* custom.* total_rollout_steps test_freq",
        ),
        _VLLM,
    ),
    # the value model
    *used(_within(CRITIC, "optim.lr"), "value.optimizer.kwargs.lr", 1e-5, _GAE),
    *used(_within(CRITIC, "optim.weight_decay"), "value.optimizer.kwargs.weight_decay", 0.01, _GAE),
    *used(_within(CRITIC, "optim.clip_grad grad_clip"), "value.max_grad_norm", 1.0, _GAE),
    *used(_within(CRITIC, "model.path"), "value.model_name", only_with=_GAE),
    *used(_within(CRITIC, "ppo_mini_batch_size"), "value.train_global_batch_size", only_with=_GAE),
    *used(
        _within(CRITIC, "ppo_micro_batch_size_per_gpu ppo_micro_batch_size"),
        "value.train_micro_batch_size",
        only_with=_GAE,
    ),
    *used(_within(CRITIC, "ppo_epochs"), "ppo.critic_ppo_epochs", only_with=_GAE),
    *used(_within(CRITIC, "cliprange_value"), "value_loss_fn.cliprange", 0.5, _GAE),
    *missing(_within(CRITIC, "optim.*"), "write torch's schedule: value.scheduler"),
    *replaced(
        _within(
            CRITIC,
            f"enable use_dynamic_bsz ppo_max_token_len_per_gpu forward_max_token_len_per_gpu shuffle "
            f"data_loader_seed loss_agg_mode loss_scale_factor checkpoint.* forward_micro_batch_size* fsdp.* "
            f"{_SHARDING}",
        ),
        "the value model is trained as the policy is",
    ),
    *used("trainer.critic_warmup", "ppo.policy_training_start_step", 0, _GAE),
    # rewards
    *used("custom_reward_function.path reward.custom_reward_function.path", _REWARD),
    *used("custom_reward_function.name reward.custom_reward_function.name", _REWARD, "compute_score", "its path"),
    *missing(
        "custom_reward_function.reward_kwargs* reward.custom_reward_function.reward_kwargs*",
        "make them defaults of the function's parameters",
    ),
    *used("reward_model.enable reward.reward_model.enable", "env.NAME of type reward_model", False),
    *used(
        "reward_model.model.path reward.reward_model.model_path", "env.NAME.model_name", only_with="reward_model.enable"
    ),
    *used("reward_model.reward_manager reward.reward_manager.name", "env.NAME", "naive"),
    *used(
        "reward_model.reward_kwargs.overlong_buffer_cfg.* reward_model.overlong_buffer.* reward.reward_kwargs.overlong_buffer_cfg.*",
        "{section}.reward_shaping",
        only_with=_OVERLONG,
    ),
    *replaced(
        "reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log "
        "reward.reward_kwargs.overlong_buffer_cfg.log",
        "the metrics of rewards before and after shaping are always written",
    ),
    *used(
        "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len",
        "{section}.reward_shaping.max_response_length",
        only_with=_OVERLONG,
    ),
    *missing(
        "sandbox_fusion.* reward.sandbox_fusion.* reward_model.sandbox_fusion.*",
        "programs of the policy run in the `code` environment's own sandbox (docs/environments.md)",
    ),
    *replaced("reward_model.* reward.*", "an environment runs in its own processes: env, reward"),
    # the run
    *used("trainer.total_epochs", "{section}.max_num_epochs", 30),
    *used("trainer.total_training_steps", "{section}.max_num_steps"),
    *used("trainer.project_name", "logger.wandb.project", "verl_examples", _WANDB),
    *used("trainer.experiment_name", "logger.wandb.name", "gsm8k", _WANDB),
    *used(
        "trainer.logger",
        "logger.wandb_enabled, logger.tensorboard_enabled, logger.mlflow_enabled",
        ["console", "wandb"],
    ),
    *used("trainer.save_freq", "checkpointing.save_period", -1),
    *used("trainer.test_freq", "{section}.val_period", -1),
    *used("trainer.val_before_train", "{section}.val_at_start", True),
    *missing("trainer.val_only", "`headrace eval RUN@STEP` evaluates", False),
    *used("trainer.max_actor_ckpt_to_keep", "checkpointing.keep_top_k", only_with="trainer.save_freq"),
    *used("trainer.default_local_dir", "checkpointing.checkpoint_dir"),
    *used("trainer.log_val_generations", "logger.num_val_samples_to_print", 0),
    *replaced(
        "trainer.resume_mode trainer.resume_from_path",
        "`headrace up` with the run's id continues it; `headrace rewind` goes back",
    ),
    *missing(
        "trainer.device", "trainer.device is auto, cuda or cpu; other accelerators are not used", "cuda", ("cpu",)
    ),
    *replaced(
        "trainer.n_gpus_per_node trainer.nnodes",
        "`rollout.replicas` and `trainer.num_processes` divide the GPUs (docs/gpu.md)",
    ),
    *replaced(
        "trainer.balance_batch trainer.rollout_data_dir trainer.validation_data_dir trainer.esi_redundant_time trainer.v1.* "
        "trainer.use_v1 trainer.checkpoint_callback_class trainer.default_hdfs_dir trainer.del_local_ckpt_after_load "
        "trainer.max_critic_ckpt_to_keep trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl "
        "trainer.profile_steps trainer.npu_profile.* trainer.hybrid_engine trainer.remove_previous_ckpt_in_save "
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout actor_rollout_ref.model.strategy "
        "ray_kwargs.* ray_init.* global_profiler.* transfer_queue.* skip.* async_training.* rollout.* model_engine",
        _ENGINE,
    ),
    *missing("distillation.*", "`grpo.adv_estimator.name: opd` learns from a teacher"),
)

# The sections of verl's configuration. A word that begins with one is an override.
SECTIONS = (
    "actor_rollout_ref",
    "algorithm",
    "async_training",
    "critic",
    "custom_reward_function",
    "data",
    "distillation",
    "global_profiler",
    "model_engine",
    "ray_init",
    "ray_kwargs",
    "reward",
    "reward_model",
    "rollout",
    "sandbox_fusion",
    "skip",
    "trainer",
)
