"""One part, in a process of its own: `python -m benchmarks.gpu.part MODULE:FUNCTION DEVICE SIZE FOLDER MODEL`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import shard_alone
from benchmarks.gpu.rows import Rows, line
from benchmarks.gpu.runner import ROWS
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Stage


def main() -> None:
    function, device, size, folder, model = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    if device == "cpu":
        torch.set_num_threads(1)
        shard_alone.switch_on_if_asked()
    code = 0
    try:
        module, name = function.split(":")
        part: Callable[[Stage], None] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        part(Stage(device, SIZES[size], Path(folder), model, Rows(Path(folder, ROWS))))
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
