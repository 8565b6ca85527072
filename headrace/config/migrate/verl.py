"""verl's overrides (verl 0.9), as its scripts and commands give them: `actor_rollout_ref.actor.optim.lr=1e-6`."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.migrate.draft import Draft, Row, Unread, direct, missing, read_scalar, replaced, used
from headrace.config.migrate.schedules import put_schedule

_ACTOR, _ROLLOUT, _REF, _MODEL, _CRITIC = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.model.",
    "critic.",
)
_ENGINE = "headrace shards models by FSDP2 and plans devices itself (docs/gpu.md)"
_VLLM = "vLLM always generates, in its own processes; its sizes are policy.generation.vllm_cfg"
_FORM = "its form of the loss is not there; docs/recipes.md has those that are"
_SCHEDULE = "policy.scheduler"
_PACKING = "policy.sequence_packing"
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
    *used("algorithm.norm_adv_by_std_in_grpo", "grpo.normalize_rewards", True),
    *used("algorithm.gamma", "ppo.adv_estimator.gae_gamma", 1.0),
    *used("algorithm.lam", "ppo.adv_estimator.gae_lambda", 1.0),
    *used("algorithm.use_kl_in_reward", "loss_fn.use_kl_in_reward", False),
    *used("algorithm.kl_ctrl.kl_coef", "loss_fn.reference_policy_kl_penalty", 0.001),
    *used("algorithm.kl_penalty", "loss_fn.reference_policy_kl_type", "kl"),
    *missing("algorithm.kl_ctrl.type", "the coefficient is fixed", "fixed"),
    *missing("algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl", "the coefficient is fixed", quiet=(10000, 0.1)),
    *used("algorithm.filter_groups.enable", "grpo.use_dynamic_sampling", False),
    *used("algorithm.filter_groups.max_num_gen_batches", "grpo.dynamic_sampling_max_gen_batches", 0),
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
    *used("algorithm.rollout_correction.rollout_is_threshold", "loss_fn.truncated_importance_sampling_ratio", 2.0),
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
    *used("data.gen_batch_size", "grpo.batch_multiplier"),
    *used("data.max_prompt_length", "data.max_input_seq_length", 512),
    *used("data.max_response_length", "policy.generation.max_new_tokens", 512),
    *used("data.filter_overlong_prompts", "data.overlong_prompts", False),
    Row(
        "data.truncation",
        "missing",
        "a prompt is never cut: `data.overlong_prompts` refuses it or leaves it out",
        "error",
    ),
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
    *replaced("data.reward_fn_key", "the function gets the column data_source"),
    *replaced(
        "data.return_* data.dataloader_num_workers data.val_batch_size data.validation_shuffle "
        "data.filter_overlong_prompts_workers data.use_shm "
        "data.image_* data.video_* data.audio_* data.filter_accuracy data.accuracy_* data.need_tools_kwargs data.trust_remote_code",
        "the buffer has no loaders; models of text alone",
    ),
    # the policy's training
    *used(_within(_ACTOR, "optim.lr"), "policy.optimizer.kwargs.lr", 1e-6),
    *used(_within(_ACTOR, "optim.weight_decay"), "policy.optimizer.kwargs.weight_decay", 0.01),
    *used(_within(_ACTOR, "optim.betas"), "policy.optimizer.kwargs.betas", [0.9, 0.999]),
    *used(_within(_ACTOR, "optim.clip_grad grad_clip"), "policy.max_grad_norm", 1.0),
    *used(_within(_ACTOR, "optim.lr_warmup_steps"), _SCHEDULE, -1),
    *used(_within(_ACTOR, "optim.lr_warmup_steps_ratio"), _SCHEDULE, 0.0),
    *used(_within(_ACTOR, "optim.lr_scheduler_type"), _SCHEDULE, "constant"),
    *used(_within(_ACTOR, "optim.warmup_style optim.lr_decay_style"), _SCHEDULE),
    *used(_within(_ACTOR, "optim.min_lr_ratio"), _SCHEDULE, 0.0),
    *used(_within(_ACTOR, "optim.total_training_steps"), _SCHEDULE, -1),
    Row(
        _ACTOR + "optim.optimizer",
        "missing",
        "the optimizer is AdamW or Adam: policy.optimizer",
        "AdamW",
        quiet=("adam", "Adam"),
    ),
    *replaced(
        _within(
            _ACTOR, "optim.optimizer_impl optim.num_cycles optim.zero_indexed_step optim.override_optimizer_config*"
        ),
        "torch.optim.AdamW, and torch's schedules",
    ),
    *missing(
        _within(
            _ACTOR,
            "optim.lr_decay_steps optim.lr_warmup_init optim.min_lr optim.weight_decay_incr_style optim.lr_wsd_* "
            "optim.use_checkpoint_opt_param_scheduler",
        ),
        "write torch's schedule: policy.scheduler",
    ),
    *used(
        _within(_ACTOR, "ppo_mini_batch_size"),
        "policy.train_global_batch_size (there in prompts, here in completions)",
        256,
    ),
    *used(_within(_ACTOR, "ppo_micro_batch_size_per_gpu ppo_micro_batch_size"), "policy.train_micro_batch_size"),
    *used(_within(_ACTOR, "use_dynamic_bsz"), _PACKING + ".enabled", False),
    *used(_within(_ACTOR, "ppo_max_token_len_per_gpu"), _PACKING + ".train_mb_tokens", 16384),
    *used(_within(_ACTOR, "clip_ratio"), "loss_fn.ratio_clip_min, loss_fn.ratio_clip_max", 0.2),
    *used(_within(_ACTOR, "clip_ratio_low"), "loss_fn.ratio_clip_min", 0.2),
    *used(_within(_ACTOR, "clip_ratio_high"), "loss_fn.ratio_clip_max", 0.2),
    *used(_within(_ACTOR, "clip_ratio_c"), "loss_fn.ratio_clip_c", 3.0),
    *used(_within(_ACTOR, "loss_agg_mode"), "loss_fn.token_level_loss, loss_fn.constant_length", "token-mean"),
    *used(_within(_ACTOR, "loss_scale_factor"), "loss_fn.constant_length"),
    *used(_within(_ACTOR, "policy_loss.loss_mode"), "loss_fn.sequence_level_importance_ratios", "vanilla"),
    *missing(_within(_ACTOR, "policy_loss.* tau_pos tau_neg"), _FORM),
    *missing(
        _within(_ACTOR, "entropy_coeff"),
        "the loss has no entropy bonus; a larger ratio_clip_max (0.28) keeps entropy up",
        0,
    ),
    *used(_within(_ACTOR, "use_kl_loss"), "loss_fn.reference_policy_kl_penalty", False),
    *used(_within(_ACTOR, "kl_loss_coef"), "loss_fn.reference_policy_kl_penalty", 0.001),
    *used(_within(_ACTOR, "kl_loss_type"), "loss_fn.reference_policy_kl_type", "low_var_kl"),
    *used(_within(_ACTOR, "ppo_epochs"), "ppo.ppo_epochs; 1 alone under grpo", 1),
    *missing(_within(_ACTOR, "shuffle"), "a mini-batch is the next completions of the batch, by position"),
    *replaced(
        _within(_ACTOR, "entropy_from_logits_* entropy_checkpointing calculate_* data_loader_seed"),
        "the trainer's own (docs/batches.md)",
    ),
    *replaced(
        _within(_ACTOR, "checkpoint.*"), "a checkpoint has weights, optimizer and the run's state: checkpointing"
    ),
    *replaced(_within(_ACTOR, _SHARDING) + " " + _within(_REF, _SHARDING), _ENGINE),
    *used(_within(_REF, "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size"), "policy.logprob_batch_size"),
    *used(_within(_REF, "log_prob_max_token_len_per_gpu"), _PACKING + ".logprob_mb_tokens"),
    # the model
    *used(_within(_MODEL, "path"), "policy.model_name", "~/models/deepseek-llm-7b-chat"),
    *used(_within(_MODEL, "tokenizer_path"), "policy.tokenizer.name"),
    *used(_within(_MODEL, "enable_gradient_checkpointing"), "policy.activation_checkpointing", True),
    *used(_within(_MODEL, "override_config*"), "policy.hf_config_overrides"),
    *used(_within(_MODEL, "lora_rank"), "policy.lora_cfg.enabled, policy.lora_cfg.dim", 0),
    *used(_within(_MODEL, "lora_alpha"), "policy.lora_cfg.alpha", 16),
    *used(_within(_MODEL, "target_modules"), "policy.lora_cfg.target_modules", "all-linear"),
    *used(_within(_MODEL, "exclude_modules"), "policy.lora_cfg.exclude_modules"),
    *used(_within(_MODEL, "use_remove_padding"), _PACKING + ".enabled", True),
    *missing(
        _within(_MODEL, "trust_remote_code custom_chat_template external_lib lora_adapter_path mtp.enable"),
        "an architecture and tokenizer of transformers, and a new adapter",
    ),
    *replaced(
        _within(
            _MODEL,
            "use_shm enable_activation_offload use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.* mtp.* "
            "lora.* hf_config_path moe_config.*",
        ),
        "the trainer's own (docs/batches.md)",
    ),
    # generation
    *used(_within(_ROLLOUT, "n"), "{section}.num_generations_per_prompt", 1),
    *used(_within(_ROLLOUT, "temperature"), "policy.generation.temperature", 1.0),
    *used(_within(_ROLLOUT, "top_p"), "policy.generation.top_p", 1.0),
    *used(_within(_ROLLOUT, "top_k"), "policy.generation.top_k", -1),
    *used(
        _within(_ROLLOUT, "prompt_length response_length"),
        "the same as data.max_prompt_length and data.max_response_length",
    ),
    *used(_within(_ROLLOUT, "max_model_len"), "policy.max_total_sequence_length"),
    *used(_within(_ROLLOUT, "val_kwargs.n"), "{section}.val_num_generations_per_prompt", 1),
    *used(_within(_ROLLOUT, "val_kwargs.temperature"), "policy.generation.val_temperature", 0.0),
    *used(_within(_ROLLOUT, "val_kwargs.do_sample"), "policy.generation.val_temperature", False),
    *used(_within(_ROLLOUT, "val_kwargs.top_p"), "policy.generation.val_top_p", 1.0),
    *used(_within(_ROLLOUT, "val_kwargs.top_k"), "policy.generation.val_top_k", -1),
    *used(_within(_ROLLOUT, "tensor_model_parallel_size"), "policy.generation.vllm_cfg.tensor_parallel_size", 2),
    *used(_within(_ROLLOUT, "gpu_memory_utilization"), "policy.generation.vllm_cfg.gpu_memory_utilization", 0.5),
    *used(_within(_ROLLOUT, "enforce_eager"), "policy.generation.vllm_cfg.enforce_eager", False),
    *used(_within(_ROLLOUT, "max_num_batched_tokens"), "policy.generation.vllm_cfg.max_num_batched_tokens", 8192),
    *used(_within(_ROLLOUT, "max_num_seqs"), "policy.generation.vllm_cfg.max_num_seqs", 1024),
    *used(
        _within(_ROLLOUT, "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size"), "policy.logprob_batch_size"
    ),
    *used(_within(_ROLLOUT, "log_prob_max_token_len_per_gpu"), _PACKING + ".logprob_mb_tokens"),
    *missing(_within(_ROLLOUT, "ignore_eos"), "a completion ends at its end token"),
    *missing(
        _within(_ROLLOUT, "multi_turn.*"),
        "write the loop as `episode` of an environment, with tools and turns of your own (docs/agents.md)",
        quiet=(1, "sglang", "hermes"),
    ),
    *missing(
        _within(_ROLLOUT, "quantization*"), "policy.generation.vllm_cfg.precision is float32, bfloat16 or float16"
    ),
    *replaced(
        _within(
            _ROLLOUT,
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
    *used(_within(_CRITIC, "optim.lr"), "value.optimizer.kwargs.lr", 1e-5),
    *used(_within(_CRITIC, "optim.weight_decay"), "value.optimizer.kwargs.weight_decay", 0.01),
    *used(_within(_CRITIC, "optim.clip_grad grad_clip"), "value.max_grad_norm", 1.0),
    *used(_within(_CRITIC, "model.path"), "value.model_name"),
    *used(_within(_CRITIC, "ppo_mini_batch_size"), "value.train_global_batch_size"),
    *used(_within(_CRITIC, "ppo_micro_batch_size_per_gpu ppo_micro_batch_size"), "value.train_micro_batch_size"),
    *used(_within(_CRITIC, "ppo_epochs"), "ppo.critic_ppo_epochs"),
    *used(_within(_CRITIC, "cliprange_value"), "value_loss_fn.cliprange", 0.5),
    *missing(_within(_CRITIC, "optim.*"), "write torch's schedule: value.scheduler"),
    *replaced(
        _within(
            _CRITIC,
            f"enable use_dynamic_bsz ppo_max_token_len_per_gpu forward_max_token_len_per_gpu shuffle "
            f"data_loader_seed loss_agg_mode loss_scale_factor checkpoint.* forward_micro_batch_size* fsdp.* "
            f"{_SHARDING}",
        ),
        "the value model is trained as the policy is",
    ),
    *used("trainer.critic_warmup", "ppo.policy_training_start_step", 0),
    # rewards
    *used("custom_reward_function.path reward.custom_reward_function.path", _REWARD),
    *used("custom_reward_function.name reward.custom_reward_function.name", _REWARD, "compute_score"),
    *missing(
        "custom_reward_function.reward_kwargs* reward.custom_reward_function.reward_kwargs*",
        "make them defaults of the function's parameters",
    ),
    *used("reward_model.enable reward.reward_model.enable", "env.NAME of type reward_model", False),
    *used("reward_model.model.path reward.reward_model.model_path", "env.NAME.model_name"),
    *used("reward_model.reward_manager reward.reward_manager.name", "env.NAME", "naive"),
    *used(
        "reward_model.reward_kwargs.overlong_buffer_cfg.* reward_model.overlong_buffer.* reward.reward_kwargs.overlong_buffer_cfg.*",
        "{section}.reward_shaping",
    ),
    *used(
        "reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len",
        "{section}.reward_shaping.max_response_length",
    ),
    *missing(
        "sandbox_fusion.* reward.sandbox_fusion.* reward_model.sandbox_fusion.*",
        "programs of the policy run in the `code` environment's own sandbox (docs/environments.md)",
    ),
    *replaced("reward_model.* reward.*", "an environment runs in its own processes: env, reward"),
    # the run
    *used("trainer.total_epochs", "{section}.max_num_epochs", 30),
    *used("trainer.total_training_steps", "{section}.max_num_steps"),
    *used("trainer.project_name", "logger.wandb.project", "verl_examples"),
    *used("trainer.experiment_name", "logger.wandb.name", "gsm8k"),
    *used(
        "trainer.logger",
        "logger.wandb_enabled, logger.tensorboard_enabled, logger.mlflow_enabled",
        ["console", "wandb"],
    ),
    *used("trainer.save_freq", "checkpointing.save_period", -1),
    *used("trainer.test_freq", "{section}.val_period", -1),
    *used("trainer.val_before_train", "{section}.val_at_start", True),
    *missing("trainer.val_only", "`headrace eval RUN@STEP` evaluates", False),
    *used("trainer.max_actor_ckpt_to_keep", "checkpointing.keep_top_k"),
    *used("trainer.default_local_dir", "checkpointing.checkpoint_dir"),
    *used("trainer.log_val_generations", "logger.num_val_samples_to_print", 0),
    *replaced(
        "trainer.resume_mode trainer.resume_from_path",
        "`headrace up` with the run's id continues it; `headrace rewind` goes back",
    ),
    *replaced(
        "trainer.n_gpus_per_node trainer.nnodes trainer.device",
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
_SECTIONS = (
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
    "transfer_queue",
)
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(_SECTIONS)})(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
# verl's estimators of the KL divergence, and ours.
_KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}


def migrate(source: str, steps: int | None = None) -> Draft:
    """Draft the configuration for a script (`FILE.sh`), or for a command line or its overrides alone. `steps` are the trainer steps of a
    run whose data alone tells them. Raises `ConfigError`."""
    path = Path(source)
    is_file = len(source) < 4096 and "\n" not in source and path.is_file()
    if not is_file and "=" not in source:
        raise ConfigError(f"{source} is not a file and has no overrides; give FILE.sh, or a command in quotes")
    try:
        text = path.read_text(encoding="utf-8") if is_file else source
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    given = _overrides(text)
    if not given:
        raise ConfigError(
            f"{source[:200]} has no overrides of verl, such as data.train_batch_size=1024; give the script that has them"
        )
    return _draft(given, steps)


def _overrides(text: str) -> dict[str, Any]:
    """Return the overrides in a script, the last of each. Its variables are replaced by what it assigns to them outside conditions; nothing
    is executed."""
    known: dict[str, str] = {}
    given: dict[str, Any] = {}
    depth = 0
    for line in _lines(text):
        first = re.match(r"\s*(\w+)", line)
        depth += first is not None and first[1] in _OPENS
        depth -= first is not None and first[1] in _CLOSES
        if (
            assigned := re.match(r"\s*(?:export\s+|local\s+)?(\w+)=(?!\()(.*)$", line, re.DOTALL)
        ) and not _OVERRIDE.match(line.strip()):
            if depth == 0 or assigned[1] not in known:
                known[assigned[1]] = _replace(_unquoted(assigned[2]), known)
            continue
        for word in _words(line):
            if found := _OVERRIDE.fullmatch(word):
                given[found[1]] = _value(_replace(found[2], known))
    return given


def _lines(text: str) -> list[str]:
    """Return the logical lines of a shell script, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    # one word each
    return re.sub(r"\$\(\([^()]*(\([^()]*\)[^()]*)*\)\)", lambda found: re.sub(r"\s", "", found[0]), joined).split("\n")


def _words(line: str) -> list[str]:
    """Return the words of a line. Quotes are taken off, except those inside a list or mapping such as ['a','b']."""
    words, word, quote, is_kept = [], "", "", False
    for character in line + " ":
        if quote:
            if character != quote or is_kept:
                word += character
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote, is_kept = character, bool(re.search(r"\[|(?<!\$)\{", word))
            word += character if is_kept else ""
        elif character.isspace():
            words += [word] if word else []
            word = ""
        else:
            word += character
    return words + ([word] if word else [])


def _unquoted(text: str) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text.strip()
    return words[0] if words else ""


def _replace(text: str, known: dict[str, str]) -> str:
    """Replace the variables that are known. `$HOME` becomes ~, and `$((…))` of whole numbers is computed."""

    def of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        fallback = found[2]
        if known.get(name):
            return known[name]
        return "~" if name == "HOME" else found[0] if fallback is None else fallback

    for _ in range(5):
        text = _VARIABLE.sub(of, text)
    return re.sub(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", lambda found: _arithmetic(found, known), text)


def _arithmetic(found: re.Match[str], known: dict[str, str]) -> str:
    text = re.sub(r"[A-Za-z_]\w*", lambda name: known.get(name[0], name[0]), found[1])
    terms = re.fullmatch(r"\s*\(?\s*(\d+)\s*([-+*/])\s*(\d+)\s*\)?\s*(?:([-+*/])\s*(\d+)\s*)?", text)
    if terms is None:
        return text.strip() if text.strip().isdecimal() else found[0]
    whole = int(terms[1])
    for sign, number in ((terms[2], terms[3]), (terms[4], terms[5])):
        if sign == "/" and not int(number):
            return found[0]
        whole = (
            {"+": whole.__add__, "-": whole.__sub__, "*": whole.__mul__, "/": whole.__floordiv__}[sign](int(number))
            if sign
            else whole
        )
    return str(whole)


def _value(text: str) -> Any:
    if re.search(r"\$[\w({]|`", text):
        return Unread(text)
    return read_scalar(text)


def _draft(given: dict[str, Any], steps: int | None) -> Draft:
    section = "ppo" if given.get("algorithm.adv_estimator", "gae") == "gae" else "grpo"
    draft = Draft("verl", TABLE, given, section)
    _algorithm(draft)
    batch = _batches(draft)
    total = _run(draft, steps)
    _loss(draft)
    _kl(draft)
    _generation(draft)
    _model(draft)
    _optimizer(draft, total, batch)
    if section == "ppo":
        _value_model(draft)
    _data(draft)
    _environment(draft)
    return draft.finish()


def _copy(draft: Draft, name: str, key: str) -> None:
    """Put the value of a key of theirs, if it has one."""
    value = draft.value(name)
    if value is not None:
        draft.put(key.replace("{section}", draft.section), value, name)


def _algorithm(draft: Draft) -> None:
    name, kind = "algorithm.adv_estimator", draft.value("algorithm.adv_estimator")
    scaled = bool(draft.value("algorithm.norm_adv_by_std_in_grpo"))
    if draft.section == "ppo":
        draft.put(("ppo", "adv_estimator", "name"), "gae", name)
        _copy(draft, "algorithm.gamma", "ppo.adv_estimator.gae_gamma")
        _copy(draft, "algorithm.lam", "ppo.adv_estimator.gae_lambda")
        draft.put("ppo.critic_ppo_epochs", draft.size("critic.ppo_epochs"), "critic.ppo_epochs")
        _copy(draft, "trainer.critic_warmup", "ppo.policy_training_start_step")
        _copy(draft, "actor_rollout_ref.actor.ppo_epochs", "ppo.ppo_epochs")
        return
    if draft.value(_ACTOR + "ppo_epochs") != 1:
        draft.note(
            _ACTOR + "ppo_epochs",
            "grpo makes one pass over a batch; ppo_mini_batch_size divides it into several optimizer steps",
        )
    match kind:
        case "grpo" | "rloo" | "grpo_vectorized" | "rloo_vectorized":
            one_out = kind.startswith("rloo")
            draft.put("grpo.use_leave_one_out_baseline", one_out, name)
            draft.put(
                "grpo.normalize_rewards",
                scaled and not one_out,
                *((name,) if one_out else ("algorithm.norm_adv_by_std_in_grpo",)),
            )
        case "reinforce_plus_plus" | "reinforce_plus_plus_baseline":
            draft.put("grpo.adv_estimator.name", "reinforce_plus_plus", name)
            draft.put("grpo.adv_estimator.minus_baseline", kind.endswith("baseline"), name)
        case "gdpo":
            draft.put("grpo.adv_estimator.name", "gdpo", name)
            draft.put("grpo.use_leave_one_out_baseline", False, name)
        case _:
            draft.note(name, "grpo, rloo, reinforce_plus_plus(_baseline), gdpo and gae are there; written is grpo")
    if draft.value("algorithm.filter_groups.enable"):
        draft.put("grpo.use_dynamic_sampling", True, "algorithm.filter_groups.enable")
        most = draft.value("algorithm.filter_groups.max_num_gen_batches")
        draft.put(
            "grpo.dynamic_sampling_max_gen_batches", most or 1_000_000, "algorithm.filter_groups.max_num_gen_batches"
        )
        if isinstance(wave := draft.value("data.gen_batch_size"), int):
            draft.put("grpo.batch_multiplier", wave / draft.size("data.train_batch_size"), "data.gen_batch_size")


def _batches(draft: Draft) -> int:
    """Write the sizes of batches. Returns the optimizer steps in a trainer step."""
    prompts, count, mini = (
        draft.size("data.train_batch_size"),
        draft.size(_ROLLOUT + "n"),
        draft.size(_ACTOR + "ppo_mini_batch_size"),
    )
    draft.put(f"{draft.section}.num_prompts_per_step", prompts, "data.train_batch_size")
    draft.put(f"{draft.section}.num_generations_per_prompt", count, _ROLLOUT + "n")
    if mini < prompts:
        draft.put(
            "policy.train_global_batch_size",
            mini * count,
            _ACTOR + "ppo_mini_batch_size",
            says=f"prompts, times n {count}",
        )
    else:
        draft.put("policy.train_global_batch_size", None, _ACTOR + "ppo_mini_batch_size")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        if (size := draft.size(_ACTOR + name)) is not None:
            draft.put("policy.train_micro_batch_size", size, _ACTOR + name)
    for name in ("log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size"):
        for place in (_ROLLOUT, _REF):
            if (size := draft.size(place + name)) is not None:
                draft.put("policy.logprob_batch_size", size, place + name)
    if draft.value(_ACTOR + "use_dynamic_bsz"):
        draft.put("policy.sequence_packing.enabled", True, _ACTOR + "use_dynamic_bsz")
        whole = draft.size("data.max_prompt_length") + draft.size("data.max_response_length")
        names = (
            _ACTOR + "ppo_max_token_len_per_gpu",
            _ROLLOUT + "log_prob_max_token_len_per_gpu",
            _REF + "log_prob_max_token_len_per_gpu",
        )
        draft.put("policy.sequence_packing.train_mb_tokens", max(whole, draft.value(names[0])), names[0])
        for each in names[1:]:
            if (tokens := draft.size(each)) is not None:
                draft.put("policy.sequence_packing.logprob_mb_tokens", max(whole, tokens), each)
    return math.ceil(prompts / min(mini, prompts))


def _run(draft: Draft, steps: int | None) -> int | None:
    """Write how long the run is, and what it saves and says. Returns the number of trainer steps, if it is known."""
    section, total = draft.section, draft.size("trainer.total_training_steps")
    draft.put(f"{section}.max_num_epochs", draft.value("trainer.total_epochs"), "trainer.total_epochs")
    if total is not None:
        draft.put(f"{section}.max_num_steps", total, "trainer.total_training_steps")
    tests = draft.value("trainer.test_freq")
    draft.put(f"{section}.val_period", max(0, tests), "trainer.test_freq")
    draft.put(f"{section}.val_at_start", bool(draft.value("trainer.val_before_train")), "trainer.val_before_train")
    most = draft.value("data.val_max_samples")
    draft.put(
        f"{section}.max_val_samples",
        most if most > 0 else 1_000_000,
        "data.val_max_samples",
        says="" if most > 0 else "all of them",
    )
    if (period := draft.value("trainer.save_freq")) > 0:
        draft.put("checkpointing.save_period", period, "trainer.save_freq")
        draft.put(
            "checkpointing.keep_top_k",
            draft.size("trainer.max_actor_ckpt_to_keep"),
            "trainer.max_actor_ckpt_to_keep",
        )
        draft.put(("checkpointing", "metric_name"), None, says="the newest are kept, as in verl")
    else:
        draft.put("checkpointing.enabled", False, "trainer.save_freq")
    if isinstance(folder := draft.value("trainer.default_local_dir"), str):
        draft.put("checkpointing.checkpoint_dir", folder, "trainer.default_local_dir")
    _copy(draft, "trainer.log_val_generations", "logger.num_val_samples_to_print")
    loggers = draft.value("trainer.logger")
    loggers = loggers if isinstance(loggers, list) else [loggers]
    for tracker in ("wandb", "tensorboard", "mlflow"):
        if tracker in loggers:
            draft.put(f"logger.{tracker}_enabled", True, "trainer.logger")
    if others := [each for each in loggers if each not in ("wandb", "tensorboard", "mlflow", "console", "file")]:
        draft.note(
            "trainer.logger",
            f"{', '.join(map(str, others))}: W&B, TensorBoard and MLflow are there, and curves without any of them",
        )
    if "wandb" in loggers:
        _copy(draft, "trainer.project_name", "logger.wandb.project")
        _copy(draft, "trainer.experiment_name", "logger.wandb.name")
    if isinstance(seed := draft.value("data.seed"), int):
        draft.put(f"{section}.seed", seed, "data.seed")
    return total if total is not None else steps


def _loss(draft: Draft) -> None:
    for name, key in (("clip_ratio_low", "ratio_clip_min"), ("clip_ratio_high", "ratio_clip_max")):
        _copy(draft, _ACTOR + name, f"loss_fn.{key}")
    bounds = draft.value(_ACTOR + "clip_ratio_low"), draft.value(_ACTOR + "clip_ratio_high")
    if draft.given.get(_ACTOR + "clip_ratio", bounds[0]) not in bounds:
        draft.note(
            _ACTOR + "clip_ratio",
            "verl itself reads clip_ratio_low and clip_ratio_high, which are 0.2 unless they are given",
        )
    mode, constant = draft.value(_ACTOR + "loss_agg_mode"), draft.size(_ACTOR + "loss_scale_factor")
    match draft.value(_ACTOR + "policy_loss.loss_mode"):
        case "vanilla":
            draft.put("loss_fn.ratio_clip_c", draft.value(_ACTOR + "clip_ratio_c"), _ACTOR + "clip_ratio_c")
        case "gspo":
            draft.put("loss_fn.sequence_level_importance_ratios", True, _ACTOR + "policy_loss.loss_mode")
            mode = "seq-mean-token-mean"
        case "cispo":
            draft.put("loss_fn.use_cispo", True, _ACTOR + "policy_loss.loss_mode")
        case _:
            draft.note(_ACTOR + "policy_loss.loss_mode", f"{_FORM}; written is vanilla")
    name = _ACTOR + "loss_agg_mode"
    match mode:
        case "token-mean":
            draft.put("loss_fn.token_level_loss", True, name)
        case "seq-mean-token-mean":
            draft.put("loss_fn.token_level_loss", False, name)
        case "seq-mean-token-sum-norm":
            draft.put(
                "loss_fn.constant_length",
                constant or draft.size("data.max_response_length"),
                name,
                _ACTOR + "loss_scale_factor",
            )
        case "seq-mean-token-sum":
            draft.put("loss_fn.constant_length", 1, name, says="the sum over tokens, not divided by a length")
        case other:
            draft.note(name, f"{other} is not there; written is token-mean")
    if draft.value("algorithm.rollout_correction.bypass_mode"):
        draft.put("loss_fn.prev_logprobs_source", "generation", "algorithm.rollout_correction.bypass_mode")
    elif (kind := draft.value("algorithm.rollout_correction.rollout_is")) is not None:
        name = "algorithm.rollout_correction.rollout_is"
        if kind != "token":
            draft.note(name, f"{kind} bounds the weight of a sequence; written is a bound on each token's")
        draft.put("loss_fn.use_importance_sampling_correction", True, name)
        draft.put(("loss_fn", "truncated_importance_sampling_type"), "tis", name)
        _copy(draft, "algorithm.rollout_correction.rollout_is_threshold", "loss_fn.truncated_importance_sampling_ratio")


def _kl(draft: Draft) -> None:
    in_loss, in_reward = draft.value(_ACTOR + "use_kl_loss"), draft.value("algorithm.use_kl_in_reward")
    key = "loss_fn.reference_policy_kl_penalty"
    if in_loss and in_reward:
        draft.note("algorithm.use_kl_in_reward", "the penalty is in the rewards or in the loss; written is the loss")
    if in_loss:
        draft.put(key, draft.value(_ACTOR + "kl_loss_coef"), _ACTOR + "kl_loss_coef")
        names, kind = _ACTOR + "kl_loss_type", str(draft.value(_ACTOR + "kl_loss_type"))
    elif in_reward:
        takes = draft.section == "ppo" or draft.settings.get(("grpo", "adv_estimator", "name")) is not None
        if not takes:
            draft.note(
                "algorithm.use_kl_in_reward", "this estimator takes the penalty in the loss; written is the loss"
            )
        else:
            draft.put("loss_fn.use_kl_in_reward", True, "algorithm.use_kl_in_reward")
        draft.put(key, draft.value("algorithm.kl_ctrl.kl_coef"), "algorithm.kl_ctrl.kl_coef")
        names, kind = "algorithm.kl_penalty", str(draft.value("algorithm.kl_penalty"))
    else:
        draft.put(("loss_fn", "reference_policy_kl_penalty"), 0.0, says="use_kl_loss and use_kl_in_reward are false")
        return
    plain = kind.removesuffix("+")
    if plain in _KL_TYPES:
        draft.put("loss_fn.reference_policy_kl_type", _KL_TYPES[plain], names)
    else:
        draft.note(names, "k1, k2 and k3 are there; written is k3")


def _generation(draft: Draft) -> None:
    prompt, new = draft.size("data.max_prompt_length"), draft.size("data.max_response_length")
    draft.put("data.max_input_seq_length", prompt, "data.max_prompt_length")
    draft.put("policy.generation.max_new_tokens", new, "data.max_response_length")
    whole = draft.value(_ROLLOUT + "max_model_len")
    if isinstance(whole, int):
        draft.put("policy.max_total_sequence_length", whole, _ROLLOUT + "max_model_len")
    else:
        draft.put(
            "policy.max_total_sequence_length", prompt + new, "data.max_prompt_length", "data.max_response_length"
        )
    leaves_out = draft.value("data.filter_overlong_prompts")
    draft.put("data.overlong_prompts", "leave_out" if leaves_out else "refuse", "data.filter_overlong_prompts")
    own = "policy.generation."
    _copy(draft, _ROLLOUT + "temperature", own + "temperature")
    draft.put(own + "top_p", float(draft.value(_ROLLOUT + "top_p")), _ROLLOUT + "top_p")
    top_k = draft.value(_ROLLOUT + "top_k")
    draft.put(own + "top_k", top_k if top_k > 0 else None, _ROLLOUT + "top_k")
    of = _ROLLOUT + "val_kwargs."
    samples = draft.value(of + "do_sample") if of + "do_sample" in draft.given else False
    warm = draft.given.get(of + "temperature", 0)
    draft.put(
        own + "val_temperature",
        warm if samples else 0,
        of + "temperature",
        of + "do_sample",
        says="" if samples else "greedy",
    )
    if samples and draft.value(of + "top_p") != draft.value(_ROLLOUT + "top_p"):
        draft.put(own + "val_top_p", float(draft.value(of + "top_p")), of + "top_p")
    draft.put(f"{draft.section}.val_num_generations_per_prompt", draft.size(of + "n"), of + "n")
    for name, key in (
        ("tensor_model_parallel_size", "tensor_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("enforce_eager", "enforce_eager"),
        ("max_num_batched_tokens", "max_num_batched_tokens"),
        ("max_num_seqs", "max_num_seqs"),
    ):
        if _ROLLOUT + name in draft.given:  # sizes of an engine are not the run's meaning
            draft.put(f"{own}vllm_cfg.{key}", draft.value(_ROLLOUT + name), _ROLLOUT + name)
    template = {
        name.partition("template_kwargs")[2].lstrip("."): value
        for name, value in draft.given.items()
        if name.startswith(("data.apply_chat_template_kwargs.", "data.chat_template_kwargs."))
    }
    if template:
        names = [name for name in draft.given if "chat_template_kwargs." in name]
        draft.put(("policy", "tokenizer", "chat_template_kwargs"), template, *names)


def _model(draft: Draft) -> None:
    draft.put("policy.model_name", draft.value(_MODEL + "path"), _MODEL + "path")
    for name in (_MODEL + "tokenizer_path", "data.tokenizer"):
        if isinstance(draft.value(name), str):
            draft.put("policy.tokenizer.name", draft.value(name), name)
    draft.put(
        "policy.activation_checkpointing",
        bool(draft.value(_MODEL + "enable_gradient_checkpointing")),
        _MODEL + "enable_gradient_checkpointing",
    )
    if _MODEL + "use_remove_padding" in draft.given:
        why = "policy.sequence_packing packs rows; with use_dynamic_bsz it is on"
        draft.note(_MODEL + "use_remove_padding", why, draft.replaced)
    if rank := draft.value(_MODEL + "lora_rank"):
        draft.put("policy.lora_cfg.enabled", True, _MODEL + "lora_rank")
        draft.put("policy.lora_cfg.dim", rank, _MODEL + "lora_rank")
        _copy(draft, _MODEL + "lora_alpha", "policy.lora_cfg.alpha")
        draft.put(("policy", "lora_cfg", "init"), "uniform", says="as PEFT draws A")
        modules = draft.value(_MODEL + "target_modules")
        draft.put(
            "policy.lora_cfg.target_modules", modules if isinstance(modules, list) else [], _MODEL + "target_modules"
        )
        if isinstance(modules, str) and modules != "all-linear":
            draft.note(_MODEL + "target_modules", "give a list of names: policy.lora_cfg.target_modules")
        if excluded := draft.value(_MODEL + "exclude_modules", []):
            draft.put("policy.lora_cfg.exclude_modules", excluded, _MODEL + "exclude_modules")
    if overrides := {
        name.rpartition("override_config.")[2]: value
        for name, value in draft.given.items()
        if name.startswith(_MODEL + "override_config.")
    }:
        names = [name for name in draft.given if name.startswith(_MODEL + "override_config.")]
        draft.put(("policy", "hf_config_overrides"), overrides, *names)


def _optimizer(draft: Draft, total: int | None, in_batch: int) -> None:
    of, own = _ACTOR + "optim.", "policy.optimizer.kwargs."
    for name in ("lr", "weight_decay", "betas"):
        _copy(draft, of + name, own + name)
    clip = _ACTOR + "grad_clip" if _ACTOR + "grad_clip" in draft.given else of + "clip_grad"
    draft.put("policy.max_grad_norm", draft.value(clip), clip)
    kind = draft.value(of + "lr_scheduler_type")
    for name in ("warmup_style", "lr_decay_style"):
        kind = draft.value(of + name, "constant") or kind
    warm, share = draft.value(of + "lr_warmup_steps"), draft.value(of + "lr_warmup_steps_ratio")
    options = (
        "lr_scheduler_type",
        "warmup_style",
        "lr_decay_style",
        "lr_warmup_steps",
        "lr_warmup_steps_ratio",
        "min_lr_ratio",
        "total_training_steps",
    )
    names = [of + name for name in options if of + name in draft.given] or [of + "lr_scheduler_type"]
    own_total = draft.value(of + "total_training_steps")
    total = math.ceil(own_total / in_batch) if own_total > 0 else total
    put_schedule(
        draft, kind, warm if warm > 0 else share, total, in_batch, draft.value(of + "min_lr_ratio") or 0.0, names
    )


def _value_model(draft: Draft) -> None:
    for name, key in (
        ("optim.lr", "optimizer.kwargs.lr"),
        ("optim.weight_decay", "optimizer.kwargs.weight_decay"),
        ("model.path", "model_name"),
    ):
        _copy(draft, _CRITIC + name, f"value.{key}")
    clip = _CRITIC + "grad_clip" if _CRITIC + "grad_clip" in draft.given else _CRITIC + "optim.clip_grad"
    draft.put("value.max_grad_norm", draft.value(clip), clip)
    if (mini := draft.size(_CRITIC + "ppo_mini_batch_size")) is not None:
        draft.put("value.train_global_batch_size", mini * draft.size(_ROLLOUT + "n"), _CRITIC + "ppo_mini_batch_size")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        if (size := draft.size(_CRITIC + name)) is not None:
            draft.put("value.train_micro_batch_size", size, _CRITIC + name)
    _copy(draft, _CRITIC + "cliprange_value", "value_loss_fn.cliprange")
    draft.put(("value_loss_fn", "scale"), 1.0, says="verl doesn't scale the value model's loss")


def _data(draft: Draft) -> None:
    for name, key in (("data.train_files", "train"), ("data.val_files", "validation")):
        files = draft.value(name)
        paths = [str(Path(str(each)).expanduser()) for each in (files if isinstance(files, list) else [files])]
        draft.put(("data", key), [{"data_path": path} for path in paths], name)
        if name not in draft.given:
            draft.add(f"data.{key}: the command names no file; written is verl's default")
    if draft.value("data.prompt_key") != "prompt":
        draft.put(("data", "default", "input_key"), draft.value("data.prompt_key"), "data.prompt_key")
        draft.put(("data", "default", "output_key"), "reward_model.ground_truth", "data.prompt_key")
    draft.put(("data", "remove_duplicates"), False, says="verl keeps equal prompts")


def _environment(draft: Draft) -> None:
    function = next(
        (
            name
            for name in ("custom_reward_function.path", "reward.custom_reward_function.path")
            if draft.given.get(name)
        ),
        None,
    )
    model = next(
        (name for name in ("reward_model.enable", "reward.reward_model.enable") if draft.given.get(name) is True), None
    )
    options: dict[str, Any]
    if function is not None:
        named = function.removesuffix("path") + "name"
        target = f"{draft.value(function)}:{draft.value(named)}"
        name, options = "reward", {"target": target}
        draft.put(("env", name), options, function, named)
    elif model is not None:
        path = "reward_model.model.path" if model.startswith("reward_model") else "reward.reward_model.model_path"
        name, options = (
            "reward_model",
            {"type": "reward_model", "model_name": draft.value(path) or draft.value(_MODEL + "path")},
        )
        draft.put(("env", name), options, model, path)
    else:
        name = "math"
        draft.put(
            ("env", name),
            {"type": "math"},
            says="verl chooses a score by data_source; this one compares expressions with reward_model.ground_truth",
        )
        draft.add(
            "env: if the data_source of your rows is not mathematics, name your own function, as custom_reward_function does"
        )
    draft.put(("data", "default", "env_name"), name)
    for name in ("reward_model.reward_manager", "reward.reward_manager.name"):
        if (manager := draft.value(name)) not in ("naive", "dapo", None):
            draft.note(name, f"{manager}: a function gets one completion")
    _overlong(draft)


def _overlong(draft: Draft) -> None:
    found = {name.rpartition(".")[2]: name for name in draft.given if ".overlong_buffer" in name}
    if not found or not draft.given.get(found.get("enable", "")):
        return
    own = f"{draft.section}.reward_shaping."
    draft.put(own + "enabled", True, found["enable"])
    for theirs, key in (("len", "overlong_buffer_length"), ("penalty_factor", "overlong_buffer_penalty")):
        if theirs in found:
            draft.put(own + key, draft.given[found[theirs]], found[theirs])
    most = next((name for name in draft.given if name.endswith(".max_resp_len")), "data.max_response_length")
    draft.put(own + "max_response_length", draft.given.get(most, draft.size("data.max_response_length")), most)
