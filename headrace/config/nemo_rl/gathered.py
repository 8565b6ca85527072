"""Headrace settings that several NeMo RL keys determine together: Megatron's optimizer and schedule, samplers, teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from headrace.config.in_yaml import in_yaml
from headrace.config.keys import look
from headrace.config.nemo_rl.in_force import ITS_ENVIRONMENTS, has_episodes
from headrace.config.nemo_rl.values import named_environments

Refuse = Callable[[str, str], None]  # takes a key of the file, and what is wrong with it
# takes the whole file and yields (Headrace's key, value, key in the file)
Gatherer = Callable[[dict[str, Any], Refuse], Iterator[tuple[str, Any, str]]]

_LINEAR, _CONSTANT, _COSINE = (
    f"torch.optim.lr_scheduler.{name}LR" for name in ("Linear", "Constant", "CosineAnnealing")
)
_FOREVER = 10_000_000_000


def _megatron(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    for section in ("policy", "value"):
        megatron = look(values, f"{section}.megatron_cfg")
        if not isinstance(megatron, dict):
            continue
        for key, translated in (("optimizer", megatron_optimizer), ("scheduler", megatron_schedule)):
            try:
                if value := translated(megatron):
                    yield f"{section}.{key}", value, f"{section}.megatron_cfg.{key}"
            except ValueError as error:
                refuse(f"{section}.megatron_cfg.scheduler", str(error))


def megatron_optimizer(megatron: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer in torch's terms. Megatron's adam decouples weight decay, like AdamW. The scheduler's weight decay overrides the
    optimizer's, because Megatron's scheduler sets it at every step. Raises `ValueError` if it changes during the run."""
    given, schedule = (_section(megatron, key) for key in ("optimizer", "scheduler"))
    start, end = schedule.get("start_weight_decay"), schedule.get("end_weight_decay")
    own = given.get("weight_decay")
    if (own if start is None else start) != (own if end is None else end):
        raise ValueError(
            f"start_weight_decay {in_yaml(start)} with end_weight_decay {in_yaml(end)}: weight decay does not change during a run; "
            "give both one value"
        )
    decay = next((value for value in (start, end, own) if value is not None), None)
    kwargs = {"lr": given.get("lr"), "weight_decay": decay, "eps": given.get("adam_eps")}
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    if "adam_beta1" in given or "adam_beta2" in given:
        kwargs["betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    return {"name": "torch.optim.AdamW", "kwargs": kwargs} if kwargs else {}


def megatron_schedule(megatron: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the schedule in torch's terms: linear from `lr_warmup_init` to `lr` over `lr_warmup_iters` steps, then constant, or down to
    `min_lr` at `lr_decay_iters` and constant from there. Raises `ValueError` for another style."""
    given, optimizer = (_section(megatron, key) for key in ("scheduler", "optimizer"))
    lr, floor = optimizer.get("lr"), optimizer.get("min_lr") or 0.0
    warmup, start = given.get("lr_warmup_iters") or 0, given.get("lr_warmup_init") or 0.0
    style, until = given.get("lr_decay_style") or "constant", given.get("lr_decay_iters")
    if not (_number(lr) and _number(floor) and _number(warmup) and _number(start)) or lr == 0:
        return []  # the configuration's own checks report what is wrong with them
    stages: list[tuple[float, dict[str, Any]]] = []  # (steps, scheduler)
    if warmup:
        # torch refuses a factor of 0
        ramp = {"start_factor": max(start / lr, 1e-8), "end_factor": 1.0, "total_iters": warmup}
        stages.append((warmup, {"name": _LINEAR, "kwargs": ramp}))
    if style == "constant":
        stages.append((0, {"name": _CONSTANT, "kwargs": {"factor": 1.0, "total_iters": _FOREVER}}))
    elif style not in ("cosine", "linear"):
        raise ValueError(
            f"lr_decay_style {in_yaml(style)} is not constant, linear or cosine; give one of them, or write policy.scheduler"
        )
    elif not isinstance(until, int) or until <= warmup:
        raise ValueError(
            f"lr_decay_iters {in_yaml(until)} with lr_decay_style {style}; give the step at which the decay ends"
        )
    elif style == "linear":
        down = {"start_factor": 1.0, "end_factor": floor / lr, "total_iters": until - warmup}
        stages.append((0, {"name": _LINEAR, "kwargs": down}))
    else:
        # torch's cosine rises again after T_max, Megatron's stays at the minimum
        stages.append((until - warmup, {"name": _COSINE, "kwargs": {"T_max": until - warmup, "eta_min": floor}}))
        stages.append((0, {"name": _CONSTANT, "kwargs": {"factor": floor / lr, "total_iters": _FOREVER}}))
    if not warmup and style == "constant":
        return []
    milestones = [sum(steps for steps, _ in stages[: n + 1]) for n in range(len(stages) - 1)]
    return [scheduler for _, scheduler in stages] + ([{"milestones": milestones}] if milestones else [])


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _section(megatron: dict[str, Any], key: str) -> dict[str, Any]:
    given = megatron.get(key)
    return given if isinstance(given, dict) else {}


def _single_controller(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    given = values.get("async_rl")
    if not isinstance(given, dict):
        return
    name = "ppo" if isinstance(values.get("ppo"), dict) else "grpo"
    try:
        keys = asynchrony(given)
    except ValueError as error:
        refuse("async_rl.sampler.name", str(error))
        return
    keys["recompute_kv_cache_after_weight_updates"] = bool(given.get("recompute_kv_cache_after_weight_updates"))
    for key, value in keys.items():
        yield f"{name}.async_{name}.{key}", value, "async_rl"


def asynchrony(async_rl: dict[str, Any]) -> dict[str, Any]:
    """Convert `async_rl` to the keys of `async_grpo`. Raises `ValueError` for an unknown sampler."""
    sampler = async_rl.get("sampler") or {}
    if not isinstance(sampler, dict):
        raise ValueError(f"{in_yaml(sampler)} is not a section; give name and its bound")
    if not sampler and "max_weight_staleness_versions" in async_rl:
        # the first form of async_rl: without over-sampling each step has its own batch
        name = "weight_fifo" if async_rl.get("over_sampling") and not async_rl.get("force_in_order") else "in_order"
        strict = async_rl.get("batch_selection_strategy") == "strict_on_policy"
        age = 0 if strict else async_rl["max_weight_staleness_versions"]
    else:
        name = sampler.get("name", "in_order")
        age = sampler.get("max_lookahead_versions" if name == "in_order" else "max_staleness_versions")
    orders = {"in_order": "ordered", "weight_fifo": "drop", "ready_first": "drop", "windowed": "drop"}
    if name not in [*orders]:
        raise ValueError(f"{in_yaml(name)} is not a known sampler; use one of {', '.join(orders)}")
    return {
        "enabled": True,
        "in_flight_weight_updates": True,  # always, under the single controller
        "staleness_policy": orders[name],
        "max_trajectory_age_steps": 1 if age is None else age,
    }


def _teacher(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    given = values.get("on_policy_distillation")
    own = look(values, "grpo.adv_estimator.teacher_model_name")
    if own is not None or not isinstance(given, dict) or not given.get("enabled"):
        return
    key = "on_policy_distillation.teacher_model_by_agent_name"
    teachers = given.get("teacher_model_by_agent_name")
    models = sorted({str(model) for model in teachers.values()}) if isinstance(teachers, dict) else []
    if len(models) != 1:
        refuse(
            key,
            f"{', '.join(models) or 'no model'}; a run has one teacher for all prompts, so name one, here or in "
            "grpo.adv_estimator.teacher_model_name",
        )
        return
    yield "grpo.adv_estimator.teacher_model_name", models[0], key


def _multiple_choice(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    """Yield the answer format for the verifier, which replaces `math_verify_impl`; that key compares expressions."""
    key = "env.math.verifier_type"
    verifier = look(values, key)
    if verifier == "english_multichoice":
        yield "env.math.extract", "choice", key
    elif verifier not in (None, "", "math"):
        refuse(
            key,
            f"{in_yaml(verifier)} is neither math nor english_multichoice; choose one, or serve an environment (env.math.target)",
        )


def _turns(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    """Yield the calls of an episode, unless Headrace's key gives them."""
    named = sorted(named_environments(values))
    for name in ("grpo", "ppo"):
        key = f"{name}.max_rollout_turns"
        turns = look(values, key)
        if turns is None:
            continue
        if not any(has_episodes(values, env) for env in named):
            envs = " or ".join(f"env.{env}" for env in named if env not in ITS_ENVIRONMENTS) or "env.code"
            refuse(
                key,
                f"{in_yaml(turns)}, but {envs} has no episodes; an environment of several turns is a program (docs/agents.md): write it, "
                "and set target and episodes: true, or set max_rollout_turns to 1",
            )
        elif look(values, "agents.max_rollout_turns") is None:
            yield "agents.max_rollout_turns", turns, key


# keys of the chat server that NeMo Gym's programs call -> keys of the tokenizer
_CHAT_SERVER = {"chat_template": "chat_template", "default_chat_template_kwargs": "chat_template_kwargs"}


def _templates(values: dict[str, Any], refuse: Refuse) -> Iterator[tuple[str, Any, str]]:
    """Yield the chat template and its arguments, which there are given for prompts and for a server of chats separately."""
    tokenizer = look(values, "policy.tokenizer", {})
    for theirs, ours in _CHAT_SERVER.items():
        key = f"policy.generation.vllm_cfg.http_server_serving_chat_kwargs.{theirs}"
        value, own = look(values, key), look(tokenizer, ours)
        if value and own and value != own:
            refuse(
                key,
                f"{in_yaml(value)}, but policy.tokenizer.{ours} is {in_yaml(own)}; a run has one chat template, so give both the same",
            )
        elif value and not own:
            yield f"policy.tokenizer.{ours}", value, key
    for section in ("policy.tokenizer", "policy.generation", "policy.generation.vllm_cfg"):
        thinks = look(values, f"{section}.enable_thinking")
        if thinks is not None and look(tokenizer, "chat_template_kwargs.enable_thinking") is None:
            yield "policy.tokenizer.chat_template_kwargs.enable_thinking", thinks, f"{section}.enable_thinking"


GATHERERS: tuple[Gatherer, ...] = (_megatron, _single_controller, _teacher, _multiple_choice, _turns, _templates)
