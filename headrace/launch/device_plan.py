"""Plans from the configuration which GPUs, and how many CPU threads, each process of a run on this machine gets. The plan reaches each
process through its environment variables, and users through `headrace status`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base import devices
from headrace.base.devices import Device, DeviceMemory, DevicePlan, Inventory, Site, TooFewDevices
from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import atomic_write, read_json
from headrace.config import Config, threads
from headrace.config.loading import variable_name
from headrace.config.threads import Threads
from headrace.launch.entry_points import load_entry_point

FILE = "devices.json"
_REPLICA = "rollout-"
_REST = "left over"
_THREADS = "threads"


def of(config: Config) -> DevicePlan | None:
    """Return the plan for this machine; None if the run uses no GPU. Devices on which nothing runs come first, unless CUDA_VISIBLE_DEVICES
    gives an order. Raises `ServiceError` if there are too few devices, or one that can't compute what is configured."""
    versions = devices.installed_versions()
    for_cuda = devices.is_for_cuda(versions, "torch"), devices.engine_is_for_cuda(versions)
    if not any(map(_may_use, (config.trainer.device, config.rollout.device), for_cuda)):
        return None  # whatever the driver reports
    if why_on_cpu(config) is not None:
        return DevicePlan()  # no process is left to try the devices
    inventory = devices.visible(os.environ)
    if devices.VISIBLE not in os.environ:
        inventory = dataclasses.replace(inventory, devices=devices.idle_first(inventory.devices))
    return plan_devices(config, inventory, versions)


def why_on_cpu(config: Config) -> str | None:
    """Return why the run goes on without this machine's GPUs, as `devices.why_on_cpu`; None if it asks for a GPU by name."""
    if config.trainer.device != "auto" or config.rollout.device == "cuda":
        return None
    return devices.why_on_cpu(os.environ, devices.installed_versions())


def plan_devices(config: Config, inventory: Inventory, versions: Mapping[str, str]) -> DevicePlan | None:
    """Return the plan as `of` does, for a given inventory and given package versions (`devices.installed_versions`)."""
    ranks, replicas = config.trainer.num_processes, config.rollout.replicas
    if not _on_gpu(config.trainer.device, inventory, devices.is_for_cuda(versions, "torch")):
        ranks = 0
    if not _on_gpu(config.rollout.device, inventory, devices.engine_is_for_cuda(versions)):
        replicas = 0
    if not ranks + replicas:
        return None
    inventory.check_driver()
    slice_size, there = config.policy.generation.vllm_cfg.tensor_parallel_size, len(inventory.devices)
    if replicas and 0 < there < slice_size:
        raise ServiceError(
            devices.say_one_node(slice_size, f"{there} GPUs of this machine ({devices.VISIBLE} selects them)")
        )
    try:
        found = devices.plan(inventory.devices, ranks=ranks, replicas=replicas, slice_size=slice_size)
    except TooFewDevices as error:
        raise ServiceError(
            f"the run needs {error.needed} GPUs ({_wanted(ranks, replicas, slice_size)}), and this machine has "
            f"{there} for it ({devices.VISIBLE} selects them); lower these, or set trainer.device or rollout.device to "
            "cpu. The plan so far:\n" + "\n".join(lines(error.partial))
        ) from error
    of_replicas = [device for slice_ in found.replicas for device in slice_]
    devices.check_for_engine(of_replicas)
    for key, precision in config.trainer_precisions.items():
        devices.check_precision(found.trainer, key, precision)
    devices.check_precision(of_replicas, *config.policy.rollout_precision)
    return found


def _wanted(ranks: int, replicas: int, slice_size: int) -> str:
    wanted = [f"trainer.num_processes {ranks}"] if ranks else []
    if replicas:
        wanted.append(f"rollout.replicas {replicas} x policy.generation.vllm_cfg.tensor_parallel_size {slice_size}")
    return ", ".join(wanted)


# -- memory


def fit(config: Config, plan: DevicePlan) -> tuple[DevicePlan, list[str]]:
    """Return the plan with the shares of a shared device that the run needs, and warnings. Raises `ServiceError` with the numbers, and the
    smallest change that helps, for a run that needs more memory than its devices have free."""
    if not plan.trainer and not plan.replicas:
        return plan, []
    verdict = compare(config, site_of(plan))
    if verdict.problem is not None:
        raise ServiceError(verdict.problem)
    silent = [device for device in (*plan.trainer, *itertools.chain(*plan.replicas)) if device.memory is None]
    warnings = [
        f"{device} does not tell its memory: only the trainer compares it with what the run needs, when it starts"
        for device in dict.fromkeys(silent)
    ]
    shares = verdict.shares or plan.shares
    return dataclasses.replace(plan, shares=shares), [*verdict.warnings, *warnings]


def compare(config: Config, site: Site) -> Any:
    """Return the verdict on the run's memory on the devices of `site` (`headrace_services.trainer.memory.fit.Verdict`). Loads no weights,
    and asks no hub. Raises `MissingPackage` without the trainer's packages."""
    plan_memory = load_entry_point("headrace.tools", "plan-memory", extra="trainer")
    return plan_memory(config, site).judge()


def site_of(plan: DevicePlan) -> Site:
    """Return the memory of the plan's devices, which are those of one machine."""
    own = {*plan.trainer, *itertools.chain(*plan.replicas), *plan.rest}
    return Site(_tightest(plan.trainer), _tightest(itertools.chain(*plan.replicas)), len(own), len(own), plan.is_shared)


def _tightest(own: Iterable[Device]) -> DeviceMemory | None:
    known = [
        DeviceMemory(str(device), device.memory, device.memory if device.free is None else device.free)
        for device in own
        if device.memory is not None
    ]
    return min(known, key=lambda memory: memory.free, default=None)


def assume(config: Config, gpus: int | None, per_host: int, memory: int) -> Site:
    """Return a site of `gpus` devices of `memory` bytes each, `per_host` on a host; None: as many as the run takes. Raises `ConfigError` if
    it takes more, or has no place on these hosts."""
    ranks, replicas = config.trainer.num_processes, config.rollout.replicas
    if config.trainer.device == "cpu":
        ranks = 0
    if config.rollout.device == "cpu":
        replicas = 0
    slice_size = config.policy.generation.vllm_cfg.tensor_parallel_size
    needed = ranks + replicas * slice_size
    shared = gpus == ranks == replicas == slice_size == 1
    if gpus is not None and gpus < needed and not shared:
        raise ConfigError(
            f"the run needs {needed} GPUs ({_wanted(ranks, replicas, slice_size)}), and --gpus is {gpus}; lower these or raise it"
        )
    device = DeviceMemory(f"a GPU of {memory / 2**30:g} GiB", memory, memory)
    site = Site(device if ranks else None, device if replicas else None, gpus or needed, per_host, shared)
    if slice_size > per_host and replicas:
        raise ConfigError(devices.say_one_node(slice_size, f"{per_host} GPUs of a host (--gpus-per-host)"))
    room = site.replicas_beside(ranks, slice_size)
    if gpus is not None and not shared and (room is None or room < replicas):
        raise ConfigError(
            f"the run ({_wanted(ranks, replicas, slice_size)}) has no place on {gpus} GPUs with {per_host} on a host (--gpus-per-host): "
            "hosts with ranks have equally many, and a replica has its GPUs on one host; change these numbers"
        )
    return site


def _may_use(device: str, is_for_cuda: bool) -> bool:
    return device == "cuda" or (device == "auto" and is_for_cuda)


def _on_gpu(device: str, inventory: Inventory, is_for_cuda: bool) -> bool:
    return _may_use(device, is_for_cuda) and (device == "cuda" or bool(inventory.devices))


def plan_threads(config: Config, plan: DevicePlan | None) -> Threads:
    """Return the thread counts of the run's processes. Processes that use no device of the plan share the cores of this machine."""
    return threads.of(config, threads.usable_cores(), os.environ, **_on_cores(plan))


def warn_of_threads(config: Config, plan: DevicePlan | None) -> list[str]:
    """Return a warning if a variable of the shell changes what `plan_threads` returns."""
    cost = threads.cost_of_variable(config, threads.usable_cores(), os.environ, **_on_cores(plan))
    return [] if cost is None else [cost]


def _on_cores(plan: DevicePlan | None) -> dict[str, bool]:
    return {"trains": plan is None or not plan.trainer, "generates": plan is None or not plan.replicas}


def thread_variables(planned: Threads, config: Config, child: str) -> dict[str, str]:
    """Return the environment variables that set a child's thread count, unless it is configured. Without them torchrun would set
    OMP_NUM_THREADS for its ranks."""
    if child == "trainer" and config.trainer.num_threads == "auto" and planned.trainer is not None:
        return {variable_name(("trainer", "num_threads")): str(planned.trainer)}
    if child.startswith(_REPLICA) and config.rollout.num_threads == "auto":
        return {variable_name(("rollout", "num_threads")): str(planned.rollout)}
    return {}


def device_variables(plan: DevicePlan, config: Config, child: str) -> dict[str, str]:
    """Return the environment variables that set a child's devices, and its share of a shared device unless that is configured."""
    if child == "trainer":
        own, share, key = plan.trainer, plan.shares[0], "trainer.gpu_memory_fraction"
        configured = config.trainer.gpu_memory_fraction
    elif child.startswith(_REPLICA):
        own = plan.replicas[int(child.removeprefix(_REPLICA)) - 1] if plan.replicas else ()
        share, key = plan.shares[1], "policy.generation.vllm_cfg.gpu_memory_utilization"
        configured = config.policy.generation.vllm_cfg.gpu_memory_utilization
    else:
        return {devices.VISIBLE: "" if child == "page" else _uuids(plan.rest)}
    environ = {devices.VISIBLE: _uuids(own)}
    if plan.is_shared and configured is None:
        environ[variable_name(key.split("."))] = str(share)
    return environ


def _uuids(own: Sequence[Device]) -> str:
    return ",".join(device.uuid for device in own)


def rows(plan: DevicePlan) -> dict[str, list[str]]:
    """Return the devices of each process, by its name."""
    table = {"trainer": _names(plan.trainer)}
    table |= {f"{_REPLICA}{number + 1}": _names(slice_) for number, slice_ in enumerate(plan.replicas)}
    return table | ({_REST: _names(plan.rest)} if plan.rest else {})


def _names(own: Sequence[Device]) -> list[str]:
    return [str(device) for device in own]


def lines(plan: DevicePlan) -> list[str]:
    """Return a line about each process."""
    trainer, replica = plan.shares
    shared = [
        _line(
            "shared",
            [
                f"the trainer may use {trainer:g} of its memory and the replica {replica:g}; weights go through host memory"
            ],
        )
    ]
    return [_line(*row) for row in rows(plan).items()] + (shared if plan.is_shared else [])


def record(plan: DevicePlan | None, planned: Threads, folder: Path) -> None:
    """Store both in the run's folder, for `headrace status`."""
    table = {**(rows(plan) if plan is not None else {}), _THREADS: [str(planned)]}
    with atomic_write(folder / FILE) as unfinished:
        unfinished.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, list[str]]:
    """Return what `record` stored in a run's folder; nothing for a run that `up` never started. Raises `CodecError` for a damaged file."""
    return read_json(folder / FILE, dict[str, list[str]]) or {}


def read_record(folder: Path) -> list[tuple[str, str]]:
    """Return the lines of `headrace status` about the devices and threads of each process. Raises as `read` does."""
    table = read(folder)
    return [("devices" if name == next(iter(table)) else "", _line(name, own)) for name, own in table.items()]


def has_gpus_for_replicas(folder: Path) -> bool:
    """Whether the replicas of the run in `folder` are on GPUs. Raises as `read` does."""
    return any(own for name, own in read(folder).items() if name.startswith(_REPLICA))


def _line(name: str, own: Sequence[str]) -> str:
    return f"{name:11}{', '.join(own) or 'none'}"
