"""Whether a run fits on its devices, and the smallest change with which it does.

`judge` is a pure function of the configuration and the memory of the devices. Where a run doesn't fit, it looks for one change that is
enough, in a fixed order, and takes the first. What costs nothing comes first, then what costs time, and last what trains something else:

    1. shares of a device       what a process may use of it; nothing else changes
    2. micro-batches            fewer tokens at a time: the same gradients, in more passes
    3. chunks of logits         fewer rows at a time: the same numbers
    4. activation checkpointing a third more computation
    5. the replica's GPUs       more of them for each replica, so fewer replicas
    6. more ranks               GPUs that were a replica's, or that are left over
    7. an adapter (LoRA)        trains another thing: small matrices beside the weights

Where no change alone is enough, they are made one after the other in this order, and those that turn out not to be needed are left out. A
shorter context or a smaller model is no change of these: it is for the user to choose.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from headrace.base.devices import SHARES, DeviceMemory, Site
from headrace.base.errors import ServiceError
from headrace.config import Config

from ..learning.algorithms import required_passes
from .models import (
    NotPlanned,
    element_size,
    list_models,
    micro_batch,
    packs,
    to_download,
)
from .parts import (
    CONTEXT,
    CUDA_PART,
    GIB,
    KV_CACHE,
    NCCL_PART,
    REPLICA_REFIT,
    Parts,
    activations,
    count_cached_tokens,
    kv_bytes_per_token,
    replica_memory,
    total,
    trainer_phases,
)

log = logging.getLogger(__name__)

Changes = dict[str, Any]  # values by configuration key
Step = Callable[[Config, Site], Iterator[Changes]]
# The most of a device that a replica may be given.
MOST = 0.95
# How far the plan may be from what a run takes, as a share of it (docs/memory.md, Accuracy).
ERROR = 0.1
SHARE = "trainer.gpu_memory_fraction"
_VLLM = "policy.generation.vllm_cfg"
UTILIZATION = f"{_VLLM}.gpu_memory_utilization"
_CACHE, _PARALLEL = f"{_VLLM}.kv_cache_memory_bytes", f"{_VLLM}.tensor_parallel_size"
_RANKS, _REPLICAS = "trainer.num_processes", "rollout.replicas"


@dataclasses.dataclass(frozen=True)
class Use:
    """What one side takes of its most occupied device: `parts` in bytes, of the `room` there is. `when` names the trainer's phase."""

    who: str
    when: str
    parts: Parts
    room: int
    device: DeviceMemory

    @property
    def needed(self) -> int:
        return total(self.parts)

    @property
    def outside(self) -> int:
        """What the trainer takes outside of torch's share of a device."""
        return self.parts.get(CUDA_PART, 0) + self.parts.get(NCCL_PART, 0)

    @property
    def tensors(self) -> int:
        return self.needed - self.outside

    def within(self, fraction: float) -> Use:
        """Return the same use with torch's share limited to this `fraction` of the device."""
        return dataclasses.replace(self, room=min(self.device.free, int(fraction * self.device.total) + self.outside))

    @property
    def over(self) -> int:
        """The bytes that are missing; negative if it fits."""
        return self.needed - self.room

    def __str__(self) -> str:
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:4]
        shown = ", ".join(f"{name} {count / GIB:.1f}" for name, count in largest)
        return f"{self.who} needs {self.needed / GIB:.1f} of {self.room / GIB:.1f} GiB on {self.device.name}{self.when} ({shown})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a run fits. `shares` are the trainer's and the replica's on a device that they share. `problem` names what doesn't fit, with
    numbers; None if all fits, or what is missing is within the plan's error, which is among the `warnings`. Both name the smallest `change`
    with which all fits by the plan, as `key=value`; None if none was needed or found."""

    problem: str | None = None
    change: tuple[str, ...] | None = None
    shares: tuple[float, float] | None = None
    warnings: tuple[str, ...] = ()


def judge(config: Config, site: Site) -> Verdict:
    """Compare what `config` needs with the devices of `site`. Raises `ServiceError` if the configuration of a model can't be read."""
    try:
        if problem := _find_sharding_problem(config, site):
            return Verdict(problem)
        shares, uses = _uses(config, site)
    except NotPlanned as error:
        return Verdict(warnings=(f"the run's memory is not compared with its GPUs: {error}",))
    over = [use for use in uses if use.over > 0]
    if not over:
        return Verdict(shares=shares)
    found = smallest_change(config, site)
    change = None if found is None else tuple(f"{key}={_write_value(value)}" for key, value in found.items())
    said = "; ".join(map(str, over))
    remedy = (
        "No change that is tried makes it fit (docs/memory.md): lower what is largest here, take GPUs with more memory, or a smaller model"
        if change is None
        else f"The smallest change that fits: {' '.join(change)}"
    )
    if any(use.over > ERROR * use.room for use in over):
        return Verdict(f"{said}. {remedy}", change)
    return Verdict(None, change, shares, (f"{said}. That is within the error of the plan, so it may fit. {remedy}",))


def _find_sharding_problem(config: Config, site: Site) -> str | None:
    """Return why vLLM can't divide the model among the GPUs of a replica; None if it can."""
    parallel = config.policy.generation.vllm_cfg.tensor_parallel_size
    if site.replica is None or parallel == 1:
        return None
    size = list_models(config)["policy"].size
    if size.can_be_sharded(parallel):
        return None
    possible = ", ".join(str(count) for count in range(1, size.heads + 1) if size.can_be_sharded(count))
    return f"{_PARALLEL} {parallel} does not divide the model's {size.heads} attention heads into equal parts; give one of {possible}"


def fits(config: Config, site: Site) -> bool:
    return all(use.over <= 0 for use in _uses(config, site)[1])


def _write_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else f"{value}"


# -- what each side needs


def phases(config: Config, site: Site) -> dict[str, Parts]:
    """Return what the trainer takes on each of its GPUs, by phase and part."""
    found = list_models(config)
    ranks, within = config.trainer.num_processes, config.trainer.shard_within_host
    hosts = -(-ranks // site.gpus_per_host)
    steps = -(-config.algorithm.batch_size // config.policy_batch) * config.algorithm.policy_epochs(
        config.algorithm.first_policy_step
    )
    passes = required_passes(config, optimizer_steps=steps)
    return trainer_phases(
        found,
        micro_batch(config.policy, training=True),
        shards=ranks // hosts if within else ranks,
        copies=hosts if within else 1,
        reduce_gradients=config.trainer.reduce_gradients,
        device=site.trainer.total if site.trainer else 0,
        bucket=config.weight_channel.bucket_size("cuda"),
        sent=_replica_width(config),
        inference=micro_batch(config.policy, training=False) if passes else 0,
    )


def _replica_width(config: Config) -> int:
    return element_size(config.policy.rollout_precision[1])


def _share(config: Config) -> float:
    """Return a replica's share of a device of its own."""
    share = config.policy.generation.vllm_cfg.resolve(on_cpu=False).gpu_memory_utilization
    assert share is not None  # it has a default on a GPU
    return share


def replica(config: Config, memory: int, share: float) -> Parts:
    """Return what a replica takes on each of its GPUs of `memory` bytes, with this `share` of it."""
    engine = config.policy.generation.vllm_cfg.resolve(on_cpu=False, device_memory=memory)
    assert engine.max_num_batched_tokens is not None  # it has a default on a GPU
    assert engine.max_num_seqs is not None
    return replica_memory(
        list_models(config)["policy"].size,
        _replica_width(config),
        engine.tensor_parallel_size,
        engine.kv_cache_memory_bytes,
        share,
        memory,
        config.weight_channel.bucket_size("cuda"),
        batch=engine.max_num_batched_tokens,
        sequences=engine.max_num_seqs,
    )


def _least(config: Config, parts: Parts) -> Parts:
    """Return a replica's parts with the smallest KV cache with which vLLM starts: for one sequence of the longest length."""
    engine = config.policy.generation.vllm_cfg
    size = list_models(config)["policy"].size
    token = kv_bytes_per_token(size, _replica_width(config), engine.tensor_parallel_size)
    return parts | {KV_CACHE: math.ceil(config.policy.max_total_sequence_length * token)}


def _uses(config: Config, site: Site) -> tuple[tuple[float, float] | None, list[Use]]:
    """Return the shares of a shared device, and what each side takes of its own."""
    trainer = _trainer_use(config, site) if site.trainer else None
    if site.shared and trainer is not None:
        return _share_device(config, trainer)
    uses = [] if trainer is None else [trainer]
    if site.replica is not None:
        share = _share(config)
        uses.append(_replica_use(config, site.replica, share, site.replica.free))
    return None, uses


def _trainer_use(config: Config, site: Site) -> Use:
    assert site.trainer is not None
    phase, parts = max(phases(config, site).items(), key=lambda each: total(each[1]))
    use = Use("the trainer", f" in the phase {phase!r}", parts, site.trainer.free, site.trainer)
    fraction = config.trainer.gpu_memory_fraction
    return use if fraction is None else use.within(fraction)


def _replica_use(config: Config, device: DeviceMemory, share: float, free: int) -> Use:
    """Return what a replica takes: with a KV cache that fills its share, if that is more than there is, and else with the smallest one,
    which must fit into the share."""
    parts = replica(config, device.total, share)
    room = int(share * device.total) + parts[REPLICA_REFIT]
    if config.policy.generation.vllm_cfg.kv_cache_memory_bytes is not None or room > free:
        return Use("a replica", "", parts, free, device)
    parts = _least(config, parts)
    return Use("a replica", "", parts, room, device)


def _share_device(config: Config, trainer: Use) -> tuple[tuple[float, float], list[Use]]:
    """Return the shares of the device that both sides share, and what each takes of its own. A share that is not configured is the usual
    one if both sides fit so, and otherwise what the trainer needs, and for the replica the rest."""
    device = trainer.device
    engine = config.policy.generation.vllm_cfg

    def use(shares: tuple[float, float]) -> list[Use]:
        fraction, utilization = shares
        own = trainer.within(fraction)
        # the trainer may take all of its share, whatever it needs
        return [own, _replica_use(config, device, utilization, device.free - own.room)]

    given = (config.trainer.gpu_memory_fraction, engine.gpu_memory_utilization)
    usual = (given[0] or SHARES[0], given[1] or SHARES[1])
    tried = [usual]
    for spare in (ERROR, 0.0):  # with some to spare, if the replica can do with the rest
        fraction = given[0] or min(1.0, math.ceil(100 * (1 + spare) * trainer.tensors / device.total) / 100)
        utilization = given[1] or _rest(config, trainer, fraction)
        tried += [(fraction, utilization)] if utilization > 0 else []
    for shares in tried:
        if all(each.over <= 0 for each in use(shares)):
            return shares, use(shares)
    return tried[-1], use(tried[-1])


def _rest(config: Config, trainer: Use, fraction: float) -> float:
    """Return the share that the trainer's leaves to a replica, beside both contexts and what a refit takes."""
    device = trainer.device
    refit = replica(config, device.total, 0)[REPLICA_REFIT]
    left = device.free - int(fraction * device.total) - trainer.outside - refit
    return max(0.0, min(MOST, math.floor(100 * left / device.total) / 100))


# -- changes


def apply_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of `config` with the `changes`."""
    for key, value in changes.items():
        config = _apply_change(config, key.split("."), value)
    return config


def _apply_change(section: Any, keys: list[str], value: Any) -> Any:
    new = value if len(keys) == 1 else _apply_change(getattr(section, keys[0]), keys[1:], value)
    return section.model_copy(update={keys[0]: new})


def smallest_change(config: Config, site: Site) -> Changes | None:
    """Return the smallest change that makes the run fit; None if there is none."""

    def enough(changes: Changes) -> bool:
        try:
            return fits(apply_changes(config, changes), site)
        except ServiceError:  # a model without layers for an adapter
            return False

    def complete(changes: Changes) -> Changes | None:
        """Return the `changes`, with other shares if these are needed too; None if they are not enough."""
        with_shares = (changes | change for change in other_shares(apply_changes(config, changes), site))
        return next((each for each in (changes, *with_shares) if enough(each)), None)

    def first(step: Step, before: Changes) -> Changes | None:
        """Return the first change of `step`, made after those `before`, with which it fits, without what it doesn't need."""
        every = (complete(before | change) for change in step(apply_changes(config, before), site))
        found = next((each for each in every if each is not None), None)
        return None if found is None else _drop_unneeded(found, enough)

    if (found := complete({})) is not None:
        return found
    for step in STEPS:
        if (found := first(step, {})) is not None:
            return found
    made: Changes = {}
    for step in STEPS:
        if (found := first(step, made)) is not None:
            return found
        made |= next(reversed(list(step(apply_changes(config, made), site))), {})
    return None


def _drop_unneeded(changes: Changes, enough: Callable[[Changes], bool]) -> Changes:
    """Return the `changes` without those that aren't needed; what costs least is kept longest. Numbers of GPUs belong together."""
    for key in reversed(list(changes)):
        left = {other: value for other, value in changes.items() if other != key}
        if key not in (_RANKS, _REPLICAS, _PARALLEL) and left and enough(left):
            changes = left
    return changes


def other_shares(config: Config, site: Site) -> Iterator[Changes]:
    """Yield other shares of a device where they are configured."""
    engine, fraction = config.policy.generation.vllm_cfg, config.trainer.gpu_memory_fraction
    if site.shared and site.trainer is not None:
        if fraction is None and engine.gpu_memory_utilization is None and engine.kv_cache_memory_bytes is None:
            return  # they are found
        free = apply_changes(config, {SHARE: None, UTILIZATION: None, _CACHE: None})
        found, _ = _uses(free, site)
        if found is not None:
            cache = {_CACHE: None} if engine.kv_cache_memory_bytes is not None else {}
            yield {SHARE: found[0], UTILIZATION: found[1], **cache}
        return
    if fraction is not None:
        yield {SHARE: None}
    if site.replica is not None:
        refit = replica(config, site.replica.total, 0)[REPLICA_REFIT]
        most = min(MOST, math.floor(100 * (site.replica.free - refit) / site.replica.total) / 100)
        cache = {_CACHE: None} if engine.kv_cache_memory_bytes is not None else {}
        if most > 0:
            yield {UTILIZATION: most, **cache}
            if fraction is not None:
                yield {SHARE: None, UTILIZATION: most, **cache}


def micro_batches(config: Config, site: Site) -> Iterator[Changes]:
    """Yield smaller micro-batches, of all passes."""
    policy, least = config.policy, config.policy.max_total_sequence_length
    if packs(policy):
        section = "sequence_packing" if policy.sequence_packing.enabled else "dynamic_batching"
        keys = ("train_mb_tokens", "logprob_mb_tokens")
        now = [micro_batch(policy, training=training) for training in (True, False)]
        while max(now) > least:
            now = [max(least, size // 2) for size in now]
            yield {f"policy.{section}.{key}": size for key, size in zip(keys, now, strict=True)}
        return
    rows, forward = policy.train_micro_batch_size, policy.logprob_batch_size
    value = config.value.train_micro_batch_size
    while max(rows, forward or 0, value or 0) > 1:
        rows = max(1, rows // 2)
        changes: Changes = {"policy.train_micro_batch_size": rows}
        if forward is not None:
            changes["policy.logprob_batch_size"] = forward = max(1, forward // 2)
        if value is not None:
            changes["value.train_micro_batch_size"] = value = max(1, value // 2)
        yield changes


def chunks(config: Config, site: Site) -> Iterator[Changes]:
    """Yield smaller chunks of logits."""
    now = config.policy.chunk_size("cuda")
    for size in (2048, 1024, 512, 256):
        if now is None or size < now:
            yield {"policy.logprob_chunk_size": size}


def checkpointing(config: Config, site: Site) -> Iterator[Changes]:
    if not config.policy.recomputes("cuda"):
        yield {"policy.activation_checkpointing": True}


def larger_replicas(config: Config, site: Site) -> Iterator[Changes]:
    """Yield replicas of more GPUs each, as many as there are GPUs for."""
    if site.replica is None or site.shared:
        return
    size = list_models(config)["policy"].size
    parallel = config.policy.generation.vllm_cfg.tensor_parallel_size
    ranks = config.trainer.num_processes if site.trainer else 0
    while (room := site.replicas_beside(ranks, parallel := 2 * parallel)) and size.can_be_sharded(parallel):
        count = min(config.rollout.replicas, room)
        yield {_PARALLEL: parallel} | ({_REPLICAS: count} if count != config.rollout.replicas else {})


def more_ranks(config: Config, site: Site) -> Iterator[Changes]:
    """Yield more ranks, on GPUs that are left over, and then on those of replicas. A layer's experts are spread in equal numbers."""
    if site.trainer is None or site.shared:
        return
    now, parallel = config.trainer.num_processes, config.policy.generation.vllm_cfg.tensor_parallel_size
    taken = parallel if site.replica is not None else 0
    experts = {shape[0] for model in list_models(config).values() for shape in model.size.shapes if len(shape) == 3}
    for ranks in range(now + 1, site.gpus - taken + 1):
        if ranks % -(-ranks // site.gpus_per_host):
            continue  # hosts have equally many
        if any(-(-count // -(-count // ranks)) < ranks for count in experts):
            continue  # a rank would be without one
        room = site.replicas_beside(ranks, parallel)
        if room is None or (taken and not room):
            continue
        replicas = min(config.rollout.replicas, room) if taken else config.rollout.replicas
        yield {_RANKS: ranks} | ({_REPLICAS: replicas} if replicas != config.rollout.replicas else {})


def adapter(config: Config, site: Site) -> Iterator[Changes]:
    if not config.policy.lora_cfg.enabled:
        yield {"policy.lora_cfg.enabled": True}


STEPS: tuple[Step, ...] = (micro_batches, chunks, checkpointing, larger_replicas, more_ranks, adapter)


# -- `headrace plan memory`


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run on the devices of a site. Reading it raises `ServiceError` for a model whose configuration can't be read."""

    config: Config
    site: Site

    @functools.cached_property
    def peak(self) -> tuple[str, Parts]:
        """The trainer's phase in which it takes most on each of its GPUs, and what it takes then, in bytes by part."""
        return max(phases(self.config, self.site).items(), key=lambda each: total(each[1]))

    @functools.cached_property
    def replica(self) -> Parts:
        """What a replica takes on each of its GPUs."""
        share = _share(self.config)
        return replica(self.config, self.site.replica.total if self.site.replica else 0, share)

    @property
    def remarks(self) -> list[str]:
        policy = list_models(self.config)["policy"]
        tokens = micro_batch(self.config.policy, training=True)
        parallel = self.config.policy.generation.vllm_cfg.tensor_parallel_size
        cached = count_cached_tokens(policy.size, _replica_width(self.config), parallel, self.replica[KV_CACHE])
        # of the version that is in the store, to compare with, and of the next (`control.offers`)
        copies = 2 * policy.size.parameters * _replica_width(self.config)
        offered = [
            f"rank 0 has copies of the weights for replicas that pull, in its host's memory: {copies / GIB:.1f} GiB"
        ]
        otherwise = sum(activations(policy.size, policy.bytes, tokens, recompute=not policy.recompute))
        return [
            f"{policy.size.parameters:,} parameters; micro-batches of at most {tokens:,} tokens",
            f"activations {'without' if policy.recompute else 'with'} checkpointing: {otherwise / GIB:.1f} GiB",
            f"the KV cache of a replica (tensor_parallel_size {parallel}) holds {cached:,} tokens",
            *(offered if self.config.run_store is not None else []),
        ]

    def judge(self) -> Verdict:
        """Return whether the run fits. No hub is asked: a model that must be downloaded is not compared, with a warning."""
        if missing := to_download(self.config):
            return Verdict(
                warnings=(f"the run's memory is not compared with its GPUs: {missing} must be downloaded first",)
            )
        return judge(self.config, self.site)


def plan(config: Config, site: Site, ranks: int | None = None) -> Plan:
    """Plan the run for the devices of `site`, with so many `ranks` of the trainer (None: `trainer.num_processes`)."""
    return Plan(config if ranks is None else apply_changes(config, {_RANKS: ranks}), site)


def check_device(config: Config, ranks: int, on_host: int) -> None:
    """Compare what one of `ranks` needs with what its own GPU has free, before a model is loaded; `on_host` of them are on this host. Does
    nothing on a CPU. Raises `ServiceError` with the numbers and the smallest change that helps."""
    if config.trainer.device == "cpu" or not torch.cuda.is_available():
        return
    try:
        free, size = torch.cuda.mem_get_info()
    except RuntimeError as error:
        log.warning(
            "the memory of this rank's GPU is not compared with what the run needs: CUDA doesn't tell it (%s)", error
        )
        return
    name = torch.cuda.get_device_name()
    # this process has its context already
    device = DeviceMemory(f"{name} ({size / GIB:.0f} GiB)", size, min(size, free + CONTEXT))
    verdict = judge(apply_changes(config, {_RANKS: ranks}), Site(device, None, ranks, on_host))
    for warning in verdict.warnings:
        log.warning("%s", warning)
    if verdict.problem is not None:
        raise ServiceError(verdict.problem)
