"""vLLM plugins for the engine's child processes: they end with the rollout process that started them, and report why they failed.

vLLM calls entry points in every process it starts: `vllm.platform_plugins` while it is imported, before it waits for anything,
and `vllm.general_plugins` once logging is set up and before a model is loaded. They act only if the rollout service has set its
environment variables, so they don't affect other uses of vLLM in the same installation.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
from pathlib import Path

from headrace.service import die_with_parent

PLUGIN = "headrace_rollout"  # its name in pyproject.toml
GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
PARENT = "ROLLOUT_ENGINE_PARENT"  # process id of the parent that a child must not outlive
REPORT = "ROLLOUT_ENGINE_REPORT"  # file for the errors of child processes, one per line


def end_with_parent() -> None:
    """Platform plugin: make a child of the service end with its parent. Returns None: it adds no platform."""
    # not multiprocessing.parent_process(): vLLM is imported before that is set
    parent = int(os.environ.get(PARENT, os.getpid()))
    if parent == os.getpid() or (os.getppid() != parent and not _ended(parent)):
        return  # the service itself, or a program that one of its children started and manages
    # SIGKILL: vLLM's handler of SIGTERM waits for a busy loop that gets no more input
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that call, so no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())  # the parent of this process's own children


def _ended(pid: int) -> bool:
    """Whether a process has ended, including one that is not yet reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def prepare_engine_process() -> None:
    """General plugin: `end_with_parent`, in case vLLM was told its platform and called no platform plugin; and report failures."""
    end_with_parent()
    if REPORT in os.environ and multiprocessing.parent_process() is not None:
        logging.getLogger("vllm").addHandler(_Reporter(Path(os.environ[REPORT])))


class _Reporter(logging.Handler):
    """Appends the exception of each logged failure to the report: the error that vLLM passes to the parent lacks the reason."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            with self.path.open("a") as report:
                report.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
