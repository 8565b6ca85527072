"""Processes of benchmarks, which end with them, and what they use.

CPU seconds: a busy machine stretches the time on the clock far more than these.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from headrace.base.parent import die_with_parent
from headrace.run.journal import read_journal

TIMEOUT_S = 900

# What the command line of a process of a run contains, and what it is called; the first that fits.
_NAMES = {
    "EngineCore": "engine",
    "agents_programs": "programs",
    "end_to_end_rewards": "environment",
    "light_replica": "replica",
    "valkey-server": "buffer",
    "scoring_worker": "hub",
    " replay ": "scorer",
    " reward ": "hub",
    " rollout ": "replica",
    " trainer ": "trainer",
    " up ": "up",
}
PROCESSES = ("trainer", "engine", "replica", "scorer", "hub", "environment", "buffer", "up")
_POLL_S = 0.05


def run(command: list[str], environment: dict[str, str]) -> str:
    """Its standard output. Raises `SystemExit` with its last words if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{command} took more than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise SystemExit(f"{command} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[None]:
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    try:
        yield
    finally:
        child.terminate()
        child.wait(timeout=30)


def seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


def of_run(use: Callable[[psutil.Process], float] = seconds) -> dict[str, float]:
    """What all processes below this one use, by what they do in a run."""
    spent = defaultdict[str, float](float)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            spent[_name(process)] += use(process)
    return spent


def _name(process: psutil.Process) -> str:
    line = " ".join([process.name(), *process.cmdline(), ""])
    return next((name for part, name in _NAMES.items() if part in line), "other")


class Meter(threading.Thread):
    """Looks at a run's processes, which are below this one, whenever its journal has another step, from `first` to `last` of them."""

    def __init__(self, journal: Path, first: int, last: int) -> None:
        super().__init__(daemon=True)
        self._journal, self._first, self._last = journal, first, last
        self._over = threading.Event()
        self._looks: list[tuple[int, dict[str, float]]] = []

    def run(self) -> None:
        while not self._over.wait(_POLL_S):
            steps = sum(line.kind == "train" for line in read_journal(self._journal))
            if self._first <= steps <= self._last and (not self._looks or steps > self._looks[-1][0]):
                self._looks.append((steps, of_run()))

    def a_step(self) -> dict[str, float]:
        """CPU seconds of a step, by process, between the first look and the last."""
        self._over.set()
        self.join()
        (start, before), (end, after) = self._looks[0], self._looks[-1]
        return {name: (after[name] - before.get(name, 0.0)) / (end - start) for name in after}
