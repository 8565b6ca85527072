"""The machine that a report is of, as JSON: `python -m benchmarks.gpu.machine DEVICE`."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import sys

import torch
import transformers

from headrace.base import devices
from headrace.base.errors import ServiceError
from headrace_services.trainer.network.backbone import choose_device


def about(wanted: str) -> dict[str, str]:
    """Raises `ServiceError` for a GPU that is not there."""
    device = choose_device(wanted)
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.type,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "vLLM": "installed" if importlib.util.find_spec("vllm") else "not installed",
    }
    if device.type == "cuda":
        inventory = devices.read_inventory()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found["GPU"] = (
            f"{torch.cuda.get_device_name(device)}, {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f} GiB"
        )
        found["CUDA"] = f"{torch.version.cuda}, driver {inventory.driver}, NCCL {nccl}"
    return found


def main() -> None:
    try:
        sys.stdout.write(json.dumps(about(sys.argv[1])))
    except ServiceError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
