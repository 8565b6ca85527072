"""One part, in a process of its own: `python -m benchmarks.gpu.part NAME DEVICE SIZE FOLDER ROWS`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.rows import Rows, line
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Stage
from headrace.net.service import die_with_parent

# Module and function: no part needs the packages of another.
PARTS = {
    "nccl": ("channel", "world_of_two"),
    "nccl-multi-rank": ("channel", "world_of_two"),
    "missing-peer": ("channel", "missing_peer"),
    "stopped-peer": ("channel", "stopped_peer"),
    "step": ("step", "step"),
    "drift": ("drift", "drift"),
    "refit": ("refit", "refit"),
    "precision": ("precision", "precision"),
    "engine": ("engine", "engine"),
    "engine-v2": ("engine", "engine"),
}


def main() -> None:
    die_with_parent()
    name, device, size, folder, rows = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(
            0
        )  # which initialises CUDA: figures of memory are asked for before anything is on the device
        torch.cuda.init()
    code = 0
    try:
        module, function = PARTS[name]
        part: Callable[[Stage], None] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        part(Stage(device, SIZES[size], Path(folder), Rows(Path(rows))))
    except Exception as error:
        logging.exception("the part failed")
        sys.stderr.write(f"{line(error)}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # a call of NCCL that hangs would keep the interpreter, and one that comes back while it ends would abort it
    os._exit(code)


if __name__ == "__main__":
    main()
