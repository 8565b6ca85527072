"""The whole table, and what reads several keys at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.config.nemo.algorithm import ALGORITHM
from headrace.config.nemo.around import CHECKPOINTING, CLUSTER, DATA, ENV, LOGGER
from headrace.config.nemo.backends import asynchrony, megatron_optimizer, megatron_schedule
from headrace.config.nemo.policy import GENERATION, POLICY, VALUE
from headrace.config.nemo.rules import Keys, Rule, look

RULES: tuple[Rule, ...] = (
    *ALGORITHM,
    *POLICY,
    *GENERATION,
    *VALUE,
    *DATA,
    *ENV,
    *LOGGER,
    *CHECKPOINTING,
    *CLUSTER,
)

# each file of NeMo RL has one of these, and Headrace has none of them
NO_FILE_OF_OURS = (
    "cluster",
    "policy.megatron_cfg",
    "policy.dtensor_cfg",
    "policy.automodel_cfg",
    "policy.generation.backend",
    "policy.generation.colocated",
    "data_plane",
    "async_rl",
)

# what such a file means without saying it
IMPLIED: dict[str, Any] = {
    "loss_fn.sequence_is_aggregation": "sum",
    "policy.generation.vllm_cfg.kv_cache_memory_bytes": None,
    "data.remove_duplicates": False,
    "data.overlong_prompts": "leave_out",
}

Gathered = Callable[[dict[str, Any], Callable[[str], None]], Iterator[tuple[str, Any, str]]]


def _megatron(values: dict[str, Any], refuse: Callable[[str], None]) -> Iterator[tuple[str, Any, str]]:
    for section in ("policy", "value"):
        megatron = look(values, f"{section}.megatron_cfg")
        if not isinstance(megatron, dict):
            continue
        if optimizer := megatron_optimizer(megatron):
            yield f"{section}.optimizer", optimizer, f"{section}.megatron_cfg.optimizer"
        try:
            yield f"{section}.scheduler", megatron_schedule(megatron), f"{section}.megatron_cfg.scheduler"
        except ValueError as error:
            refuse(f"{section}.megatron_cfg.scheduler: {error}")


def _single_controller(values: dict[str, Any], refuse: Callable[[str], None]) -> Iterator[tuple[str, Any, str]]:
    given = values.get("async_rl")
    if not isinstance(given, dict):
        return
    name = "ppo" if isinstance(values.get("ppo"), dict) else "grpo"
    try:
        keys = asynchrony(given.get("sampler") or {})
    except ValueError as error:
        refuse(f"async_rl.sampler.name: {error}")
        return
    keys["recompute_kv_cache_after_weight_updates"] = bool(given.get("recompute_kv_cache_after_weight_updates"))
    for key, value in keys.items():
        yield f"{name}.async_{name}.{key}", value, "async_rl"


def _teacher(values: dict[str, Any], refuse: Callable[[str], None]) -> Iterator[tuple[str, Any, str]]:
    given = values.get("on_policy_distillation")
    own = look(values, "grpo.adv_estimator.teacher_model_name")
    if own is not None or not isinstance(given, dict) or not given.get("enabled"):
        return
    key = "on_policy_distillation.teacher_model_by_agent_name"
    teachers = given.get("teacher_model_by_agent_name")
    models = sorted({str(model) for model in teachers.values()}) if isinstance(teachers, dict) else []
    if len(models) != 1:
        refuse(
            f"{key}: {', '.join(models) or 'no model'}: there is one teacher for all prompts; name one, here or by "
            "grpo.adv_estimator.teacher_model_name"
        )
        return
    yield "grpo.adv_estimator.teacher_model_name", models[0], key


GATHERED: tuple[Gathered, ...] = (_megatron, _single_controller, _teacher)


def rule_for(keys: Keys) -> Rule | None:
    """The row that decides `keys`: of those that match, the most exact. None if NeMo RL has no such key."""
    matching = [rule for rule in RULES if rule.matches(keys)]
    return max(matching, key=_exactness, default=None)


def _exactness(rule: Rule) -> tuple[int, int]:
    return sum(part not in ("*", "**") for part in rule.parts), "**" not in rule.parts
