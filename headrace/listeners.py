"""Finds the process that listens on a port of this machine, and the run whose service it is."""

from __future__ import annotations

from pathlib import Path

import psutil


def listener(port: int) -> psutil.Process | None:
    """Return the process that listens on `port`; None if this user can see none."""
    found = psutil.net_connections("tcp")
    listening = (c for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port)
    pid = next((c.pid for c in listening if c.pid), None)
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return None


def saved_config(process: psutil.Process) -> Path | None:
    """Return the configuration of the run if `process`, or one of its parents, is a service of it; None for any other process."""
    try:
        for each in (process, *process.parents()):
            words = each.cmdline()
            if "--config" in words[:-1]:
                given = Path(words[words.index("--config") + 1])
                return given if given.is_absolute() else each.cwd() / given
    except psutil.Error:  # it has ended meanwhile, or belongs to another user
        pass
    return None
