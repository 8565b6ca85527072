"""Processes that a test starts, and those that it waits for by their id, without sleeping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support.forks import FORKED_AS

# Before a command: it runs as a user without privileges does, though root runs the tests. Root may look into every process.
UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


@contextlib.asynccontextmanager
async def started(*argv: object, **pipes: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended by SIGKILL if the test did not end it."""
    process = await asyncio.create_subprocess_exec(*map(str, argv), **pipes)  # type: ignore[arg-type]
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Whether process `pid` ends within this time (a process that is no more has ended)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)


def is_running(pid: int) -> bool:
    """Whether process `pid` is neither gone nor a zombie that nobody has buried yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether process `pid` is stopped, as by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def descendants(pid: int) -> dict[int, str]:
    """Processes that `pid` started, and those that they started: command lines by id. One that is forked in the place of another has that
    one's."""
    parents: dict[int, int] = {}
    forked: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            name, _, numbers = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            command = (entry / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        parents[int(entry.name)], commands[int(entry.name)] = int(numbers.split()[1]), command
        if name.startswith(FORKED_AS):
            forked[int(entry.name)] = int(name.removeprefix(FORKED_AS))
    forked = {pid: own for pid, own in forked.items() if own in commands}
    parents |= {own: pid for pid, own in forked.items()}
    commands |= {own: commands[pid] for pid, own in forked.items()}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found - {pid} - forked.keys()}
