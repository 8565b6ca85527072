"""TRL's `GRPOConfig`, `GRPOTrainer` and `LoraConfig` (TRL 1.16): a script's calls, or the flags of a command."""

from __future__ import annotations

import ast
import math
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from headrace.base.errors import ConfigError
from headrace.config.migrate.draft import Draft, Row, Unread, direct, missing, read_scalar, replaced, used
from headrace.config.migrate.schedules import put_schedule

_GPU = "headrace plans devices itself (`rollout`, `trainer`; docs/gpu.md)"
_HUB = "`headrace export RUN -o DIR` writes a model that can be uploaded"
_LOG = "metrics.jsonl has every step, and samples have every trajectory (docs/watching.md)"
_FORM = "its form of the loss is not there; docs/recipes.md has those that are"
_BATCH = "grpo.num_prompts_per_step, policy.train_global_batch_size, policy.train_micro_batch_size"
_SCHEDULE = "policy.scheduler"
_TIS = "loss_fn.use_importance_sampling_correction and loss_fn.truncated_importance_sampling_*"

TABLE: tuple[Row, ...] = (
    # the trainer's arguments
    *used("model model_name_or_path", "policy.model_name"),
    *used("reward_funcs", "env.NAME.target, and a `combine` of several"),
    *used("reward_model_name_or_path", "env.NAME of type reward_model"),
    *used("train_dataset dataset_name dataset_config dataset_train_split", "data.train"),
    *used("eval_dataset dataset_test_split", "data.validation"),
    *used("peft_config use_peft r lora_r", "policy.lora_cfg.enabled, policy.lora_cfg.dim"),
    *used("lora_alpha", "policy.lora_cfg.alpha"),
    *used("lora_dropout", "policy.lora_cfg.dropout"),
    *used("target_modules lora_target_modules", "policy.lora_cfg.target_modules"),
    Row("exclude_modules", "used", "policy.lora_cfg.exclude_modules"),
    *replaced(
        "args processing_class task_type lora_task_type bias quantization_config", "taken from the model, or not needed"
    ),
    *replaced("callbacks", "`headrace status`, alarms (`run.stop_on`) and trackers watch a run from outside"),
    *missing("optimizers optimizer_cls_and_kwargs", "the optimizer is AdamW or Adam: policy.optimizer"),
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
    Row("num_generations", "used", "grpo.num_generations_per_prompt", 8, direct=True),
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
    Row(
        "optim",
        "missing",
        "the optimizer is AdamW or Adam: policy.optimizer",
        "adamw_torch_fused",
        quiet=("adamw_torch", "adamw_hf"),
    ),
    *used("lr_scheduler_type", _SCHEDULE, "linear"),
    *used("lr_scheduler_kwargs warmup_ratio", _SCHEDULE),
    *used("warmup_steps", _SCHEDULE, 0),
    # the loss
    direct("beta", "loss_fn.reference_policy_kl_penalty", 0.0),
    *used("use_bias_correction_kl", "loss_fn.use_on_policy_kl_approximation", True),
    *used("epsilon", "loss_fn.ratio_clip_min", 0.2),
    *used("epsilon_high", "loss_fn.ratio_clip_max"),
    Row("delta", "used", "loss_fn.ratio_clip_c", None, direct=True),
    *used("loss_type", "loss_fn.token_level_loss, constant_length or use_cispo", "dapo"),
    *used("importance_sampling_level", "loss_fn.sequence_level_importance_ratios", "token"),
    *used("scale_rewards", "grpo.normalize_rewards", "group"),
    *used("reward_weights", "env.reward.parts"),
    *used("multi_objective_aggregation", "grpo.adv_estimator.name: gdpo", "sum_then_normalize"),
    direct("mask_truncated_completions", "grpo.overlong_filtering", False),
    *used("vllm_importance_sampling_correction", _TIS, True),
    *used("vllm_importance_sampling_mode", _TIS, "sequence_mask"),
    *used("vllm_importance_sampling_clip_max", _TIS, 3.0),
    *used("vllm_importance_sampling_cap", _TIS),
    *used("vllm_importance_sampling_clip_min", _TIS),
    *missing("sapo_temperature_* vespo_*", _FORM),
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
    *used("num_generations_eval", "grpo.val_num_generations_per_prompt"),
    *replaced(
        "use_vllm vllm_mode vllm_model_impl vllm_server_* vllm_group_port vllm_enable_sleep_mode use_transformers_* "
        "transformers_continuous_batching_config cache_implementation use_cache ds3_gather_for_generation",
        "vLLM always generates, in its own processes, and gets the weights after each step",
    ),
    Row("vllm_gpu_memory_utilization", "used", "policy.generation.vllm_cfg.gpu_memory_utilization"),
    Row("vllm_tensor_parallel_size", "used", "policy.generation.vllm_cfg.tensor_parallel_size"),
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
    *used("eval_steps do_eval", "grpo.val_period"),
    *missing("eval_delay", "validation begins with the first period", 0),
    *used("eval_on_start", "grpo.val_at_start", False),
    *used("save_strategy", "checkpointing.save_period", "steps"),
    *used("save_steps", "checkpointing.save_period", 500),
    *used("save_total_limit", "checkpointing.keep_top_k"),
    *used("save_only_model", "checkpointing.save_optimizer", False),
    *used("metric_for_best_model load_best_model_at_end greater_is_better", "checkpointing.metric_name"),
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
    *missing("config", "give its keys on the command line"),
    *missing(
        "auto_find_batch_size neftune_noise_alpha label_smoothing_factor optim_args optim_target_modules",
        "leave it out",
    ),
)


class _Reward(NamedTuple):
    name: str  # of the function
    target: str | None  # FILE.py:NAME; None for a model
    model: str | None = None


class _Script(NamedTuple):
    """What a script or a command says."""

    given: dict[str, Any]
    rewards: list[_Reward]
    data: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    to_add: list[str]
    files: dict[str, str]


def migrate(source: str, processes: int = 1, steps: int | None = None, folder: Path = Path()) -> Draft:
    """Draft the configuration for a script (`FILE.py`) or a command line. `processes` are those that accelerate starts; `steps` the
    trainer steps of a run whose data alone tells them. Reward functions that the script defines are copied into a file of their own, which
    is to be written into `folder`. Raises `ConfigError`."""
    words = shlex.split(source.replace("\\\n", " "), comments=False)
    if not words:
        raise ConfigError("the source is empty; give FILE.py, or a command in quotes")
    files = [word for word in words if word.endswith(".py") and Path(word).is_file()]
    if len(words) == 1 and not files:
        raise ConfigError(f"{source} is not a file; give the path of the script, or a command in quotes")
    flags = _flags(words)
    script = _read(Path(files[0]), folder, bool(flags)) if files else _Script({}, [], None, None, [], {})
    given = {**script.given, **flags}
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
        is_list = name in ("reward_funcs", "lora_target_modules", "reward_weights")
        known[name] = read if is_list or len(read) > 1 else True if not read else read[0]
    return known


def _read(path: Path, folder: Path, has_flags: bool) -> _Script:
    """Read the calls of a script, which is not run. `has_flags`: its command gives the settings that it reads from there."""
    try:
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text, str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as Python: {error}") from error
    names = _assigned(module)
    calls = {
        name: call for call in ast.walk(module) if isinstance(call, ast.Call) and (name := _called(call)) in _CALLS
    }
    if "GRPOTrainer" not in calls and "GRPOConfig" not in calls:
        raise ConfigError(
            f"{path} calls neither GRPOTrainer nor GRPOConfig; give the script that trains, or the command that runs it"
        )
    given: dict[str, Any] = {}
    to_add = []
    if not has_flags and any(
        "ArgumentParser" in (name := _called(call)) or name == "TrlParser"
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
    ):
        to_add.append(
            f'{path} reads settings from its command line; give the whole command: headrace migrate trl "python {path} --…"'
        )
    for name in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
        for keyword in calls[name].keywords if name in calls else ():
            if keyword.arg is None:
                to_add.append(f"{name}(**{ast.unparse(keyword.value)}): only running the script would tell these keys")
            elif not (
                name == "GRPOTrainer"
                and keyword.arg in ("args", "reward_funcs", "train_dataset", "eval_dataset", "peft_config")
            ):
                given[keyword.arg] = _literal(keyword.value, names)
        if name in calls and calls[name].args and name != "GRPOTrainer":
            to_add.append(f"{ast.unparse(calls[name].args[0])} of {name} has no name; name it")
    if "LoraConfig" in calls:
        given.setdefault("r", 8)
    trainer = {each.arg: each.value for each in calls["GRPOTrainer"].keywords} if "GRPOTrainer" in calls else {}
    if "GRPOTrainer" in calls:
        for argument, place in zip(
            calls["GRPOTrainer"].args, ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"), strict=False
        ):
            trainer.setdefault(place, argument)
            if place == "model":
                given["model"] = _literal(argument, names)
    rewards, wanted = _rewards(trainer.get("reward_funcs"), module, path, folder, names, to_add)
    files = {}
    if wanted:
        files[_copy_name(path)] = _copy_functions(module, text, path.name, wanted, to_add)
    data = _data(trainer.get("train_dataset"), module, names, to_add)
    evaluation = _data(trainer.get("eval_dataset"), module, names, to_add) if "eval_dataset" in trainer else None
    return _Script(given, rewards, data, evaluation, to_add, files)


_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig")


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _assigned(module: ast.Module) -> dict[str, ast.expr]:
    """Return what each name that is assigned once is; one that is assigned again is not among them."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(module):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign | ast.AugAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and node.value is not None:  # type: ignore[attr-defined]
                found.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _literal(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """Return the value of a literal, of a name that was given one, and of `torch.bfloat16`; `Unread` for any other expression."""
    if isinstance(node, ast.Name) and node.id in names and depth < 5:
        return _literal(names[node.id], names, depth + 1)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if (
        isinstance(node, ast.Call)
        and _called(node) == "dict"
        and not node.args
        and all(each.arg for each in node.keywords)
    ):
        return {str(each.arg): _literal(each.value, names, depth + 1) for each in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        items = [_literal(each, names, depth + 1) for each in node.elts]
        return Unread(ast.unparse(node)) if any(isinstance(each, Unread) for each in items) else items
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Unread(ast.unparse(node))


def _copy_name(path: Path) -> str:
    return f"{path.stem}_rewards.py"


def _rewards(
    node: ast.expr | None, module: ast.Module, path: Path, folder: Path, names: dict[str, ast.expr], to_add: list[str]
) -> tuple[list[_Reward], list[str]]:
    """Return the reward functions of the argument, and the names of those that the script itself defines."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    defined = {each.name for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    imported = {
        alias.asname or alias.name: (each.module or "", alias.name)
        for each in ast.walk(module)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    found, wanted = [], []
    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
        match each:
            case ast.Constant(value=str(model)):
                found.append(_Reward(_name(model.rpartition("/")[2]), None, model))
            case ast.Name(id=name) if name in defined:
                found.append(_Reward(name, f"{folder / _copy_name(path)}:{name}"))
                wanted.append(name)
            case ast.Name(id=name) if (
                name in imported and (beside := path.parent / f"{imported[name][0]}.py").is_file()
            ):
                found.append(_Reward(name, f"{beside}:{imported[name][1]}"))
            case ast.Name(id=name) if name in imported:
                found.append(_Reward(name, f"rewards.py:{name}"))
                from_, original = imported[name]
                to_add.append(f"rewards.py, with `from {from_} import {original}`; its package must be installed here")
            case _:
                name = _name(ast.unparse(each).partition("(")[0].rpartition(".")[2])
                found.append(_Reward(name, f"rewards.py:{name}"))
                to_add.append(f"rewards.py, with `{name} = {ast.unparse(each)}`")
    return found, wanted


def _copy_functions(module: ast.Module, text: str, source: str, wanted: list[str], to_add: list[str]) -> str:
    """Return a file with these functions of a script, and with the imports and definitions that they use."""
    statements = [*module.body]
    for statement in module.body:
        if isinstance(statement, ast.If):
            statements += statement.body
    there: dict[str, ast.stmt] = {
        each.name: each for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for statement in statements:
        there |= dict.fromkeys(_bound(statement), statement)
    taken: dict[str, ast.stmt] = {}
    queue = list(wanted)
    while queue:
        name = queue.pop()
        if name in taken or name not in there:
            continue
        taken[name] = there[name]
        queue += [each.id for each in ast.walk(there[name]) if isinstance(each, ast.Name)]
    imports, copied = [], []
    lines = text.splitlines()
    for name, statement in sorted(taken.items(), key=lambda item: item[1].lineno):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            alias = next(each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name)
            one = (
                ast.ImportFrom(statement.module, [alias], statement.level)
                if isinstance(statement, ast.ImportFrom)
                else ast.Import([alias])
            )
            origin = (statement.module or "") if isinstance(statement, ast.ImportFrom) else alias.name
            if origin.partition(".")[0] == "trl":
                to_add.append(f"what replaces {name} of TRL, which the copied functions use")
            imports.append(ast.unparse(one))
        else:
            first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
            block = textwrap.dedent("\n".join(lines[first - 1 : statement.end_lineno]))
            if block not in copied:
                copied.append(block)
    future = [each for each in module.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    head = [
        f'"""The reward functions of {source}, copied by `headrace migrate`."""',
        "",
        *map(ast.unparse, future),
        *dict.fromkeys(imports),
    ]
    return "\n".join(head).rstrip() + "\n\n\n" + "\n\n\n".join(copied) + "\n"


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.Assign(targets=targets):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _name(text: str) -> str:
    return re.sub(r"\W", "_", text)[:64] or "reward"


def _data(
    node: ast.expr | None, module: ast.Module, names: dict[str, ast.expr], to_add: list[str]
) -> dict[str, Any] | None:
    """Return the data set that an argument names: the call of `load_dataset` whose result it is."""
    part = None
    if isinstance(node, ast.Subscript):
        part, node = _literal(node.slice, names), node.value
    call, changed, order = node, False, 0
    name = node.id if isinstance(node, ast.Name) else ""
    if name:
        for each in ast.walk(module):
            if isinstance(each, ast.Assign) and len(each.targets) == 1:
                target = each.targets[0]
                inside = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
                if name in inside:
                    call, order = each.value, inside.index(name)
                elif isinstance(target, ast.Name) and target.id == name:
                    call, changed = (
                        (call, True) if isinstance(call, ast.Call) and _loads(call) else (each.value, changed)
                    )
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _called(call) != "load_dataset":
        call, changed = call.func.value, True
    if isinstance(call, ast.Subscript):
        part, call = _literal(call.slice, names), call.value
    if not (isinstance(call, ast.Call) and _loads(call)):
        return None
    arguments = dict(zip(("path", "name"), (_literal(each, names) for each in call.args), strict=False))
    arguments |= {str(each.arg): _literal(each.value, names) for each in call.keywords}
    split = part if isinstance(part, str) else arguments.get("split", "train")
    split = split[order] if isinstance(split, list) and order < len(split) else split
    path = arguments.get("data_files") if arguments.get("path") in ("json", "parquet", "csv") else arguments.get("path")
    if not isinstance(path, str) or not isinstance(split, str):
        return None
    if changed:
        to_add.append(
            f"data.train[0].processor: the script changes the rows of {path}; give a function that turns a row of it into one with "
            "`prompt` and the columns of the rewards (docs/data.md, Code of your own)"
        )
    is_file = Path(path).suffix in (".json", ".jsonl", ".parquet")
    subset = arguments.get("name")
    return {
        "data_path": path,
        **({"subset": subset} if isinstance(subset, str) else {}),
        **({} if is_file else {"split": split}),
    }


def _loads(call: ast.Call) -> bool:
    return _called(call) == "load_dataset"


def _draft(script: _Script, processes: int, steps: int | None) -> Draft:
    draft = Draft("TRL", TABLE, script.given, "grpo")
    draft.files |= script.files
    for text in dict.fromkeys(script.to_add):
        draft.add(text)
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
    others = _named(draft, "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
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
        draft.put("grpo.max_num_epochs", 1_000_000, "max_steps", says="the number of steps alone ends the run")
        return total
    epochs = draft.value("num_train_epochs")
    draft.put("grpo.max_num_epochs", math.ceil(epochs), "num_train_epochs")
    if epochs != math.ceil(epochs):
        draft.note("num_train_epochs", "only whole epochs; grpo.max_num_steps ends a run earlier")
    return steps


def _loss(draft: Draft) -> None:
    kind, level = draft.value("loss_type"), draft.value("importance_sampling_level")
    low, high = draft.value("epsilon"), draft.value("epsilon_high", 0.2)
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
            draft.note("loss_type", _FORM)
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
    if level == "sequence":
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
    if draft.given.get("use_vllm") and draft.value("vllm_importance_sampling_correction"):
        _importance(draft)


def _importance(draft: Draft) -> None:
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
    draft.put("loss_fn.use_importance_sampling_correction", True, "vllm_importance_sampling_correction")
    kind = "icepop" if mode == "token_mask" else "tis"
    draft.put("loss_fn.truncated_importance_sampling_type", kind, "vllm_importance_sampling_mode")
    draft.put(
        "loss_fn.truncated_importance_sampling_ratio",
        1e9 if bound is None else bound,
        "vllm_importance_sampling_clip_max",
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
    names = _named(draft, "bf16", "fp16") or ["bf16"]
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
    draft.put(("policy", "lora_cfg", "init"), "uniform", says="as PEFT draws A")
    modules, place = draft.value("target_modules"), ("policy", "lora_cfg", "target_modules")
    if isinstance(modules, list):
        draft.put(place, modules, "target_modules")
    elif modules == "all-linear":
        draft.put(place, [], "target_modules")
    elif modules is None:
        draft.put(place, ["q_proj", "v_proj"], says="PEFT's default for most models; [] is all linear layers")
    else:
        draft.note("target_modules", "give a list of names: policy.lora_cfg.target_modules")
    if excluded := draft.value("exclude_modules", []):
        draft.put("policy.lora_cfg.exclude_modules", excluded, "exclude_modules")


def _optimizer(draft: Draft, total: int | None, in_batch: int) -> None:
    draft.put(
        "policy.optimizer.kwargs.betas",
        [draft.value("adam_beta1"), draft.value("adam_beta2")],
        "adam_beta1",
        "adam_beta2",
    )
    kind, warm = draft.value("lr_scheduler_type"), draft.value("warmup_steps") or draft.value("warmup_ratio", 0.1) or 0
    kwargs = draft.value("lr_scheduler_kwargs", {}) or {}
    names = _named(draft, "lr_scheduler_type", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs")
    least = (
        kwargs.get("min_lr_rate", kwargs.get("min_lr", 0) / (draft.value("learning_rate") or 1.0))
        if isinstance(kwargs, dict)
        else 0
    )
    put_schedule(draft, kind, warm, total, in_batch, least, names or ["lr_scheduler_type"])


def _validation(draft: Draft, in_batch: int, script: _Script) -> None:
    strategy = draft.value("eval_strategy")
    names = _named(draft, "eval_strategy", "eval_steps") or ["eval_strategy"]
    period = draft.value("eval_steps") or draft.given.get("logging_steps") or 10
    validates = strategy not in ("no", False)
    if strategy == "epoch" or (validates and (isinstance(period, Unread) or period < 1)):
        draft.add("grpo.val_period: the data decides it; give the number of trainer steps between two validations")
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
        draft.add(
            "checkpointing.save_period: the data decides it; give the number of trainer steps between two checkpoints"
        )
    else:
        draft.put("checkpointing.save_period", max(1, round(period / in_batch)), "save_steps")
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
    to = draft.value("report_to")
    reports = to if isinstance(to, list) else [to]
    for tracker in ("wandb", "tensorboard", "mlflow"):
        if tracker in reports or "all" in reports:
            draft.put(f"logger.{tracker}_enabled", True, "report_to")
    if others := [str(each) for each in reports if each not in ("wandb", "tensorboard", "mlflow", "none", "all")]:
        draft.note(
            "report_to", f"{', '.join(others)}: W&B, TensorBoard and MLflow are there, and curves without any of them"
        )
    for name, key in (("run_name", "logger.wandb.name"), ("project", "logger.wandb.project")):
        if name in draft.given:
            draft.put(key, draft.value(name), name)


def _environments(draft: Draft, script: _Script) -> None:
    rewards = list(script.rewards)
    named = draft.given.get("reward_funcs")
    for each in named if isinstance(named, list) else []:
        module, _, name = str(each).rpartition(".")
        rewards.append(_Reward(_name(name), f"rewards.py:{_name(name)}"))
        draft.add(f"rewards.py beside the configuration, with `from {module or 'trl.rewards'} import {name}`")
    if isinstance(model := draft.given.get("reward_model_name_or_path"), str):
        rewards.append(_Reward(_name(model.rpartition("/")[2]), None, model))
    for reward in rewards:
        options = {"target": reward.target} if reward.target else {"type": "reward_model", "model_name": reward.model}
        flags = _named(draft, "reward_funcs", "reward_model_name_or_path")
        draft.put(("env", reward.name), options, *flags, says="" if flags else "reward_funcs")
    own = rewards[0].name if rewards else None
    if len(rewards) > 1:
        weights = draft.value("reward_weights", [])
        weights = weights if isinstance(weights, list) and len(weights) == len(rewards) else [1.0] * len(rewards)
        own = "reward"
        parts = {reward.name: float(weight) for reward, weight in zip(rewards, weights, strict=True)}
        combined = {"type": "combine", "parts": parts}
        draft.put(("env", own), combined, *_named(draft, "reward_weights"), says="the weighted sum")
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


def _data_sets(draft: Draft, script: _Script) -> None:
    train, evaluation = script.data, script.evaluation
    if isinstance(path := draft.given.get("dataset_name"), str):
        subset = {"subset": draft.given["dataset_config"]} if draft.given.get("dataset_config") else {}
        train = {"data_path": path, **subset, "split": draft.given.get("dataset_train_split", "train")}
        if draft.given.get("eval_strategy", "no") != "no":
            evaluation = {"data_path": path, **subset, "split": draft.given.get("dataset_test_split", "test")}
    if train is None:
        draft.add(
            "data.train: only running the script would tell its data set; write its rows to a JSONL or Parquet file and "
            "name it in data_path"
        )
    else:
        draft.put(
            ("data", "train"),
            train,
            *_named(draft, "dataset_name", "dataset_config", "dataset_train_split"),
            says="train_dataset",
        )
    validates = draft.given.get("eval_strategy", "no") != "no"
    if validates and evaluation is not None:
        draft.put(
            ("data", "validation"),
            evaluation,
            *_named(draft, "dataset_name", "dataset_test_split"),
            says="eval_dataset",
        )
    elif validates:
        draft.add(
            "data.validation: only running the script would tell its data set; name it in data_path, or set split_validation_size"
        )


def _named(draft: Draft, *names: str) -> list[str]:
    return [name for name in names if name in draft.given]
