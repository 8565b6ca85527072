"""What table.yaml calls by name: the conversions of values, and the conditions under which a refused key has no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from headrace.config.data import OWN_CODE, Generator, HubName, ProcessorName
from headrace.config.in_yaml import in_yaml
from headrace.config.keys import Keys

Whole = Mapping[str, Any]  # the whole file


def look(whole: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or `default`."""
    for part in key.split("."):
        if not isinstance(whole, Mapping) or part not in whole:
            return default
        whole = whole[part]
    return whole


def sources(whole: Any, part: str) -> list[dict[str, Any]]:
    """Return the data sets in `data.train` or `data.validation` that are mappings."""
    given = look(whole, f"data.{part}")
    listed = given if isinstance(given, list) else [given]
    return [source for source in listed if isinstance(source, dict)]


def environment(whole: Any, name: str) -> Mapping[str, Any]:
    """Return the section of an environment; an empty one if there is none."""
    environments = look(whole, "env")
    env = environments.get(name) if isinstance(environments, Mapping) else None
    return env if isinstance(env, Mapping) else {}


def named_environments(whole: Any) -> set[str]:
    """Return the environments that the data sets name, and those that score for them."""
    given = [source.get("env_name") for part in ("train", "validation") for source in sources(whole, part)]
    found: set[str] = set()
    waiting = {name for name in (*given, look(whole, "data.default.env_name")) if isinstance(name, str)}
    while waiting:
        name = waiting.pop()
        found.add(name)
        parts, grader = (environment(whole, name).get(key) for key in ("parts", "grader"))
        waiting |= {
            scorer for scorer in (*(parts if isinstance(parts, dict) else ()), grader) if isinstance(scorer, str)
        }
        waiting -= found
    return found


# conversions


def precision(value: Any) -> Any:
    if value == "fp8":
        raise ValueError("'fp8': rollouts have the dtype of the weights; set it to bfloat16")
    return value


_OF_NEMO_GYM = "which an environment of type verifiers plays (docs/agents.md, NeMo Gym)"


def packing(value: Any) -> Any:
    others = ("modified_ffd", "concatenative", "first_fit_shuffle")
    name = value.lower() if isinstance(value, str) else value  # NeMo RL ignores case
    return "modified_first_fit_decreasing" if name in others else name


def dataset(value: Any) -> Any:
    """Return a name that Headrace reads too, or None where `data_path` names the data set."""
    if value == "ResponseDataset":
        return None
    if value == "NemoGymDataset":
        raise ValueError(
            f"{value!r}: its rows are tasks of NeMo Gym, {_OF_NEMO_GYM}; give that environment the file, and name verifiers here"
        )
    known = (*get_args(Generator), *get_args(HubName))
    if value is not None and value not in known and not OWN_CODE.fullmatch(str(value)):
        raise ValueError(
            f"{in_yaml(value)} is not supported; convert it to a JSONL file, and give data_path, with the question under input_key and the "
            f"answer under output_key, or use one of {', '.join(known)}"
        )
    return value


# Headrace does their work for each data set that is read by name, and for files
_WITHOUT_NAME = (
    "math_hf_data_processor",
    "math_data_processor",
    "math_gdpo_data_processor",
    "helpsteer3_data_processor",
)


def processor(value: Any) -> Any:
    """Return a name that Headrace reads too, or None where problems already have a question and an answer."""
    if value is None or value in _WITHOUT_NAME:
        return None
    if value == "nemo_gym_data_processor":
        raise ValueError(f"{value!r}: it reads tasks of NeMo Gym, {_OF_NEMO_GYM}; leave it out")
    if value not in get_args(ProcessorName) and not OWN_CODE.fullmatch(str(value)):
        raise ValueError(
            f"{in_yaml(value)} is not one of {', '.join((*_WITHOUT_NAME, *get_args(ProcessorName)))}; write a function that is called "
            "with each row and returns one with input and output, and name it as FILE.py:NAME"
        )
    return value


def extract(value: Any) -> Any:
    ours = {"hf_math_verify": "none", "dapo_math_verify": "answer_line"}
    if value is not None and value not in [*ours]:
        raise ValueError(
            f"{in_yaml(value)} is not one of {', '.join(ours)}; choose one, or serve an environment (env.math.target)"
        )
    return ours.get(value)


def template(value: Any) -> Any:
    """Convert null, which there is a template of its own."""
    if value is None:
        return "{% for message in messages %}{{ message.content }}{% endfor %}"
    return None if isinstance(value, str) and value.lower() == "default" else value


def metric(value: Any) -> Any:
    """Convert the bare names of older releases. `val_reward` was the mean reward of a validation."""
    if isinstance(value, str) and not value.startswith(("val:", "train:")):
        older = {"val_reward": "val:accuracy", "val_accuracy": "val:accuracy"}
        if value not in older:
            raise ValueError(f"{in_yaml(value)} is neither val:… nor train:…; write for example val:accuracy")
        return older[value]
    return value


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "dataset": dataset,
    "epochs": lambda value: 1_000_000_000 if value == -1 else value,  # -1, which async PPO requires there, is no limit
    "extract": extract,
    # Transformer Engine's fused Adam decouples weight decay
    "fused_adam": lambda value: "torch.optim.AdamW" if str(value).endswith(".FusedAdam") else value,
    "kv_cache_dtype": lambda value: "fp8" if value == "fp8_e4m3" else value,  # two names of the same type
    "metric": metric,
    "packing": packing,
    "period": lambda value: 0 if isinstance(value, int | float) and value < 0 else value,
    "precision": precision,
    "processor": processor,
    "template": template,
}

# conditions: each takes the value, the whole file and the value's keys


def off(value: Any, whole: Whole, keys: Keys = ()) -> bool:
    """Whether a value has no effect, whatever its key is: null, false, empty."""
    return value is None or value is False or value in ("", "false", "none", {}, [])


def same_precision(value: Any, whole: Whole, keys: Keys) -> bool:
    """Whether a type is the one that the model is trained in."""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    return off(value, whole) or name in ("auto", look(whole, f"{keys[0]}.precision"))


def dense(value: Any, whole: Whole, keys: Keys) -> bool:
    """Whether nothing indicates a mixture of experts: no experts are spread over ranks."""
    spread = (
        look(whole, f"{keys[0]}.megatron_cfg.expert_model_parallel_size", 1),
        look(whole, f"{keys[0]}.automodel_cfg.expert_parallel_size", 1),
    )
    return off(value, whole) or all(size in (None, 1) for size in spread)


def before_or_no_dropout(value: Any, whole: Whole, keys: Keys) -> bool:
    older = ["dtensor_cfg" if key == "automodel_cfg" else key for key in keys[:-1]]
    newer = ["automodel_cfg" if key == "dtensor_cfg" else key for key in keys[:-1]]
    return value in (None, "pre") or not any(look(whole, ".".join((*at, "dropout"))) for at in (older, newer))


def no_penalty(value: Any, whole: Whole, keys: Keys) -> bool:
    """Whether the token ids have no effect, because no penalty that reads them is on."""
    penalties = look(whole, "reward_penalties") or {}
    return not any(value for key, value in penalties.items() if key.startswith("penalize_"))


def draws_alike(value: Any, whole: Whole, keys: Keys) -> bool:
    """Whether the data loader has no effect: NeMo RL's example draws like Headrace, and any other is called only with several data
    loaders."""
    example = isinstance(value, str) and value.endswith(".example_custom_dataloader")
    return off(value, whole) or example or off(look(whole, "data.use_multiple_dataloader"), whole)


CONDITIONS: Mapping[str, Callable[[Any, Whole, Keys], bool]] = {
    "before_or_no_dropout": before_or_no_dropout,
    "dense": dense,
    "draws_alike": draws_alike,
    "max_length": lambda value, whole, keys: value in (None, look(whole, "policy.max_total_sequence_length")),
    "model_itself": lambda value, whole, keys: off(value, whole) or value == look(whole, "env.reward_model.model_name"),
    "no_penalty": no_penalty,
    "not_false": lambda value, whole, keys: value is not False,
    "one_token_predicted": lambda value, whole, keys: not look(whole, f"{keys[0]}.megatron_cfg.mtp_num_layers"),
    "same_precision": same_precision,
    "sampled_alone": lambda value, whole, keys: off(look(whole, "on_policy_distillation.full.enabled"), whole),
    "served": lambda value, whole, keys: any(look(whole, f"env.{keys[1]}.{key}") for key in ("target", "type")),
    "trained_in_float32": lambda value, whole, keys: (
        off(value, whole) or look(whole, f"{keys[0]}.precision") == "float32"
    ),
    "zero_or_dense": lambda value, whole, keys: value == 0 or dense(value, whole, keys),
    "zero_or_not_fp8": lambda value, whole, keys: (
        off(value, whole) or value == 0 or look(whole, "policy.generation.vllm_cfg.precision") != "fp8"
    ),
}
