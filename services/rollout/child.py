"""What the engine's child processes do for the rollout process that started them: not outlive it, and say why they failed.

vLLM calls entry points in every process it starts: `vllm.platform_plugins` while it is imported, before it waits for anything,
and `vllm.general_plugins` once logging is set up and before a model is loaded. They act only where the rollout service asked
for it through the environment, so other users of vLLM in the same installation notice nothing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from pathlib import Path

from headrace.service import die_with_parent

PLUGIN = "headrace_rollout"  # its name in pyproject.toml
GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
REPORT = "ROLLOUT_ENGINE_REPORT"  # file that takes the errors of child processes, one a line


def follow_parent() -> None:
    """Platform plugin: in a child of the service, arrange for its end with its parent. Returns None, which is no platform."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or REPORT not in os.environ:
        return
    # SIGKILL: vLLM's handler of SIGTERM waits for a busy loop that nobody feeds any more
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent.pid:  # it was gone before that call, and sends no signal
        os.kill(os.getpid(), signal.SIGKILL)


def attend() -> None:
    """General plugin: `follow_parent`, for a vLLM that was told its platform and asked no plugin; and report failures."""
    follow_parent()
    if multiprocessing.parent_process() is not None and REPORT in os.environ:
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
