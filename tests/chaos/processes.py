"""The processes of a chaos run: started on machines of their own, started again when they end, and reached by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RESTART_S = 0.3
_WORDS = 8000  # bytes of what a process said at its end: a table and what follows it among them


@dataclasses.dataclass(frozen=True)
class Exit:
    """A process ended before the run did. `by_us`: it got a SIGKILL. `last_words`: what it said at the end."""

    time: float
    name: str
    code: int
    by_us: bool
    last_words: str


class Victim:
    """What a fault can strike. It is the leader of a session, which its own children belong to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exits: list[Exit] = []
        self.may_start = asyncio.Event()  # unset: stays away once it has ended
        self.may_start.set()

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL to the leader alone: what it started has to notice by itself."""
        if self.pid is not None:
            _signal(self.pid, signal.SIGKILL, whole=False)

    def kill_child(self, word: str) -> None:
        """SIGKILL to a child whose command line holds `word`; the service is expected to end of it."""
        child = child_named(self.pid, word) if self.pid is not None else None
        if child is None:
            raise RuntimeError(f"{self.name} has no child named {word}")
        os.kill(child, signal.SIGKILL)

    def freeze(self, *, whole: bool = True) -> None:
        if self.pid is not None:
            _signal(self.pid, signal.SIGSTOP, whole)

    def thaw(self, *, whole: bool = True) -> None:
        if self.pid is not None:
            _signal(self.pid, signal.SIGCONT, whole)


class Supervised(Victim):
    """A service that `headrace up` runs, starts again and stops: a child of it, known by the log that it writes to."""

    def __init__(self, name: str, supervisor: Process, log: Path) -> None:
        super().__init__(name)
        self._supervisor = supervisor
        self._log = log
        self._frozen: int | None = None

    @property
    def pid(self) -> int | None:
        above = self._supervisor.pid
        return next((pid for pid in children_of(above) if _output_of(pid) == str(self._log)), None) if above else None

    def freeze(self, *, whole: bool = True) -> None:
        self._frozen = self.pid
        super().freeze(whole=whole)

    def thaw(self, *, whole: bool = True) -> None:
        """Its supervisor may have been killed meanwhile."""
        if self._frozen is not None:
            _signal(self._frozen, signal.SIGCONT, whole)
        self._frozen = None


class Process(Victim):
    """One service, started by this driver."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        super().__init__(name)
        self.argv = list(argv)
        self.environ = dict(environ)
        self.log = log
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
            _signal(self._process.pid, signal.SIGKILL)  # what it left behind
            words = self.log.read_bytes()[start:][-_WORDS:].decode(errors="replace").strip()
            if not self._done:
                self.exits.append(Exit(time.time(), self.name, code, self._killed, words))
            self._killed = False
            if ends and code == 0:
                return
            await asyncio.sleep(RESTART_S)

    def kill(self) -> None:
        self._killed = self._killed or self.pid is not None
        super().kill()

    def terminate(self) -> None:
        """SIGTERM to the leader: it is asked to stop what it started."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGTERM)

    async def end(self, grace_s: float = 15.0) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self._done = True
        if self._process is None or self.pid is None:
            return
        self.thaw()
        _signal(self.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            _signal(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def _signal(pid: int, signum: int, whole: bool = True) -> None:
    """`whole`: to its process group."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if whole else os.kill)(pid, signum)


def child_named(parent: int, word: str) -> int | None:
    """A child of `parent` whose command line holds `word`."""
    for child in children_of(parent):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if word in Path(f"/proc/{child}/cmdline").read_text():
                return child
    return None


def children_of(parent: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in listed.read_text().split()]
    return found


def _output_of(pid: int) -> str:
    """What a process writes to."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    return ""
