"""A small process that outlives the supervisor: when the supervisor dies, even by SIGKILL, it ends the services left behind.

The supervisor writes `+PGID` and `-PGID` lines to the guard's standard input; the pipe closes when the supervisor ends, for whatever
reason. Every service leads its own process group. So the guard reaches grandchildren too (engine processes, torchrun ranks, the embedded
server), while the kernel's parent-death signal reaches direct children only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return  # the group is gone


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """Send SIGTERM to every process of these groups, and SIGKILL to those still alive after `grace_s`."""
    left = {group for group in groups if alive(group)}
    for group in left:
        signal_group(group, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if alive(group)}
    for group in left:
        signal_group(group, signal.SIGKILL)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the guard ends only when the supervisor does
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    end_groups(groups, grace_s=float(sys.argv[1]))


if __name__ == "__main__":
    main()
