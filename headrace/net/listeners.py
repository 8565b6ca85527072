"""Finds the process that listens on a port of this machine, and the run whose service it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from headrace.base.errors import HeadraceError

# The services that hide themselves from other processes of their user.
_HIDDEN = ("reward", "agents")


def listener(port: int) -> psutil.Process | None:
    """Return the process that listens on `port`; None if this user can see none."""
    found = psutil.net_connections("tcp")
    listening = [c for c in found if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
    pid = next((c.pid for c in listening if c.pid), None)
    try:
        return psutil.Process(pid) if pid is not None else _hidden_listener(port) if listening else None
    except psutil.NoSuchProcess:  # it has ended meanwhile
        return None


def saved_config(process: psutil.Process) -> Path | None:
    """Return the configuration of the run if `process`, or one of its parents, is a service of it; None for any other process."""
    try:
        for each in (process, *process.parents()):
            if given := _find_config(each):
                return given
    except psutil.Error:  # it has ended meanwhile, or belongs to another user
        pass
    return None


def _find_config(process: psutil.Process) -> Path | None:
    """The file that follows `--config` on its command line. Raises `psutil.Error`."""
    words = process.cmdline()
    if "--config" not in words[:-1]:
        return None
    given = Path(words[words.index("--config") + 1])
    return given if given.is_absolute() else _directory(process) / given


def _directory(process: psutil.Process) -> Path:
    """Its working directory; where that is hidden, the nearest that its parents show: it was started there. Raises `psutil.Error`."""
    for each in (process, *process.parents()):
        with contextlib.suppress(psutil.AccessDenied):
            return Path(each.cwd())
    raise psutil.AccessDenied(process.pid)


def _hidden_listener(port: int) -> psutil.Process | None:
    """The service of this user whose configuration gives it `port`, among those whose sockets no other process can look up
    (`headrace.net.service.hide_from_user`)."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "--config" not in words or process.uids().real != os.getuid():
                continue
            option = words.index("--config")
            service = next((each for each in _HIDDEN if each in words[:option]), None)
            given = None if service is None else _find_config(process)
            if service is not None and given is not None and port in _ports(given, words[option + 2 :], service):
                return process
    return None


def _ports(file: Path, overrides: Sequence[str], service: str) -> set[int]:
    """The ports that a configuration gives a service; none if it can't be read."""
    from headrace.config.loading import load  # it costs time, and is needed here alone

    try:
        section = getattr(load(file, overrides), service)
    except (HeadraceError, OSError):
        return set()
    return {section.port, section.http_port}
