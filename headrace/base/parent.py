"""What a process has of the one that started it: its end, and the ports that are reserved for it. Imports next to nothing, for processes
that only begin another."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

# The variable that lists the descriptors of the sockets which reserve a service's ports.
RESERVED = "_HEADRACE_RESERVED"


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Make the kernel (Linux) send `signum` to this process when the thread that started it ends, even by SIGKILL.

    Call it first in a child process, so that a killed supervisor leaves no orphans.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signum)


def reservations() -> list[int]:
    """Return the descriptors of the sockets that reserve ports for this process."""
    return [int(descriptor) for descriptor in os.environ.get(RESERVED, "").split()]


def admit(listeners: bool, port: int | None = None) -> None:
    """Set whether another socket can listen on `port`, or on any, if it is reserved for this process. Does nothing to other ports."""
    for descriptor in reservations():
        # a process that this one started knows the descriptors, and doesn't have them
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if port in (None, sock.getsockname()[1]):
                # the kernel compares the options of both sockets when the second one is bound
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, listeners)
