"""A run of TRL (1.16), from a script's calls or the flags of a command. Its keys are in `trl_keys`."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from headrace.base.errors import ConfigError
from headrace.config.migrate.draft import (
    NO_SUCH_LOSS,
    TRACKERS,
    Draft,
    Unread,
    is_like,
    put_adapted_layers,
    put_trackers,
    read_scalar,
)
from headrace.config.migrate.python_script import TRLS, Reward, Script, environment_name, read_script, reward_of_model
from headrace.config.migrate.schedules import put_schedule
from headrace.config.migrate.trl_keys import TABLE

_LISTS = ("reward_funcs", "lora_target_modules", "reward_weights")  # of a command, even of one word


def migrate(source: str, processes: int = 1, steps: int | None = None, folder: Path = Path()) -> Draft:
    """Draft the configuration for a script (`FILE.py`) or a command line. `processes` are those that accelerate starts; `steps` the
    trainer steps of a run whose data alone tells them. Reward functions that the script defines are copied into a file of their own, which
    is to be written into `folder`. Raises `ConfigError`."""
    try:
        words = shlex.split(source.replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise ConfigError(f"{source[:200]} is no command: {error}") from error
    if not words:
        raise ConfigError("the source is empty; give FILE.py, or a command in quotes")
    files = [word for word in words if word.endswith(".py") and os.path.isfile(word)]
    if len(words) == 1 and not files:
        raise ConfigError(f"{source} is not a file; give the path of the script, or a command in quotes")
    flags = _flags(words)
    script = read_script(Path(files[0]), folder, bool(flags)) if files else Script({}, [], None, None, [], {}, {})
    given = {**script.given, **flags, **script.set_later}
    for alias, own in (
        ("model_name_or_path", "model"),
        ("lora_r", "r"),
        ("lora_target_modules", "target_modules"),
        ("torch_dtype", "dtype"),
    ):
        if alias in given:
            given.setdefault(own, given.pop(alias))
            if isinstance(given[own], Unread):
                given[own] = flags.get(alias, given[own])
    return _draft(script._replace(given=given), processes, steps)


def _flags(words: list[str]) -> dict[str, Any]:
    """Return the flags of a command: `--name value …`, `--name=value`, `--name`."""
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name is not None and not word.endswith(".py"):
            found[name].append(word)
        elif word.endswith(".py"):
            name = None
    known: dict[str, Any] = {}
    for name, values in found.items():
        read = [read_scalar(value.rstrip(",")) for value in values]
        known[name] = read if name in _LISTS or len(read) > 1 else True if not read else read[0]
    config = str(known.get("config"))
    return {**_in_file(known.pop("config")), **known} if os.path.isfile(config) else known


def _in_file(config: str) -> dict[str, Any]:
    """Return the flags in the YAML file of `--config`."""
    try:
        found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {config} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {config} is not a mapping of flags; leave it out, or correct it")
    return {str(name): _of_file(str(name), value) for name, value in found.items()}


def _of_file(name: str, value: Any) -> Any:
    value = read_scalar(value) if isinstance(value, str) else value  # YAML takes 1e-6 for text
    return [value] if name in _LISTS and not isinstance(value, list) else value


def _draft(script: Script, processes: int, steps: int | None) -> Draft:
    draft = Draft("TRL", TABLE, script.given, "grpo")
    draft.files |= script.files
    for text in dict.fromkeys(script.to_add):
        draft.add(text)
    if "config" in draft.given:
        draft.note("config", "this file is not here, so its keys were not read", draft.to_add)
    model = draft.value("model")
    if isinstance(model, str):
        draft.put("policy.model_name", model, "model")
    elif isinstance(script.given.get("model"), Unread):
        pass  # reported with its expression
    elif "model" not in script.given:
        draft.add("policy.model_name: neither the script nor the command names a model")
    else:
        draft.note("model", "name the model as text: policy.model_name")
    steps_in_batch = _batches(draft, processes)
    total = _steps(draft, steps_in_batch, steps)
    _loss(draft)
    _generation(draft)
    _model(draft)
    _optimizer(draft, total, steps_in_batch)
    _validation(draft, steps_in_batch, script)
    _environments(draft, script)
    return draft.finish()


def _batches(draft: Draft, processes: int) -> int:
    """Write the sizes of batches. Returns the optimizer steps in a trainer step."""
    device, accumulated = draft.size("per_device_train_batch_size"), draft.size("gradient_accumulation_steps")
    count = draft.size("num_generations")
    trained = device * processes * accumulated
    generated = draft.size("generation_batch_size") or device * processes * (
        draft.size("steps_per_generation") or accumulated
    )
    batch = math.lcm(trained, generated)
    others = draft.those_given("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
    names = ["per_device_train_batch_size", *others]
    of = f"for {processes} process{'es' if processes > 1 else ''}; --processes says how many accelerate starts"
    if batch % count:
        draft.add(
            f"grpo.num_prompts_per_step: {batch} completions are not whole groups of num_generations {count}; TRL refuses them too"
            + ("" if processes > 1 else ", unless accelerate starts several processes (--processes)")
        )
    draft.put("grpo.num_prompts_per_step", max(1, batch // count), *names, says=of)
    if batch != trained:
        draft.put("policy.train_global_batch_size", trained, *names)
    draft.put("policy.train_micro_batch_size", device, "per_device_train_batch_size")
    if draft.value("num_iterations") != 1:
        draft.note(
            "num_iterations",
            "grpo makes one pass over a batch; `policy.train_global_batch_size` divides it into several optimizer steps",
        )
    elif "num_iterations" in draft.given:
        draft.note("num_iterations", "grpo makes one pass over a batch", draft.same)
    return batch // trained


def _steps(draft: Draft, in_batch: int, steps: int | None) -> int | None:
    """Write how long the run is. Returns the number of trainer steps, if it is known."""
    most = draft.value("max_steps")
    if most > 0:
        total = math.ceil(most / in_batch)
        draft.put("grpo.max_num_steps", total, "max_steps")
        draft.put(
            "grpo.max_num_epochs",
            1_000_000,
            "max_steps",
            "num_train_epochs",
            says="the number of steps alone ends the run",
        )
        return total
    epochs = draft.value("num_train_epochs")
    draft.put("grpo.max_num_epochs", math.ceil(epochs), "num_train_epochs")
    if epochs != math.ceil(epochs):
        draft.note("num_train_epochs", "only whole epochs; grpo.max_num_steps ends a run earlier")
    return steps


def _loss(draft: Draft) -> None:
    kind = draft.value("loss_type")
    draft.put("grpo.use_leave_one_out_baseline", False, says="TRL's baseline is the mean of the whole group")
    match draft.value("scale_rewards"):
        case True | "group":
            draft.put("grpo.normalize_rewards", True, "scale_rewards")
        case False | "none":
            draft.put("grpo.normalize_rewards", False, "scale_rewards")
        case other:
            draft.note(
                "scale_rewards",
                f"{other} is not there; docs/recipes.md names the estimator that whitens over the batch",
            )
    _weights(draft, kind)
    _bounds(draft, kind)
    if draft.value("importance_sampling_level") == "sequence":
        draft.put("loss_fn.sequence_level_importance_ratios", True, "importance_sampling_level")
        if kind not in ("grpo",):
            draft.put(
                "loss_fn.token_level_loss",
                False,
                "importance_sampling_level",
                says="ratios of sequences are averaged over sequences",
            )
            draft.note(
                "loss_type",
                f"{kind} with ratios of sequences weighs them by their lengths; here each counts the same, as with loss_type grpo",
            )
            draft.settings.pop(("loss_fn", "constant_length"), None)
    elif "importance_sampling_level" in draft.given:
        draft.put("loss_fn.sequence_level_importance_ratios", False, "importance_sampling_level")
    if draft.value("beta"):
        draft.put(
            "loss_fn.use_on_policy_kl_approximation",
            bool(draft.value("use_bias_correction_kl")),
            "use_bias_correction_kl",
        )
        for key in ("kl_input_clamp_value", "kl_output_clamp_value"):
            draft.put(f"loss_fn.{key}", None, says="TRL doesn't clamp the KL term")
    if draft.given.get("use_vllm"):
        _importance(draft)


def _weights(draft: Draft, kind: str) -> None:
    """Write how the tokens of a batch are weighed."""
    match kind:
        case "dapo":
            draft.put("loss_fn.token_level_loss", True, "loss_type")
        case "bnpo":
            draft.put("loss_fn.token_level_loss", True, "loss_type")
            draft.note(
                "loss_type",
                "bnpo averages over the tokens of each micro-batch; here over those of the whole mini-batch, as dapo does",
            )
        case "grpo":
            draft.put("loss_fn.token_level_loss", False, "loss_type")
        case "dr_grpo":
            draft.put(
                "loss_fn.constant_length",
                draft.size("max_completion_length"),
                "loss_type",
                says="divided by max_completion_length",
            )
        case "cispo":
            draft.put("loss_fn.use_cispo", True, "loss_type")
        case _:
            draft.note("loss_type", NO_SUCH_LOSS)


def _bounds(draft: Draft, kind: str) -> None:
    """Write between which bounds a ratio counts."""
    low, high = draft.value("epsilon"), draft.value("epsilon_high", 0.2)
    if kind == "cispo":  # TRL clamps the ratio itself from above, and not from below
        draft.put("loss_fn.ratio_clip_min", 1.0, "epsilon", says="TRL's cispo has no lower bound")
        draft.put(
            "loss_fn.ratio_clip_max",
            max(0.0, (low if high is None else high) - 1),
            "epsilon_high",
            says="TRL's cispo bounds the ratio by epsilon_high itself",
        )
    else:
        draft.put("loss_fn.ratio_clip_min", low, "epsilon")
        draft.put(
            "loss_fn.ratio_clip_max",
            low if high is None else high,
            *(("epsilon_high",) if high is not None else ("epsilon",)),
        )


def _importance(draft: Draft) -> None:
    corrects = bool(draft.value("vllm_importance_sampling_correction"))
    draft.put("loss_fn.use_importance_sampling_correction", corrects, "vllm_importance_sampling_correction")
    if not corrects:
        return
    mode = draft.value("vllm_importance_sampling_mode")
    bound, least = (
        draft.value("vllm_importance_sampling_clip_max"),
        draft.value("vllm_importance_sampling_clip_min", 0.1),
    )
    bound = draft.value("vllm_importance_sampling_cap", 1.0) or bound
    if str(mode).startswith("sequence"):
        draft.note(
            "vllm_importance_sampling_mode",
            f"{mode} bounds the weight of a sequence, the product over its tokens; written is a bound on each token's. "
            "seq-mask-tis masks sequences by their geometric mean",
        )
    kind = "icepop" if mode == "token_mask" else "tis"
    draft.put("loss_fn.truncated_importance_sampling_type", kind, "vllm_importance_sampling_mode")
    draft.put(
        "loss_fn.truncated_importance_sampling_ratio",
        1e9 if bound is None else bound,
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_cap",
    )
    if least is not None or kind == "icepop":
        draft.put("loss_fn.truncated_importance_sampling_ratio_min", least or 0.0, "vllm_importance_sampling_clip_min")


def _generation(draft: Draft) -> None:
    new = draft.size("max_completion_length")
    prompt, whole = draft.size("max_prompt_length"), draft.size("vllm_max_model_length")
    if whole is not None:
        draft.put("policy.max_total_sequence_length", whole, "vllm_max_model_length")
    elif prompt is not None:
        draft.put("policy.max_total_sequence_length", prompt + new, "max_prompt_length", "max_completion_length")
    else:
        draft.put(
            ("policy", "max_total_sequence_length"),
            1024 + new,
            says="TRL limits no prompt; `config check` measures yours",
        )
    if prompt is not None and whole is not None:
        draft.put("data.max_input_seq_length", prompt, "max_prompt_length")
    draft.put("policy.generation.top_k", draft.value("top_k") or None, "top_k")
    kwargs = dict(draft.value("generation_kwargs", {}) or {})
    for option, key in (
        ("stop", "stop_strings"),
        ("stop_strings", "stop_strings"),
        ("stop_token_ids", "stop_token_ids"),
    ):
        if option in kwargs:
            stops = kwargs.pop(option)
            draft.put(f"policy.generation.{key}", stops if isinstance(stops, list) else [stops], "generation_kwargs")
    if kwargs:
        draft.note(
            "generation_kwargs",
            f"{', '.join(kwargs)}: the sampling is temperature, top_p, top_k and what ends a completion",
        )
    if template := draft.value("chat_template_kwargs", {}):
        draft.put(("policy", "tokenizer", "chat_template_kwargs"), template, "chat_template_kwargs")
    for name in ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"):
        if name in draft.given:
            draft.put(f"policy.generation.vllm_cfg.{name.removeprefix('vllm_')}", draft.value(name), name)


def _model(draft: Draft) -> None:
    kwargs = draft.value("model_init_kwargs", {})
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    half = draft.value("fp16")
    if half:
        draft.note("fp16", "computes in bfloat16 or float32; written is bfloat16")
    precision = "float32" if draft.value("bf16") is False and not half else "bfloat16"
    names = draft.those_given("bf16", "fp16") or ["bf16"]
    draft.put("policy.precision", precision, *names, says="weights, gradients and moments are float32")
    for name in ("model_init_kwargs", "dtype"):
        if name in draft.given:
            others = (
                ", ".join(str(key) for key in kwargs if key not in ("dtype", "torch_dtype"))
                if name == "model_init_kwargs"
                else ""
            )
            if others:
                draft.note(name, f"{others}: not needed, or not there; the weights are float32")
            else:
                why = "weights are float32 while they are trained, and computed in policy.precision"
                draft.note(name, why, draft.replaced)
    draft.put("policy.activation_checkpointing", bool(draft.value("gradient_checkpointing")), "gradient_checkpointing")
    if draft.is_given("r", "use_peft") and draft.given.get("use_peft", True):
        _adapter(draft)


def _adapter(draft: Draft) -> None:
    """Write the adapter of `LoraConfig`, or of the flags of a command, whose defaults differ."""
    by_flag = draft.is_given("use_peft")
    draft.put("policy.lora_cfg.enabled", True, "use_peft" if by_flag else "r")
    for name, key, of_flag, of_peft in (
        ("r", "dim", 16, 8),
        ("lora_alpha", "alpha", 32, 8),
        ("lora_dropout", "dropout", 0.05, 0.0),
    ):
        value = draft.value(name, of_flag)
        draft.put(f"policy.lora_cfg.{key}", (of_flag if by_flag else of_peft) if value is None else value, name)
    modules = draft.value("target_modules")
    put_adapted_layers(draft, modules, "target_modules", "exclude_modules")
    if modules is None:
        why = "PEFT's default for most models; [] is all linear layers"
        draft.put(("policy", "lora_cfg", "target_modules"), ["q_proj", "v_proj"], says=why)


def _optimizer(draft: Draft, total: int | None, in_batch: int) -> None:
    draft.put(
        "policy.optimizer.kwargs.betas",
        [draft.value("adam_beta1"), draft.value("adam_beta2")],
        "adam_beta1",
        "adam_beta2",
    )
    kind, warm = draft.value("lr_scheduler_type"), draft.value("warmup_steps") or draft.value("warmup_ratio", 0.1) or 0
    kwargs = draft.value("lr_scheduler_kwargs", {"min_lr": 0.0}) or {}
    names = draft.those_given("lr_scheduler_type", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
    least = kwargs.get("min_lr_rate", kwargs.get("min_lr", 0) / (draft.value("learning_rate") or 1.0))
    put_schedule(
        draft, kind, warm, total, in_batch, (draft.value("learning_rate"), least), names or ["lr_scheduler_type"]
    )


def _validation(draft: Draft, in_batch: int, script: Script) -> None:
    strategy = draft.value("eval_strategy")
    names = draft.those_given("eval_strategy", "eval_steps") or ["eval_strategy"]
    period = draft.value("eval_steps", 1) or draft.given.get("logging_steps") or 10
    validates = strategy not in ("no", False)
    if strategy == "epoch" or (validates and (not is_like(period, 1) or period < 1)):
        why = "grpo.val_period: the data decides it; give the number of trainer steps between two validations"
        draft.note(names, why, draft.to_add)
    elif validates:
        draft.put("grpo.val_period", max(1, round(period / in_batch)), *names)
        draft.put(
            "grpo.val_num_generations_per_prompt",
            draft.size("num_generations_eval") or draft.size("num_generations"),
            "num_generations_eval",
            "num_generations",
        )
    else:
        draft.put("grpo.val_period", 0, *names)
    if validates or draft.value("eval_on_start"):
        draft.put("grpo.val_at_start", bool(draft.value("eval_on_start")), "eval_on_start")
    saves, period = draft.value("save_strategy"), draft.value("save_steps")
    if saves == "no":
        draft.put("checkpointing.enabled", False, "save_strategy")
    elif saves in ("epoch", "best") or period < 1:
        why = "checkpointing.save_period: the data decides it; give the number of trainer steps between two checkpoints"
        draft.note(draft.those_given("save_strategy", "save_steps"), why, draft.to_add)
    else:
        draft.put("checkpointing.save_period", max(1, round(period / in_batch)), "save_steps", "save_strategy")
    draft.put("checkpointing.keep_top_k", draft.size("save_total_limit"), "save_total_limit")
    draft.put("checkpointing.save_optimizer", not draft.value("save_only_model"), "save_only_model")
    best = draft.is_given("metric_for_best_model", "load_best_model_at_end")
    if best and validates:
        draft.put(
            "checkpointing.metric_name",
            "val:accuracy",
            "metric_for_best_model",
            "load_best_model_at_end",
            "greater_is_better",
        )
    else:
        draft.put(("checkpointing", "metric_name"), None, says="the newest are kept, as in TRL")
    if isinstance(draft.value("output_dir", ""), str):
        draft.put("run.dir", draft.value("output_dir", ""), "output_dir")
    reports = draft.value("report_to")
    put_trackers(draft, TRACKERS if reports in ("all", ["all"]) else reports, "report_to", ("none",))
    for name, key in (("run_name", "logger.wandb.name"), ("project", "logger.wandb.project")):
        if name in draft.given:
            draft.put(key, draft.value(name), name)


def _environments(draft: Draft, script: Script) -> None:
    rewards = list(script.rewards)
    named = draft.given.get("reward_funcs")
    for each in named if isinstance(named, list) else []:
        module, _, name = str(each).rpartition(".")
        is_built_in = module in ("", "trl.rewards") and name in TRLS
        written = {"target": f"rewards.py:{environment_name(name)}"}
        rewards.append(Reward(environment_name(name), TRLS[name] if is_built_in else written))
        if not is_built_in:
            draft.add(f"rewards.py beside the configuration, with `from {module or 'trl.rewards'} import {name}`")
    if isinstance(model := draft.given.get("reward_model_name_or_path"), str):
        rewards.append(reward_of_model(model))
    for reward in rewards:
        flags = draft.those_given("reward_funcs", "reward_model_name_or_path")
        draft.put(("env", reward.name), dict(reward.options), *flags, says="" if flags else "reward_funcs")
        if reward.options == TRLS["accuracy_reward"]:
            draft.put(
                ("data", "default", "output_key"), "solution", says="the column that accuracy_reward compares with"
            )
    own = rewards[0].name if rewards else None
    if len(rewards) > 1:
        weights = draft.value("reward_weights", [1.0]) or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            draft.note(
                "reward_weights", f"there are {len(rewards)} reward functions; written is 1 for each", draft.to_add
            )
            weights = [1.0] * len(rewards)
        own = "reward"
        parts = {reward.name: float(weight) for reward, weight in zip(rewards, weights, strict=True)}
        combined = {"type": "combine", "parts": parts}
        draft.put(("env", own), combined, *draft.those_given("reward_weights"), says="the weighted sum")
        if draft.value("multi_objective_aggregation") == "normalize_then_sum":
            draft.put("grpo.adv_estimator.name", "gdpo", "multi_objective_aggregation")
            by_name = [parts[each] for each in sorted(parts)]
            draft.put(
                ("grpo", "adv_estimator", "reward_weights"), by_name, says="in alphabetical order of the functions"
            )
    if own is None:
        draft.add("env.NAME.target and data.default.env_name: no reward function was found")
    else:
        draft.put(("data", "default", "env_name"), own, says="")
    _data_sets(draft, script)


def _data_sets(draft: Draft, script: Script) -> None:
    train, evaluation = script.data, script.evaluation
    draft.put(("data", "remove_duplicates"), False, says="TRL keeps equal prompts")
    if isinstance(path := draft.given.get("dataset_name"), str):
        subset = {"subset": draft.given["dataset_config"]} if draft.given.get("dataset_config") else {}
        train = {"data_path": path, **subset, "split": draft.given.get("dataset_train_split", "train")}
        if draft.given.get("eval_strategy", "no") != "no":
            evaluation = {"data_path": path, **subset, "split": draft.given.get("dataset_test_split", "test")}
    if train is None:
        draft.add(
            "data.train: only running the script would tell its data set; write its rows to a JSONL or Parquet file and name it in "
            "data_path, or name a function that returns them in dataset_name (docs/data.md, Code of your own)"
        )
    else:
        draft.put(
            ("data", "train"),
            train,
            *draft.those_given("dataset_name", "dataset_config", "dataset_train_split"),
            says="train_dataset",
        )
    validates = draft.given.get("eval_strategy", "no") != "no"
    if validates and evaluation is not None:
        draft.put(
            ("data", "validation"),
            evaluation,
            *draft.those_given("dataset_name", "dataset_test_split"),
            says="eval_dataset",
        )
    elif validates:
        draft.add(
            "data.validation: only running the script would tell its data set; name it in data_path, or set split_validation_size"
        )
