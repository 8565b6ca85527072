"""What a part is given."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.sizes import Size
from headrace.config import Config


@dataclasses.dataclass(frozen=True)
class Stage:
    """`device` is cpu or cuda; `folder` is the part's own; `model` a directory, or a name in the Hub's cache."""

    device: str
    size: Size
    folder: Path
    model: str
    rows: Rows

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    def config(self, *overrides: str) -> Config:
        """The configuration of the example that runs at this size."""
        return self.size.config(self.model, self.device, *overrides)

    def forget(self) -> None:
        """Give back what the models of before held."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """How long `work` takes on the device: the best of five, after one that is not timed."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
