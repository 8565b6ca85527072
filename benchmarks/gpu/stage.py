"""What a part is given."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.sizes import Size


@dataclasses.dataclass(frozen=True)
class Stage:
    """`device` is cpu or cuda; `folder` is the same for all parts, for models."""

    device: str
    size: Size
    folder: Path
    rows: Rows

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def model(self) -> Path:
        return self.size.model(self.folder, self.device)

    def forget(self) -> None:
        """Give back what the models of before held."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """How long `work` takes on the device: the best of five, after one that is not timed."""
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
