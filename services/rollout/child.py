"""What the engine's child processes do for the rollout process that started them: not outlive it, and say why they failed.

vLLM loads `vllm.general_plugins` entry points in every process it starts, before a model is loaded; `attend` is one. It acts
only where the rollout service asked for it through the environment, so other users of vLLM in the same installation notice nothing.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from headrace.service import die_with_parent

PLUGINS, PLUGIN = "vllm.general_plugins", "headrace_rollout"  # as in pyproject.toml
PARENT = "ROLLOUT_ENGINE_PARENT"  # process id of the rollout service
REPORT = "ROLLOUT_ENGINE_REPORT"  # file that takes the errors of child processes, one a line


def attend() -> None:
    """Entry point: called by vLLM in the rollout process itself (nothing to do there), the engine core and every worker."""
    parent = os.environ.get(PARENT)
    if parent is None or os.getpid() == int(parent):
        return
    ancestor = os.getppid()
    # SIGKILL: vLLM's handler of SIGTERM waits for a busy loop that nobody feeds any more
    die_with_parent(signal.SIGKILL)
    # a parent that was gone before that call sends no signal: whoever adopted this process is not it. In a container the
    # service itself is process 1
    if (ancestor == 1 and int(parent) != 1) or os.getppid() != ancestor:
        os.kill(os.getpid(), signal.SIGKILL)
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
