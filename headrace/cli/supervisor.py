"""Services as child processes: started, logged to files, restarted within bounds, and stopped without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headrace.cli import guard
from headrace.cli.lifecycle import Decision, Finished, GiveUp, Restart, RestartPolicy
from headrace.errors import ServiceError
from headrace.service import die_with_parent

LAST_WORDS = 15


class ServiceFailed(ServiceError):
    """A service can't go on; the message carries its last words."""


@dataclasses.dataclass
class Child:
    """A service under supervision. `state` is what people see."""

    name: str
    argv: Sequence[str]
    log: Path
    ends_run: bool = False
    was_ready: bool = False
    state: str = "not started"
    pid: int | None = None
    restarts: list[float] = dataclasses.field(default_factory=list)
    log_start: int = 0  # where in the log the current process began

    def mark(self, ready: bool, otherwise: str) -> None:
        """Show a running service as ready, or as what it is `otherwise`."""
        if self.pid is not None:
            self.was_ready = self.was_ready or ready
            self.state = "ready" if ready else otherwise

    def last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LAST_WORDS:] if line.strip())


class Supervisor:
    """Keeps children running. Each is the leader of a session of its own, so that its own children are found again.

    `tell` is called with one line for each event that a person wants to know of.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        tell: Callable[[str], None],
        policy: RestartPolicy | None = None,
        grace_s: float = 20.0,
    ) -> None:
        self.environ = dict(environ)
        self.tell = tell
        self.policy = policy or RestartPolicy()
        self.grace_s = grace_s  # between SIGTERM and SIGKILL
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._guard = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    async def keep(self, child: Child) -> None:
        """Start `child` and start it again when it ends. Returns when its work is done; raises `ServiceFailed` if it can't go on."""
        while True:
            code = await self._run(child)
            match self._decide(child, code):
                case Finished():
                    child.state = "finished"
                    return
                case GiveUp(reason):
                    child.state = "failed"
                    raise ServiceFailed(
                        f"{child.name} can't go on: {reason}; the end of {child.log}:\n{child.last_words()}"
                    )
                case Restart() as again:
                    child.state = "restarting"
                    self.tell(f"{child.name}: {again.reason}; starting it again in {again.delay_s:.0f} s")
                    await asyncio.sleep(again.delay_s)
                    child.restarts.append(time.monotonic())

    def _decide(self, child: Child, code: int) -> Decision:
        return self.policy.decide(
            code, ends_run=child.ends_run, was_ready=child.was_ready, restarts=child.restarts, now=time.monotonic()
        )

    async def _run(self, child: Child) -> int:
        """One life of `child`; returns its exit code once its whole process group is gone."""
        child.log.parent.mkdir(parents=True, exist_ok=True)
        # nothing between here and `_ended` awaits: a cancelled task leaves no process behind that `stop` doesn't know
        with child.log.open("ab") as log:
            child.log_start = log.tell()
            process = subprocess.Popen(  # noqa: ASYNC220
                child.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environ,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._processes[child.name] = process
        child.pid, child.state = process.pid, "starting"
        self._tell_guard("+", process.pid)
        code = await _ended(process)
        await self._sweep(child.name, process.pid)
        child.pid = None
        return code

    async def _sweep(self, name: str, group: int) -> None:
        """The leader is gone: end what is left of its group, with a moment for the embedded server to write its files."""
        await asyncio.to_thread(guard.end_groups, [group], min(5.0, self.grace_s))
        self._tell_guard("-", group)
        self._processes.pop(name, None)

    async def stop(self, children: Iterable[Child]) -> None:
        """SIGTERM to these, together; what is left of them after the grace is killed."""
        running = [(child, self._processes[child.name]) for child in children if child.name in self._processes]

        async def end(child: Child, process: subprocess.Popen[bytes]) -> None:
            process.terminate()
            try:
                await asyncio.wait_for(_ended(process), self.grace_s)
            except TimeoutError:
                self.tell(f"{child.name}: still running {self.grace_s:.0f} s after SIGTERM; killed")
                guard.signal_group(process.pid, signal.SIGKILL)
                await _ended(process)
            await self._sweep(child.name, process.pid)
            child.pid, child.state = None, "stopped"

        await asyncio.gather(*(end(child, process) for child, process in running))

    def kill(self) -> None:
        """SIGKILL to everything, at once."""
        for process in self._processes.values():
            guard.signal_group(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Every child has been stopped; the guard ends."""
        with contextlib.suppress(BrokenPipeError):  # a guard that was killed has nothing left to do
            self._guard.communicate()

    def _tell_guard(self, sign: str, group: int) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"{sign}{group}\n")
            self._guard.stdin.flush()
        except BrokenPipeError:
            if sign == "+":
                guard.signal_group(group, signal.SIGKILL)
                raise ServiceError(
                    "the guard process was killed; without it services could outlive the supervisor"
                ) from None


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process to end, and reap it; returns its exit code. Several may wait."""
    if process.returncode is None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, _settle, ended)
        try:
            await ended
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return process.wait()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What services inherit: everything (HF_TOKEN, HF_HOME, …) but HEADRACE_*, which is resolved into the run's configuration and
    would otherwise outrank the command line that it was resolved with."""
    kept = {name: value for name, value in environ.items() if not name.upper().startswith("HEADRACE_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}
