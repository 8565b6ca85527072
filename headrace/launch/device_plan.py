"""Plans from the configuration which GPUs, and how many CPU threads, each process of a run on this machine gets. The plan reaches each
process through its environment variables, and users through `headrace status`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.base import devices
from headrace.base.devices import Device, DevicePlan, Inventory, TooFewDevices
from headrace.base.errors import ServiceError
from headrace.base.files import atomic_write
from headrace.config import Config, threads
from headrace.config.loading import variable_name
from headrace.config.threads import Threads

FILE = "devices.json"
# Memory shares on a device that the trainer and a replica share. The rest is for both CUDA contexts.
TRAINER_SHARE = 0.5
ROLLOUT_SHARE = 0.45
_REPLICA = "rollout-"
_REST = "left over"
_THREADS = "threads"


def of(config: Config) -> DevicePlan | None:
    """Return the plan for this machine; None if the run uses no GPU. Raises `ServiceError` if there are too few devices, or one that can't
    compute what is configured."""
    return plan_devices(config, devices.visible(os.environ), devices.installed_versions())


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
    slice_size = config.policy.generation.vllm_cfg.tensor_parallel_size
    try:
        found = devices.plan(inventory.devices, ranks=ranks, replicas=replicas, slice_size=slice_size)
    except TooFewDevices as error:
        wanted = [f"trainer.num_processes {ranks}"] if ranks else []
        if replicas:
            wanted.append(f"rollout.replicas {replicas} x policy.generation.vllm_cfg.tensor_parallel_size {slice_size}")
        raise ServiceError(
            f"the run needs {error.needed} GPUs ({', '.join(wanted)}), and this machine has {len(inventory.devices)} for it "
            f"({devices.VISIBLE} selects them); lower these, or set trainer.device or rollout.device to cpu. The plan so far:\n"
            + "\n".join(lines(error.partial))
        ) from error
    of_replicas = [device for slice_ in found.replicas for device in slice_]
    devices.check_for_engine(of_replicas)
    for key, precision in config.trainer_precisions.items():
        devices.check_precision(found.trainer, key, precision)
    devices.check_precision(of_replicas, *config.policy.rollout_precision)
    return found


def _on_gpu(device: str, inventory: Inventory, is_for_cuda: bool) -> bool:
    return device == "cuda" or (device == "auto" and is_for_cuda and bool(inventory.devices))


def plan_threads(config: Config, plan: DevicePlan | None) -> Threads:
    """Return the thread counts of the run's processes. Processes that use no device of the plan share the cores of this machine."""
    return threads.of(
        config,
        threads.usable_cores(),
        os.environ,
        trains=plan is None or not plan.trainer,
        generates=plan is None or not plan.replicas,
    )


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
        own, share, key = plan.trainer, TRAINER_SHARE, "trainer.gpu_memory_fraction"
        configured = config.trainer.gpu_memory_fraction
    elif child.startswith(_REPLICA):
        own = plan.replicas[int(child.removeprefix(_REPLICA)) - 1] if plan.replicas else ()
        share, key = ROLLOUT_SHARE, "policy.generation.vllm_cfg.gpu_memory_utilization"
        configured = config.policy.generation.vllm_cfg.gpu_memory_utilization
    else:
        return {devices.VISIBLE: _uuids(plan.rest)}
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
    shared = [_line("shared", ["each uses a part of its memory, and the weights go through host memory"])]
    return [_line(*row) for row in rows(plan).items()] + (shared if plan.is_shared else [])


def record(plan: DevicePlan | None, planned: Threads, folder: Path) -> None:
    """Store both in the run's folder, for `headrace status`."""
    table = {**(rows(plan) if plan is not None else {}), _THREADS: [str(planned)]}
    with atomic_write(folder / FILE) as unfinished:
        unfinished.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> list[tuple[str, str]]:
    """Return the lines of `headrace status` about the devices and threads of each process; none for a run that `up` never started."""
    try:
        table = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [("devices" if name == next(iter(table)) else "", _line(name, own)) for name, own in table.items()]


def _line(name: str, own: Sequence[str]) -> str:
    return f"{name:11}{', '.join(own) or 'none'}"
