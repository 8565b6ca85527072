"""Makes the engine's child processes end with the rollout process that started them, and report why they failed.

In a process with its own interpreter, vLLM calls entry points: `vllm.platform_plugins` during its import, before it waits for anything,
and `vllm.general_plugins` once logging is set up and before a model is loaded. In a forked process, Python calls
`prepare_forked_process`. All of them act only if the rollout service has set its environment variables, so they don't affect other uses of
vLLM in the same installation.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import select
import signal
import sys
import uuid
from functools import partial
from pathlib import Path

from headrace.base import scratch
from headrace.base.parent import die_with_parent

PLUGIN = "headrace_rollout"  # its name in pyproject.toml
GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
PARENT = "ROLLOUT_ENGINE_PARENT"  # process id of the parent that a child must not outlive
REPORT = "ROLLOUT_ENGINE_REPORT"  # file for the errors of child processes, one per line
# the loggers of failures in an engine's core, and in a worker of an engine that has several
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")


def end_with_parent() -> None:
    """Make a child of the service end with its parent. A platform plugin, which returns None because it adds no platform."""
    # not multiprocessing.parent_process(): vLLM is imported before that is set
    parent = int(os.environ.get(PARENT, os.getpid()))
    if parent == os.getpid() or (os.getppid() != parent and not _has_ended(parent)):
        return  # the service itself, or a program that one of its children started and manages
    # SIGKILL: vLLM's handler for SIGTERM waits for a busy loop that gets no more input
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before that call, so no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT] = str(os.getpid())  # the parent of this process's own children


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie has."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


def prepare_engine_process() -> None:
    """Report failures, and call `end_with_parent` again in case vLLM's platform was set explicitly and it called no platform plugin. A
    general plugin."""
    end_with_parent()
    if REPORT in os.environ and multiprocessing.parent_process() is not None:
        _end_quickly()
        _report_failures()
        if "vllm" in sys.modules:
            note_shared_memory()


def prepare_forked_process() -> None:
    """Do what both plugins do, right after the fork."""
    if os.environ.get(PARENT) == str(os.getppid()):
        end_with_parent()
        _end_quickly()
        _report_failures()


def _end_quickly() -> None:
    """As an engine shuts down, vLLM unfreezes all objects and searches them for garbage, twice: more than a second of a core, for what the
    end of the process frees. Nothing else unfreezes."""
    gc.unfreeze = lambda: None


def note_shared_memory() -> None:
    """Have vLLM put the file in which an engine's workers meet into the service's folder, and note its name there. The shared memory of
    workers on a CPU has that name, and vLLM leaves it behind."""
    from vllm.v1.executor import multiproc_executor

    folder = Path(os.environ[REPORT]).parent

    def meet() -> str:
        name = f"vllm_dist_{uuid.uuid4().hex}"
        scratch.note_shared_memory(folder, name)
        return f"file://{folder / name}"

    multiproc_executor.get_file_store_init_method = meet


def _report_failures() -> None:
    for name in _LOGGERS:
        # a filter, not a handler: vLLM sets up logging again in a forked process, and removes handlers
        logging.getLogger(name).addFilter(partial(_report, Path(os.environ[REPORT])))


def _report(path: Path, record: logging.LogRecord) -> bool:
    """Append the exception of a logged failure to the report, because the error that vLLM passes to the parent lacks the reason."""
    if record.levelno >= logging.ERROR and record.exc_info and (error := record.exc_info[1]) is not None:
        with path.open("a") as report:
            report.write(" ".join(f"{type(error).__name__}: {error}".split()) + "\n")
    return True
