"""How busy the GPUs of the trainer's machine are, as `nvidia-smi` tells it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

QUERY = "index,utilization.gpu,memory.used"
ANSWER_S = 10.0


def ask() -> str:
    """One line a GPU. Raises `OSError` or `subprocess.SubprocessError`."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_S).stdout


def readings(text: str) -> Iterator[tuple[str, float, float]]:
    """(number, use in percent, memory in GiB) of each GPU; what a GPU does not support is left out with it."""
    for line in text.splitlines():
        number, *values = (part.strip() for part in line.split(","))
        if len(values) == 2 and all(value.isdecimal() for value in values):
            yield number, float(values[0]), float(values[1]) / 1024


class GPUMonitor:
    """Looks every `interval_s` seconds on a thread of its own. Without `nvidia-smi` there is nothing to look at."""

    def __init__(self, interval_s: float, ask: Callable[[], str] = ask) -> None:
        self._interval_s = interval_s
        self._ask = ask
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
        """Mean use and largest memory of each GPU since the last call; none that was not looked at since."""
        with self._lock:
            seen, self._seen = self._seen, defaultdict(list)
        metrics: dict[str, float] = {}
        for number, values in seen.items():
            metrics[f"gpu/{number}/util"] = sum(use for use, _ in values) / len(values)
            metrics[f"gpu/{number}/mem_gb"] = max(memory for _, memory in values)
        return metrics

    def look(self) -> None:
        found = list(readings(self._ask()))
        with self._lock:
            for number, use, memory in found:
                self._seen[number].append((use, memory))

    def _watch(self) -> None:
        silent = False
        while not self._stop.is_set():
            try:
                self.look()
                silent = False
            except (OSError, subprocess.SubprocessError) as error:
                if not silent:
                    log.warning("the GPUs' use is not known: nvidia-smi gives no answer (%s)", error)
                silent = True
            self._stop.wait(self._interval_s)
