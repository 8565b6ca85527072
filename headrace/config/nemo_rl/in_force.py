"""Removes what has no effect in a file: sections that older releases wrote differently, and parts that another key disables.

Each function changes the whole file in place and yields (key in the file, what replaces it) for the report.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from headrace.config.data import HubName
from headrace.config.in_yaml import in_yaml
from headrace.config.keys import look
from headrace.config.loss import CLIP_KEYS
from headrace.config.nemo_rl.rules import ENABLED, MISSPELT_SWITCH
from headrace.config.nemo_rl.values import environment, named_environments, off, sources

Said = tuple[str, str]

# the validation sets that came with data sets while `data` was flat
_OWN_VALIDATION: dict[str, dict[str, Any]] = {
    "OpenMathInstruct-2": {},  # a twentieth of itself
    "DeepScaler": {"dataset_name": "AIME2024", "repeat": 16},
    "DAPOMath17K": {"dataset_name": "DAPOMathAIME2024"},
}
_OF_EACH_SOURCE = ("input_key", "output_key", "chat_key", "prompt_file", "system_prompt_file", "processor", "env_name")

# other data sets accept the keys and ignore them
_OUTPUT = ("OpenMathInstruct-2", "output_key")
_SPLIT = ("OpenMathInstruct-2", "OpenR1-Math-220k", "NuminaMath-1.5", "ResponseDataset", None)


def modernise(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Rewrite the flat form of `data`, which had one data set, and whose validation came with it or from `val_data_path`. Yields (key in
    the file, new key)."""
    data = values.get("data")
    if not isinstance(data, dict) or "train" in data or not {"dataset_name", "train_data_path"} & data.keys():
        return
    name = data.pop("dataset_name", None)
    default = {key: data.pop(key) for key in _OF_EACH_SOURCE if key in data}
    train = {} if name is None else {"dataset_name": name}
    validation = dict(_OWN_VALIDATION.get(name, {}) if isinstance(name, str) else {})
    for key in ("data_path", "split"):
        for source, prefix, part in ((train, "train_", "train"), (validation, "val_", "validation")):
            value = data.pop(prefix + key, None)
            if value is not None:
                source[key] = value
                yield f"data.{prefix}{key}", f"data.{part}.{key}"
    if "split" in data:
        train.setdefault("split", data.pop("split"))
    if name == "OpenMathInstruct-2":
        train["split_validation_size"] = 0.05
    if validation and "dataset_name" not in validation and name is not None:
        validation["dataset_name"] = name
    data["train"] = train
    data["validation"] = validation or None
    # the math environment and its processor were the only ones
    data["default"] = {"env_name": "math"} | default
    yield "data.dataset_name", "data.train.dataset_name"
    yield from ((f"data.{key}", f"data.default.{key}") for key in default)


# sections with a switch `enabled`
_SWITCHED = (
    *(
        f"{model}.{trainer}{part}"
        for model in ("policy", "value")
        for trainer, adapter in (("dtensor_cfg", "lora_cfg"), ("automodel_cfg", "lora_cfg"), ("megatron_cfg", "peft"))
        for part in ("", f".{adapter}")
    ),
    "on_policy_distillation",
)


def unclear_switches(values: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Remove switches that are neither true nor false, and misspelt switches. Otherwise their sections would be dropped silently. Yields
    (NeMo RL's key, problem, remedy)."""
    for path in _SWITCHED:
        section = look(values, path)
        if not isinstance(section, dict):
            continue
        enabled = section.get(ENABLED)
        if enabled is not None and not isinstance(enabled, bool):
            yield f"{path}.{ENABLED}", f"{in_yaml(enabled)} is neither true nor false", "; give one of them"
            section[ENABLED] = None
        for name, value in list(section.items()):
            near = difflib.get_close_matches(str(name).lower(), [ENABLED], 1, MISSPELT_SWITCH)
            if name != ENABLED and near and not off(value, values):
                del section[name]
                meant = f"; did you mean {path}.{ENABLED}?"
                yield f"{path}.{name}", f"unknown key, value {in_yaml(value)}", meant


def leave_out_what_is_not_in_force(values: dict[str, Any]) -> Iterator[Said]:
    yield from _single_controller(values)
    yield from _trainers(values)
    yield from _adapted_layers(values)
    yield from _conversations(values)
    yield from _data_sets(values)
    yield from _truncation(values)
    yield from _policy_term(values)
    yield from _multiplied_batches(values)
    yield from _turns(values)


def _single_controller(values: dict[str, Any]) -> Iterator[Said]:
    """Keep `async_rl` where `async_grpo` (`async_ppo`) is null; in its first form also where that is not enabled."""
    given = values.get("async_rl")
    if not isinstance(given, dict):
        return
    name = "ppo" if isinstance(values.get("ppo"), dict) else "grpo"
    legacy = look(values, f"{name}.async_{name}")
    first_form = "max_weight_staleness_versions" in given and "sampler" not in given
    if legacy and first_form and not look(legacy, "enabled"):
        del values[name][f"async_{name}"]
        yield f"{name}.async_{name}", "async_rl is in force instead"
    elif legacy:
        del values["async_rl"]
        yield "async_rl", f"{name}.async_{name} is given, and in force instead"


def _trainers(values: dict[str, Any]) -> Iterator[Said]:
    """Keep Megatron's optimizer and schedule with `megatron_cfg.enabled`, and nothing of that section without it."""
    for section in ("policy", "value"):
        model = values.get(section)
        if not isinstance(model, dict):
            continue
        megatron = model.get("megatron_cfg")
        if not isinstance(megatron, dict) or megatron.get("enabled") is not True:
            if model.pop("megatron_cfg", None) is not None:
                yield f"{section}.megatron_cfg", "it is not enabled, so none of it is in force"
            continue
        if look(megatron, "optimizer.clip_grad") is not None:
            model.pop("max_grad_norm", None)
        for key in ("optimizer", "scheduler"):
            if model.pop(key, None) is not None:
                yield f"{section}.{key}", f"with megatron_cfg.enabled, {section}.megatron_cfg.{key} is in force instead"
        for key in ("dtensor_cfg", "automodel_cfg"):
            if model.pop(key, None) is not None:
                yield f"{section}.{key}", "with megatron_cfg.enabled, none of it is in force"


def _adapted_layers(values: dict[str, Any]) -> Iterator[Said]:
    """Drop named layers where `match_all_linear` overrides them, and the layers of an adapter that is not enabled."""
    for section in ("policy", "value"):
        peft = look(values, f"{section}.megatron_cfg.peft")
        if isinstance(peft, dict) and not peft.get(ENABLED):
            for key in ("target_modules", "exclude_modules", "dropout_position", "lora_B_init_method"):
                if peft.pop(key, None):
                    yield f"{section}.megatron_cfg.peft.{key}", "no adapter"
    for trainer in ("dtensor_cfg", "automodel_cfg"):
        lora = look(values, f"policy.{trainer}.lora_cfg")
        if isinstance(lora, dict) and lora.get("match_all_linear") and lora.pop("target_modules", None):
            yield f"policy.{trainer}.lora_cfg.target_modules", "match_all_linear is in force instead"


def _data_sets(values: dict[str, Any]) -> Iterator[Said]:
    """Drop what has no effect on a data set, or on the number of prompts; files inherit it from another data set."""
    for part in ("train", "validation"):
        for number, source in enumerate(sources(values, part)):
            name = source.get("dataset_name", look(values, "data.default.dataset_name"))
            if part == "train" and name not in _SPLIT and source.pop("split_validation_size", None):
                yield f"data.train.{number}.split_validation_size", f"{name} is not split in NeMo RL either"
            for key in ("input_key", "output_key"):
                if name in get_args(HubName) and (name, key) != _OUTPUT and source.pop(key, None):
                    yield f"data.{part}.{number}.{key}", f"the columns of {name} are known in NeMo RL too"
    data, key = values.get("data"), "num_prompts_per_dataloader"
    if isinstance(data, dict) and off(data.get("use_multiple_dataloader"), values) and data.pop(key, None):
        yield f"data.{key}", "without use_multiple_dataloader all sets are mixed, in NeMo RL too"


def _conversations(values: dict[str, Any]) -> Iterator[Said]:
    """Convert a data set in OpenAI's format, which is a file of conversations that end with the answer."""
    for part in ("train", "validation"):
        for number, source in enumerate(sources(values, part)):
            if source.get("dataset_name", look(values, "data.default.dataset_name")) == "openai_format":
                source |= {"dataset_name": None, "chat_key": source.get("chat_key", "messages"), "output_key": None}
                source.pop("input_key", None)
                yield (
                    f"data.{part}.{number}.dataset_name",
                    "openai_format is a file whose conversations end with the answer",
                )


def _truncation(values: dict[str, Any]) -> Iterator[Said]:
    """Drop a type of truncation without a bound, which truncates nothing in NeMo RL either; it only warns."""
    loss = values.get("loss_fn")
    bound = "truncated_importance_sampling_ratio"
    if isinstance(loss, dict) and loss.get("truncated_importance_sampling_type") and loss.get(bound) is None:
        for key in ("truncated_importance_sampling_type", f"{bound}_min"):
            if loss.pop(key, None) is not None:
                yield f"loss_fn.{key}", f"without {bound} nothing is truncated, in NeMo RL either"


def _policy_term(values: dict[str, Any]) -> Iterator[Said]:
    """Drop what a policy term without a ratio to clip does not read; NeMo RL's own recipes set the clip beside `force_on_policy_ratio`."""
    loss = values.get("loss_fn")
    if not isinstance(loss, dict):
        return
    if loss.get("force_on_policy_ratio") is True and loss.get("disable_ppo_ratio") is True:
        del loss["disable_ppo_ratio"]
        yield "loss_fn.disable_ppo_ratio", "with force_on_policy_ratio the ratio is 1, which has the same gradient"
    form = next((key for key in ("force_on_policy_ratio", "disable_ppo_ratio") if loss.get(key) is True), None)
    if form is None:
        return
    weighs = loss.get("use_importance_sampling_correction") is True
    unread = (*CLIP_KEYS, "ratio_eps_min", "ratio_eps_max", *(() if weighs else ("sequence_level_importance_ratios",)))
    for key in unread:
        if loss.pop(key, None):
            yield f"loss_fn.{key}", f"with {form} there is no ratio that it could change, in NeMo RL either"


def _multiplied_batches(values: dict[str, Any]) -> Iterator[Said]:
    """Drop the multiple of a batch that dynamic sampling would generate; files inherit it from others that sample dynamically."""
    for name in ("grpo", "ppo"):
        algorithm = look(values, name, {})
        if off(look(algorithm, "use_dynamic_sampling"), values) and look(algorithm, "batch_multiplier", 1) != 1:
            del algorithm["batch_multiplier"]
            yield f"{name}.batch_multiplier", "without use_dynamic_sampling no batch is multiplied"


# the environments of NeMo RL, by the names that its files give them
ITS_ENVIRONMENTS = (
    "math",
    "math_default",
    "math_multi_reward",
    "code",
    "code_jaccard",
    "reward_model",
    "vlm",
    "nemo_gym",
)


def has_episodes(values: dict[str, Any], name: str) -> bool:
    """Whether `env.<name>` runs episodes here."""
    env = environment(values, name)
    return env.get("episodes") is True or env.get("type") in ("function", "verifiers")


def _turns(values: dict[str, Any]) -> Iterator[Said]:
    """Drop the number of turns where it is 1, and where every environment ends after one answer in NeMo RL too, or has its own loop."""
    named = named_environments(values)
    several = any(has_episodes(values, name) or name not in ITS_ENVIRONMENTS or name == "code" for name in named)
    for name in ("grpo", "ppo"):
        algorithm, key = look(values, name, {}), "max_rollout_turns"
        turns = look(algorithm, key)
        if type(turns) is int and (turns <= 1 or not several):
            del algorithm[key]
            yield f"{name}.{key}", "an answer is one turn, and episodes have agents.max_rollout_turns"
