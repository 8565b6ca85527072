"""Utilization and memory of the GPUs of the trainer's machine, from NVML."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

import pynvml

log = logging.getLogger(__name__)

GIB = 1024**3
STOP_S = 10.0  # a driver that hangs must not keep a finished trainer from exiting


def readings() -> Iterator[tuple[str, float]]:
    """Yield the metrics of each GPU: utilization in percent, and used memory in GiB. What the driver doesn't report of a GPU is left out:
    of a divided one (MIG) its utilization, of one that shares the host's memory (GB10, Jetson) its memory. NVML must be initialized.
    Raises `pynvml.NVMLError`."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for name, read in _READ.items():
            try:
                yield f"gpu/{index}/{name}", read(handle)
            except pynvml.NVMLError_NotSupported:
                continue


def _utilization(handle: object) -> float:
    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def _memory(handle: object) -> float:
    # version 2 leaves out what the driver reserves, as nvidia-smi does
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used / GIB)


_READ: dict[str, Callable[[object], float]] = {"util": _utilization, "mem_gb": _memory}


class GPUMonitor:
    """Samples every `interval_s` seconds on its own thread. Does nothing without an NVIDIA driver."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._seen: dict[str, list[float]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)

    def start(self) -> None:
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            return
        except pynvml.NVMLError as error:
            log.warning("no gpu/* metrics: the NVIDIA driver reports %s", error)
            return
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def take(self) -> dict[str, float]:
        """Return the `gpu/*` metrics: mean utilization and largest memory of each GPU that was sampled since the last call."""
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        return {
            name: sum(values) / len(values) if name.endswith("/util") else max(values) for name, values in seen.items()
        }

    def sample(self) -> None:
        found = list(readings())
        with self._lock:
            for name, value in found:
                self._seen[name].append(value)

    def _watch(self) -> None:
        failing = False
        while not self._stop.is_set():
            try:
                self.sample()
                failing = False
            except pynvml.NVMLError as error:
                if not failing:
                    log.warning("no gpu/* metrics: the NVIDIA driver reports %s", error)
                failing = True
            self._stop.wait(self._interval_s)
        pynvml.nvmlShutdown()
