"""The environment variables that torch's NCCL groups read.

They are set before the process makes its first group, and for all groups: torch reads some of them once in a process, from its own threads,
and a thread that reads the environment while another one adds to it can fail.
"""

from __future__ import annotations

import os

_CONNECT_S = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_TORCHS_CONNECT_S = 1800.0


def prepare_environment(timeout_s: float) -> None:
    """Set the variables for a run with this `weight_channel.timeout_s`; those that are already set stay unchanged."""
    for name, value in {
        # After a failed collective in any group, the thread that watches the process's first group would write a report, and end the
        # process 8 minutes later. A failed refit would do this in a trainer of several ranks and in every worker of vLLM.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        # The failed group's own thread waits four times as long for that report, and the end of the group waits for that thread.
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        _CONNECT_S: str(max(1, round(timeout_s))),
        # torch's own defaults, set here so that a group of the weight channel, which differs in them, adds nothing to the environment
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }.items():
        os.environ.setdefault(name, value)


def connect_timeout_s() -> float:
    """Return the seconds that a call of a non-blocking group waits for its peers to connect, and that an abort of the group waits for that
    call."""
    return float(os.environ.get(_CONNECT_S) or _TORCHS_CONNECT_S)


def may_be_nonblocking() -> bool:
    """Whether a group may return from its calls before NCCL has done them: unless torch's own switch forbids it."""
    return os.environ.get("TORCH_NCCL_USE_COMM_NONBLOCKING") != "0"
