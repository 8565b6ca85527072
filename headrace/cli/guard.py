"""A small process that outlives the supervisor by a moment: when the supervisor dies, even by SIGKILL, it ends what was left behind.

The supervisor writes `+PGID` and `-PGID` lines to its standard input; the pipe closes when the supervisor ends, whatever ended
it. Every service is the leader of a process group of its own, so that grandchildren (engine processes, torchrun ranks, the
embedded server) are reached as well. The kernel's parent-death signal reaches children only, and no process that isn't ours.
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
        return  # the last of the group left in between


def end_groups(groups: Iterable[int], grace_s: float) -> None:
    """SIGTERM to every process of these groups; SIGKILL to those still there after `grace_s`."""
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
        signal.signal(signum, signal.SIG_IGN)  # it ends with the supervisor, and by nothing else
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
