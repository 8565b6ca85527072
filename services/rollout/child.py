"""What the engine's child processes do for the rollout process that started them: not outlive it, and say why they failed.

vLLM calls entry points in every process it starts: `vllm.platform_plugins` while it is imported, before it waits for anything,
and `vllm.general_plugins` once logging is set up and before a model is loaded. They act only where the rollout service asked
for it through the environment, so other users of vLLM in the same installation notice nothing.
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
REPORT = "ROLLOUT_ENGINE_REPORT"  # file that takes the errors of child processes, one a line


def follow_parent() -> None:
    """Platform plugin: in a child of the service, arrange for its end with its parent. Returns None, which is no platform."""
    # not multiprocessing.parent_process(): vLLM is imported before that is set
    parent = int(os.environ.get(PARENT, os.getpid()))
    if parent == os.getpid() or (os.getppid() != parent and not _ended(parent)):
        return  # the service itself, or a program that one of its children started and looks after
    # SIGKILL: vLLM's handler of SIGTERM waits for a busy loop that nobody feeds any more
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that call, and sends no signal
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())  # whose children will look for it


def _ended(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def attend() -> None:
    """General plugin: `follow_parent`, for a vLLM that was told its platform and asked no plugin; and report failures."""
    follow_parent()
    if REPORT in os.environ and multiprocessing.parent_process() is not None:
        logging.getLogger("vllm").addHandler(_Reporter(Path(os.environ[REPORT])))


class _Reporter(logging.Handler):
    """Appends the exception of each logged failure to the report: vLLM's own error to its parent leaves the reason out."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            with self.path.open("a") as report:
                report.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
