"""The environment variables that torch's NCCL groups read.

They are set before the process makes its first group, and for all groups: torch reads some of them once in a process, from its own threads,
and a thread that reads the environment while another one adds to it can fail.
"""

from __future__ import annotations

import os


def prepare_environment(connect_s: float) -> None:
    """Set the variables for a run whose groups of the weight channel may take so long to connect; those that are already set stay
    unchanged."""
    for name, value in {
        # After a failed collective in any group, the thread that watches the process's first group would write a report, and end the
        # process 8 minutes later. A failed refit would do this in a trainer of several ranks and in every worker of vLLM.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # The failed group's own thread waits four times as long for that report, and the end of the group waits for that thread.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(max(1, round(connect_s))),
        # torch's own defaults, set here so that a group of the weight channel, which differs in them, adds nothing to the environment
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }.items():
        os.environ.setdefault(name, value)


def may_be_nonblocking() -> bool:
    """Whether a group may return from its calls before NCCL has done them: unless torch's own switch forbids it."""
    return os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") != "0"
