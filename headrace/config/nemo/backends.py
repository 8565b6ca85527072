"""Parts of a NeMo RL file that are in force only by the word of another key, and what Headrace's sections say instead.

Each function takes the whole file and changes it; what it found is returned as notes for the report.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.config.nemo.rules import look, sources

Said = tuple[str, str]  # key, what takes its place

_LINEAR, _CONSTANT, _COSINE = (
    f"torch.optim.lr_scheduler.{name}LR" for name in ("Linear", "Constant", "CosineAnnealing")
)
_FOREVER = 10_000_000_000


def in_force(values: dict[str, Any]) -> list[Said]:
    """All of it, in place."""
    return [*_single_controller(values), *_trainers(values), *_splits(values)]


# the others take the key and leave it
_SPLIT = ("OpenMathInstruct-2", "OpenR1-Math-220k", "NuminaMath-1.5", "ResponseDataset", None)


def _splits(values: dict[str, Any]) -> Iterator[Said]:
    """`split_validation_size` is in force for some data sets alone; files inherit it from another one's."""
    for number, source in enumerate(sources(values, "train")):
        name = source.get("dataset_name", look(values, "data.default.dataset_name"))
        if name not in _SPLIT and source.pop("split_validation_size", None):
            yield f"data.train.{number}.split_validation_size", f"{name} is not split in NeMo RL either"


def _trainers(values: dict[str, Any]) -> Iterator[Said]:
    """With `megatron_cfg.enabled`, its optimizer and schedule are in force, and without it nothing of it is."""
    for section in ("policy", "value"):
        model = values.get(section)
        if not isinstance(model, dict):
            continue
        megatron = model.get("megatron_cfg")
        if not isinstance(megatron, dict) or megatron.get("enabled") is not True:
            if model.pop("megatron_cfg", None) is not None:
                yield f"{section}.megatron_cfg", "it is not enabled, and nothing of it is in force"
            continue
        if look(megatron, "optimizer.clip_grad") is not None:
            model.pop("max_grad_norm", None)
        for key in ("optimizer", "scheduler"):
            if model.pop(key, None) is not None:
                yield f"{section}.{key}", f"with megatron_cfg.enabled, {section}.megatron_cfg.{key} is in force instead"
        if model.pop("automodel_cfg", None) is not None:
            yield f"{section}.automodel_cfg", "with megatron_cfg.enabled, nothing of it is in force"


def megatron_optimizer(megatron: dict[str, Any]) -> dict[str, Any]:
    """`optimizer` in torch's terms. Megatron's adam decouples weight decay: AdamW."""
    given = megatron.get("optimizer") or {}
    kwargs = {ours: given[theirs] for theirs, ours in _SAME.items() if given.get(theirs) is not None}
    if "adam_beta1" in given or "adam_beta2" in given:
        kwargs["betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    return {"name": "torch.optim.AdamW", "kwargs": kwargs} if kwargs else {}


_SAME = {"lr": "lr", "weight_decay": "weight_decay", "adam_eps": "eps"}


def megatron_schedule(megatron: dict[str, Any]) -> list[dict[str, Any]]:
    """`scheduler` in torch's terms: linear from `lr_warmup_init` to `lr` over `lr_warmup_iters` steps, then constant, or down to
    `min_lr` at `lr_decay_iters`. Raises `ValueError` for another style."""
    given = megatron.get("scheduler") or {}
    optimizer = megatron.get("optimizer") or {}
    lr, floor = optimizer.get("lr"), optimizer.get("min_lr") or 0.0
    warmup, start = given.get("lr_warmup_iters") or 0, given.get("lr_warmup_init") or 0.0
    style, until = given.get("lr_decay_style") or "constant", given.get("lr_decay_iters")
    if lr is None:
        return []
    then: dict[str, Any]
    if style == "constant":
        then = {"name": _CONSTANT, "kwargs": {"factor": 1.0, "total_iters": _FOREVER}}
    elif until is None or until <= warmup:
        raise ValueError(f"lr_decay_style {style} with lr_decay_iters {until}: give the step at which it ends")
    elif style == "cosine":
        then = {"name": _COSINE, "kwargs": {"T_max": until - warmup, "eta_min": floor}}
    elif style == "linear":
        then = {
            "name": _LINEAR,
            "kwargs": {"start_factor": 1.0, "end_factor": floor / lr, "total_iters": until - warmup},
        }
    else:
        raise ValueError(
            f"lr_decay_style {style!r} is none of constant, linear, cosine; write policy.scheduler instead"
        )
    if not warmup:
        return [] if style == "constant" else [then]
    # torch refuses a factor of 0
    ramp = {"start_factor": max(start / lr, 1e-8), "end_factor": 1.0, "total_iters": warmup}
    return [{"name": _LINEAR, "kwargs": ramp}, then, {"milestones": [warmup]}]


def _single_controller(values: dict[str, Any]) -> Iterator[Said]:
    """`async_rl` is in force where `async_grpo` (`async_ppo`) is not, and always updates in flight."""
    given = values.get("async_rl")
    name = "ppo" if isinstance(values.get("ppo"), dict) else "grpo"
    if not isinstance(given, dict):
        return
    if look(values, f"{name}.async_{name}"):
        del values["async_rl"]
        yield "async_rl", f"{name}.async_{name} is given, and in force instead"


def asynchrony(sampler: dict[str, Any]) -> dict[str, Any]:
    """What a sampler of `async_rl` is in Headrace's terms. Raises `ValueError` for one that is not known."""
    name = sampler.get("name", "in_order")
    orders = {"in_order": "ordered", "weight_fifo": "drop", "ready_first": "drop", "windowed": "drop"}
    if name not in orders:
        raise ValueError(f"{name!r} is none of {', '.join(orders)}; choose one of them")
    age = sampler.get("max_lookahead_versions" if name == "in_order" else "max_staleness_versions")
    return {
        "enabled": True,
        "in_flight_weight_updates": True,
        "staleness_policy": orders[name],
        "max_trajectory_age_steps": 1 if age is None else age,
    }
