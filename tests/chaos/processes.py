"""The processes of a chaos run: started on machines of their own, started again when they end, and reached by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

RESTART_S = 0.3


@dataclasses.dataclass(frozen=True)
class Exit:
    """A process ended before the run did. `by_us`: it got a SIGKILL. `last_words`: what it said at the end."""

    time: float
    name: str
    code: int
    by_us: bool
    last_words: str


class Process:
    """One service. It is the leader of a session, which its own children belong to."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.environ = dict(environ)
        self.log = log
        self.exits: list[Exit] = []
        self.may_start = asyncio.Event()  # unset: stays away once it has ended
        self.may_start.set()
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._done = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def keep(self, *, ends: bool = False) -> None:
        """Start it, and again whenever it ends. `ends`: exit code 0 is the end of its work."""
        while not self._done:
            await self.may_start.wait()
            with self.log.open("ab") as log:
                start = log.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environ,
                    start_new_session=True,
                )
            code = await self._process.wait()
            _signal_group(self._process.pid, signal.SIGKILL)  # what it left behind
            words = self.log.read_bytes()[start:][-2000:].decode(errors="replace").strip()
            if not self._done:
                self.exits.append(Exit(time.time(), self.name, code, self._killed, words))
            self._killed = False
            if ends and code == 0:
                return
            await asyncio.sleep(RESTART_S)

    def kill(self) -> None:
        """SIGKILL to the leader alone: what it started has to notice by itself."""
        if self.pid is not None:
            self._killed = True
            os.kill(self.pid, signal.SIGKILL)

    def kill_child(self, *words: str) -> None:
        """SIGKILL to a child whose command line holds one of `words`; the service is expected to end of it."""
        child = child_named(self.pid, *words) if self.pid is not None else None
        if child is None:
            raise RuntimeError(f"{self.name} has no child named {words}")
        os.kill(child, signal.SIGKILL)

    def freeze(self, *, whole: bool = True) -> None:
        self._signal(signal.SIGSTOP, whole)

    def thaw(self, *, whole: bool = True) -> None:
        self._signal(signal.SIGCONT, whole)

    def _signal(self, signum: int, whole: bool) -> None:
        if self.pid is None:
            return
        if whole:
            _signal_group(self.pid, signum)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    async def end(self, grace_s: float = 15.0) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self._done = True
        if self._process is None or self.pid is None:
            return
        self.thaw()
        _signal_group(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            _signal_group(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def _signal_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signum)


async def until(condition: Callable[[], object], every_s: float = 0.05) -> None:
    """Return once `condition` holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(every_s)


def child_named(parent: int, *words: str) -> int | None:
    """A child of `parent` whose command line holds one of `words`."""
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        for child in listed.read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{child}/cmdline").read_text()
                if any(word in command for word in words):
                    return int(child)
    return None
