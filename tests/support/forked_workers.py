"""The hub's own processes and the environments of its tests, forked from one that has imported what they do: else each takes up to a
second of a core to start."""

from __future__ import annotations

import asyncio
import os
import runpy
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.forks import Forked, fork

# by the module that is run, the kind of fork that has its imports
_KINDS = {
    "headrace_services.reward.scoring_worker": "scorer",
    "headrace_services.reward.function_process": "scorer",
    "headrace_services.reward.model_process": "trainer",
}
_FILES = {Path(__file__).with_name(f"odd_{name}.py") for name in ("environment", "program")}
_PIPE = asyncio.subprocess.PIPE
_execute = asyncio.create_subprocess_exec


class _Process:
    """A forked process, with what its users take of `asyncio.subprocess.Process`."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        self.pid, self.send_signal, self.kill, self.terminate = (
            forked.pid, forked.send_signal, forked.kill, forked.terminate,
        )  # fmt: skip

    @property
    def returncode(self) -> int | None:
        return self._forked.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._forked.wait)

    async def communicate(self) -> tuple[None, bytes]:
        said = await self.stderr.read()
        await self.wait()
        return None, said


async def create_subprocess_exec(*argv: Any, env: Mapping[str, str] | None = None, **options: Any) -> Any:
    """In place of asyncio's, which starts all other processes."""
    _, *arguments = map(str, argv)
    environ = dict(env or os.environ)
    if arguments[:2] == ["-P", "-m"] and arguments[2] in _KINDS:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _Process(fork(_live, arguments[2], environ, talk=theirs, kind=_KINDS[arguments[2]]))
        process.stdout, process.stdin = await asyncio.open_connection(sock=ours, limit=2**24)
        return process
    if Path(arguments[0]) not in _FILES or options not in ({}, {"stderr": _PIPE}):
        return await _execute(*argv, env=env, **options)
    if not options:
        return _Process(fork(_run, arguments, environ, kind="scorer", streams=(0, 1, 2)))
    ours, theirs = socket.socketpair()
    with theirs:
        process = _Process(fork(_run, arguments, environ, kind="scorer", streams=(0, 1, theirs.fileno())))
    process.stderr, process.stdin = await asyncio.open_connection(sock=ours)  # one closes with the other
    return process


def _live(module: str, environ: Mapping[str, str]) -> None:
    _set(environ)
    import_module(module).main()


def _run(argv: list[str], environ: Mapping[str, str]) -> None:
    _set(environ)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _set(environ: Mapping[str, str]) -> None:
    """The variables that the process shall have, and no others of the tests'."""
    os.environ.clear()
    os.environ.update(environ)
