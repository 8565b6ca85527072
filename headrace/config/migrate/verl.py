"""A run of verl (0.9), from the overrides of a script or a command. Its keys are in `verl_keys`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import ConfigError
from headrace.config.migrate.draft import NO_SUCH_LOSS, Draft, put_adapted_layers, put_trackers
from headrace.config.migrate.schedules import put_schedule
from headrace.config.migrate.shell_script import read_overrides
from headrace.config.migrate.verl_keys import ACTOR, CRITIC, MODEL, REF, ROLLOUT, TABLE

_LOGPROB_SIZES = ("log_prob_micro_batch_size_per_gpu", "log_prob_micro_batch_size")
# verl's estimators of the KL divergence, and ours.
_KL_TYPES = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}


def migrate(source: str, steps: int | None = None) -> Draft:
    """Draft the configuration for a script (`FILE.sh`), or for a command line or its overrides alone. `steps` are the trainer steps of a
    run whose data alone tells them. Raises `ConfigError`."""
    path = Path(source)
    is_file = os.path.isfile(source)  # Path.is_file raises for text that is too long for a name
    if not is_file and "=" not in source:
        raise ConfigError(f"{source} is not a file and has no overrides; give FILE.sh, or a command in quotes")
    try:
        text = path.read_text(encoding="utf-8") if is_file else source
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    given = read_overrides(text)
    if not given:
        raise ConfigError(
            f"{source[:200]} has no overrides of verl, such as data.train_batch_size=1024; give the script that has them"
        )
    return _draft(given, steps)


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


def _algorithm(draft: Draft) -> None:
    name, kind = "algorithm.adv_estimator", draft.value("algorithm.adv_estimator")
    scaled = bool(draft.value("algorithm.norm_adv_by_std_in_grpo"))
    if draft.section == "ppo":
        draft.put(("ppo", "adv_estimator", "name"), "gae", name)
        draft.copy("algorithm.gamma", "ppo.adv_estimator.gae_gamma")
        draft.copy("algorithm.lam", "ppo.adv_estimator.gae_lambda")
        draft.put("ppo.critic_ppo_epochs", draft.size("critic.ppo_epochs"), "critic.ppo_epochs")
        draft.copy("trainer.critic_warmup", "ppo.policy_training_start_step")
        draft.copy("actor_rollout_ref.actor.ppo_epochs", "ppo.ppo_epochs")
        return
    if draft.value(ACTOR + "ppo_epochs") != 1:
        draft.note(
            ACTOR + "ppo_epochs",
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
            if draft.value("algorithm.gamma") != 1:
                draft.note("algorithm.gamma", "this estimator doesn't discount here")
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
        draft.size(ROLLOUT + "n"),
        draft.size(ACTOR + "ppo_mini_batch_size"),
    )
    draft.put(f"{draft.section}.num_prompts_per_step", prompts, "data.train_batch_size")
    draft.put(f"{draft.section}.num_generations_per_prompt", count, ROLLOUT + "n")
    if mini < prompts:
        draft.put(
            "policy.train_global_batch_size",
            mini * count,
            ACTOR + "ppo_mini_batch_size",
            says=f"prompts, times n {count}",
        )
    else:
        draft.put("policy.train_global_batch_size", None, ACTOR + "ppo_mini_batch_size")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        if (size := draft.size(ACTOR + name)) is not None:
            draft.put("policy.train_micro_batch_size", size, ACTOR + name)
    names = [place + name for name in _LOGPROB_SIZES for place in (ROLLOUT, REF)]
    _smallest(draft, "policy.logprob_batch_size", names)
    if draft.value(ACTOR + "use_dynamic_bsz"):
        draft.put("policy.sequence_packing.enabled", True, ACTOR + "use_dynamic_bsz")
        whole = draft.size("data.max_prompt_length") + draft.size("data.max_response_length")
        name = ACTOR + "ppo_max_token_len_per_gpu"
        draft.put("policy.sequence_packing.train_mb_tokens", max(whole, draft.value(name)), name)
        names = [place + "log_prob_max_token_len_per_gpu" for place in (ROLLOUT, REF)]
        _smallest(draft, "policy.sequence_packing.logprob_mb_tokens", names, whole)
    return math.ceil(prompts / min(mini, prompts))


def _smallest(draft: Draft, key: str, names: Sequence[str], least: int = 1) -> None:
    """Put the smallest of these sizes, of which there is one here, and at least `least`."""
    sizes = {name: size for name in names if (size := draft.size(name)) is not None}
    if sizes:
        alike = [name for name, size in sizes.items() if size == min(sizes.values())]
        draft.put(key, max(least, min(sizes.values())), *alike)
        for name in sizes.keys() - set(alike):
            draft.note(
                name, f"there is one size for all passes without gradients; written is the smallest, of {alike[0]}"
            )


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
    draft.copy("trainer.log_val_generations", "logger.num_val_samples_to_print")
    put_trackers(draft, draft.value("trainer.logger"), "trainer.logger", ("console", "file"))
    if ("logger", "wandb_enabled") in draft.settings:
        draft.copy("trainer.project_name", "logger.wandb.project")
        draft.copy("trainer.experiment_name", "logger.wandb.name")
    if isinstance(seed := draft.value("data.seed"), int):
        draft.put(f"{section}.seed", seed, "data.seed")
    return total if total is not None else steps


def _loss(draft: Draft) -> None:
    for name, key in (("clip_ratio_low", "ratio_clip_min"), ("clip_ratio_high", "ratio_clip_max")):
        draft.copy(ACTOR + name, f"loss_fn.{key}")
    bounds = draft.value(ACTOR + "clip_ratio_low"), draft.value(ACTOR + "clip_ratio_high")
    if draft.given.get(ACTOR + "clip_ratio", bounds[0]) not in bounds:
        draft.note(
            ACTOR + "clip_ratio",
            "verl itself reads clip_ratio_low and clip_ratio_high, which are 0.2 unless they are given",
        )
    elif draft.is_given(ACTOR + "clip_ratio"):
        draft.note(ACTOR + "clip_ratio", "the bounds are clip_ratio_low and clip_ratio_high", draft.same)
    mode, constant = draft.value(ACTOR + "loss_agg_mode"), draft.size(ACTOR + "loss_scale_factor")
    match draft.value(ACTOR + "policy_loss.loss_mode"):
        case "vanilla":
            draft.put("loss_fn.ratio_clip_c", draft.value(ACTOR + "clip_ratio_c"), ACTOR + "clip_ratio_c")
        case "gspo":
            draft.put("loss_fn.sequence_level_importance_ratios", True, ACTOR + "policy_loss.loss_mode")
            mode = "seq-mean-token-mean"
        case "cispo":
            draft.put("loss_fn.use_cispo", True, ACTOR + "policy_loss.loss_mode")
        case _:
            draft.note(ACTOR + "policy_loss.loss_mode", f"{NO_SUCH_LOSS}; written is vanilla")
    name = ACTOR + "loss_agg_mode"
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
                ACTOR + "loss_scale_factor",
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
        draft.copy("algorithm.rollout_correction.rollout_is_threshold", "loss_fn.truncated_importance_sampling_ratio")


def _kl(draft: Draft) -> None:
    in_loss, in_reward = draft.value(ACTOR + "use_kl_loss"), draft.value("algorithm.use_kl_in_reward")
    key = "loss_fn.reference_policy_kl_penalty"
    if in_loss and in_reward:
        draft.note("algorithm.use_kl_in_reward", "the penalty is in the rewards or in the loss; written is the loss")
    if in_loss:
        draft.put(key, draft.value(ACTOR + "kl_loss_coef"), ACTOR + "kl_loss_coef", ACTOR + "use_kl_loss")
        names, kind = ACTOR + "kl_loss_type", str(draft.value(ACTOR + "kl_loss_type"))
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
    whole = draft.value(ROLLOUT + "max_model_len")
    if isinstance(whole, int):
        draft.put("policy.max_total_sequence_length", whole, ROLLOUT + "max_model_len")
    else:
        draft.put(
            "policy.max_total_sequence_length", prompt + new, "data.max_prompt_length", "data.max_response_length"
        )
    leaves_out = draft.value("data.filter_overlong_prompts")
    draft.put("data.overlong_prompts", "leave_out" if leaves_out else "refuse", "data.filter_overlong_prompts")
    own = "policy.generation."
    draft.copy(ROLLOUT + "temperature", own + "temperature")
    draft.put(own + "top_p", float(draft.value(ROLLOUT + "top_p")), ROLLOUT + "top_p")
    top_k = draft.value(ROLLOUT + "top_k")
    draft.put(own + "top_k", top_k if top_k > 0 else None, ROLLOUT + "top_k")
    of = ROLLOUT + "val_kwargs."
    samples = draft.value(of + "do_sample") if of + "do_sample" in draft.given else False
    warm = draft.given.get(of + "temperature", 0)
    draft.put(
        own + "val_temperature",
        warm if samples else 0,
        of + "temperature",
        of + "do_sample",
        says="" if samples else "greedy",
    )
    for name, kind in (("top_p", float), ("top_k", int)) if samples else ():
        value = draft.value(of + name)
        if value != draft.value(ROLLOUT + name):
            draft.put(f"{own}val_{name}", kind(value), of + name)
        elif draft.is_given(of + name):
            draft.note(of + name, "as in training", draft.same)
    draft.put(f"{draft.section}.val_num_generations_per_prompt", draft.size(of + "n"), of + "n")
    for name, key in (
        ("tensor_model_parallel_size", "tensor_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("enforce_eager", "enforce_eager"),
        ("max_num_batched_tokens", "max_num_batched_tokens"),
        ("max_num_seqs", "max_num_seqs"),
    ):
        if ROLLOUT + name in draft.given:  # sizes of an engine are not the run's meaning
            draft.put(f"{own}vllm_cfg.{key}", draft.value(ROLLOUT + name), ROLLOUT + name)
    of_template = ("data.apply_chat_template_kwargs", "data.chat_template_kwargs")
    _mapping(draft, of_template, ("policy", "tokenizer", "chat_template_kwargs"))


def _model(draft: Draft) -> None:
    draft.put("policy.model_name", draft.value(MODEL + "path"), MODEL + "path")
    for name in (MODEL + "tokenizer_path", "data.tokenizer"):
        if isinstance(draft.value(name), str):
            draft.put("policy.tokenizer.name", draft.value(name), name)
    draft.put(
        "policy.activation_checkpointing",
        bool(draft.value(MODEL + "enable_gradient_checkpointing")),
        MODEL + "enable_gradient_checkpointing",
    )
    if MODEL + "use_remove_padding" in draft.given:
        why = "policy.sequence_packing packs rows; with use_dynamic_bsz it is on"
        draft.note(MODEL + "use_remove_padding", why, draft.replaced)
    if rank := draft.value(MODEL + "lora_rank"):
        draft.put("policy.lora_cfg.enabled", True, MODEL + "lora_rank")
        draft.put("policy.lora_cfg.dim", rank, MODEL + "lora_rank")
        draft.copy(MODEL + "lora_alpha", "policy.lora_cfg.alpha")
        layers = draft.value(MODEL + "target_modules")
        put_adapted_layers(draft, layers, MODEL + "target_modules", MODEL + "exclude_modules")
    _mapping(draft, (MODEL + "override_config",), ("policy", "hf_config_overrides"))


def _mapping(draft: Draft, prefixes: tuple[str, ...], key: tuple[str, ...]) -> None:
    """Put a mapping, which a run gives as a whole, or by its keys."""
    found: dict[str, Any] = {}
    names = []
    for name, value in draft.given.items():
        for prefix in prefixes:
            if name == prefix and isinstance(value, dict):
                found |= value
                names.append(name)
            elif name.startswith(f"{prefix}."):
                found[name.removeprefix(f"{prefix}.")] = value
                names.append(name)
    if found:
        draft.put(key, found, *names)


def _optimizer(draft: Draft, total: int | None, in_batch: int) -> None:
    of, own = ACTOR + "optim.", "policy.optimizer.kwargs."
    for name in ("lr", "weight_decay", "betas"):
        draft.copy(of + name, own + name)
    clip = ACTOR + "grad_clip" if ACTOR + "grad_clip" in draft.given else of + "clip_grad"
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
    rates = draft.value(of + "lr"), draft.value(of + "min_lr_ratio") or 0.0
    put_schedule(draft, kind, warm if warm > 0 else share, total, in_batch, rates, names)


def _value_model(draft: Draft) -> None:
    for name, key in (
        ("optim.lr", "optimizer.kwargs.lr"),
        ("optim.weight_decay", "optimizer.kwargs.weight_decay"),
        ("model.path", "model_name"),
    ):
        draft.copy(CRITIC + name, f"value.{key}")
    clip = CRITIC + "grad_clip" if CRITIC + "grad_clip" in draft.given else CRITIC + "optim.clip_grad"
    draft.put("value.max_grad_norm", draft.value(clip), clip)
    if (mini := draft.size(CRITIC + "ppo_mini_batch_size")) is not None:
        draft.put("value.train_global_batch_size", mini * draft.size(ROLLOUT + "n"), CRITIC + "ppo_mini_batch_size")
    for name in ("ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"):
        if (size := draft.size(CRITIC + name)) is not None:
            draft.put("value.train_micro_batch_size", size, CRITIC + name)
    draft.copy(CRITIC + "cliprange_value", "value_loss_fn.cliprange")
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
            {"type": "reward_model", "model_name": draft.value(path) or draft.value(MODEL + "path")},
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
        if (manager := draft.value(name)) == "dapo":
            draft.note(name, "it adds overlong_buffer alone", draft.same)
        elif manager not in ("naive", None):
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
