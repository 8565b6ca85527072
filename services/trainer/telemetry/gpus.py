"""Utilisation and memory of the GPUs of the trainer's machine, from `nvidia-smi`."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

FIELDS = "index,utilization.gpu,memory.used"
ANSWER_S = 10.0


def query() -> str:
    """One line per GPU. Raises `OSError` or `subprocess.SubprocessError`."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout


def readings(text: str) -> Iterator[tuple[str, float, float]]:
    """(number, utilisation in percent, memory in GiB) of each GPU that reports both."""
    for line in text.splitlines():
        number, *values = (part.strip() for part in line.split(","))
        if len(values) == 2 and all(value.isdecimal() for value in values):
            yield number, float(values[0]), float(values[1]) / 1024


class GPUMonitor:
    """Samples every `interval_s` seconds on its own thread; does nothing if there is no `nvidia-smi`."""

    def __init__(self, interval_s: float, query: Callable[[], str] = query) -> None:
        self._interval_s = interval_s
        self._query = query
        self._lock = threading.Lock()
        self._seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-monitor", daemon=True)

    def start(self) -> None:
        if shutil.which("nvidia-smi"):
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def take(self) -> dict[str, float]:
        """`gpu/*` metrics: mean utilisation and largest memory of each GPU that was sampled since the last call."""
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        metrics: dict[str, float] = {}
        for number, values in seen.items():
            metrics[f"gpu/{number}/util"] = sum(use for use, _ in values) / len(values)
            metrics[f"gpu/{number}/mem_gb"] = max(memory for _, memory in values)
        return metrics

    def sample(self) -> None:
        found = list(readings(self._query()))
        with self._lock:
            for number, use, memory in found:
                self._seen[number].append((use, memory))

    def _watch(self) -> None:
        silent = False
        while not self._stop.is_set():
            try:
                self.sample()
                silent = False
            except (OSError, subprocess.SubprocessError) as error:
                if not silent:
                    log.warning("no gpu/* metrics: nvidia-smi failed (%s)", error)
                silent = True
            self._stop.wait(self._interval_s)
