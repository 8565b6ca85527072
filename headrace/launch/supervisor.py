"""Runs services as child processes: logs them to files, restarts them within limits, and stops them without leaving any behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.addresses import without_proxy
from headrace.base.backoff import pause_after
from headrace.base.errors import ReplayDenied, ServiceError, StoppedByAlarm
from headrace.base.files import signature
from headrace.base.parent import die_with_parent
from headrace.base.repeats import Repeats
from headrace.launch import guard
from headrace.launch.summary import NOT_STARTED
from headrace.net.service import (
    ENDING,
    EXIT_ALARM,
    EXIT_BUFFER_UNAVAILABLE,
    EXIT_INTERNAL_ERROR,
    EXIT_USER_ERROR,
    Ending,
    pass_sockets,
    reserve_again,
)

LOG_TAIL_LINES = 15
# A log that has grown to this size is moved to NAME.log.1, replacing an older one.
LOG_BYTES = 64 * 1024**2
_LOOK_AT_LOGS_S = 5.0


class ServiceFailed(ServiceError):
    """Raised when a service can't continue; the message includes the end of its log."""


# What a restarted service may wait for, with a place for its name.
BUFFER, START = "the buffer's server, for {}", "the start of {}"


@dataclasses.dataclass(frozen=True)
class Restart:
    """`waits`: for which of these the service waits, so that its end was no crash; empty after a crash."""

    delay_s: float
    reason: str
    waits: str = ""


@dataclasses.dataclass(frozen=True)
class GiveUp:
    reason: str


@dataclasses.dataclass(frozen=True)
class Finished:
    """The service's work is done, and with it the run."""


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """Decides what to do when a service exits: at most `limit` restarts in a row without progress between them, with exponential
    backoff. The same exception at the same place twice in a row is no crash that a restart heals: then there is no other.

    A limit per time window would be wrong in both directions. It would restart a service that takes minutes to start for ever, and give up
    one whose work progresses between its deaths.
    """

    limit: int = 10
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0

    def decide(
        self,
        exit_code: int,
        *,
        ends_run: bool,
        was_ready: bool,
        fruitless: int,
        waited: int = 0,
        was_let_in: bool = False,
        is_starting: bool = False,
        is_user_code: bool = False,
        ending: Ending | None = None,
        before: Ending | None = None,
    ) -> Restart | GiveUp | Finished:
        """Decide after an exit. `exit_code` is negative for a signal; `fruitless` is the number of restarts since the last progress, and
        `waited` that of those since then that waited. `is_starting`: the process had not been ready yet. `ending` is the exception that
        the process ended with, if it told one, and `before` that of the process before.

        There is no restart after `EXIT_USER_ERROR` or `EXIT_ALARM`, and none after a clean exit of a service that ends the run.

        A buffer that can't be reached is waited for without limit if the service was ready before: one that never existed won't come back.
        So is one that refuses the service (`ReplayDenied`), if it has let the service in before (`was_let_in`). If the service was ready
        before, a start that fails for something around it (`Ending.is_outage`) is waited for in the same way: the configuration, which is
        the same, can't be the reason. Nor can it be if the service could not even write its reason down.

        A user's environment has its own exit codes. One that ends before it was ready is for the user to fix. One that worked is restarted
        without limit, because the run waits for it.
        """
        if exit_code == 0 and ends_run:
            return Finished()
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        if exit_code not in (EXIT_USER_ERROR, EXIT_ALARM, EXIT_INTERNAL_ERROR, EXIT_BUFFER_UNAVAILABLE):
            ending = None  # a signal ended one of its ranks, and what the others then met is not the reason
        how = how if ending is None else str(ending)
        delay_s = pause_after(fruitless + 1, self.first_delay_s, self.longest_delay_s)
        if is_user_code and was_ready:
            return Restart(delay_s, how)
        if is_user_code and exit_code >= 0:
            return GiveUp(f"{how} before it answered")
        wait_s = pause_after(waited + 1, self.first_delay_s, self.longest_delay_s)
        is_denied = ending is not None and ending.error == ReplayDenied.__name__
        if is_denied or exit_code == EXIT_BUFFER_UNAVAILABLE:
            waits = was_let_in or (was_ready and not is_denied)
            return Restart(wait_s, how, BUFFER) if waits else GiveUp(how)
        if was_ready and was_let_in and is_starting:  # both: `was_ready` alone is set from the start where nobody asks
            if ending is not None and ending.is_outage:
                return Restart(wait_s, how, START)
            if ending is None and exit_code == EXIT_USER_ERROR:
                return Restart(
                    wait_s,
                    f"{how}, and no reason beside its log; free space there, or mend what the log ends with",
                    START,
                )
        if exit_code in (EXIT_USER_ERROR, EXIT_ALARM):
            return GiveUp(how)
        if fruitless and ending is not None and ending.repeats(before):
            return GiveUp(f"it ended twice in a row, without progress between, with {how}")
        if fruitless >= self.limit:
            return GiveUp(f"{how}, after {fruitless} restarts without progress")
        return Restart(delay_s, how)


@dataclasses.dataclass
class Child:
    """A service under supervision. `state` is what the display shows; `restarts` counts all restarts, `fruitless` those since the last
    progress. Output goes to `log`, or, if that is None, to the supervisor's output. `environ` replaces the supervisor's environment.
    `is_user_code` marks an environment, whose class is in `source`, if that is known."""

    name: str
    argv: Sequence[str]
    log: Path | None
    ends_run: bool = False
    environ: Mapping[str, str] | None = None
    is_user_code: bool = False
    source: Path | None = None
    source_signature: tuple[int, ...] | None = None  # of the `source` of the current process
    was_ready: bool = False
    was_let_in: bool = False  # by the buffer's server
    waits_for: str = ""  # `BUFFER` or `START`, once a restart had to wait, until the service works or crashes
    waits_why: str = ""
    waits_since: float = 0.0
    state: str = NOT_STARTED
    pid: int | None = None
    restarts: int = 0
    fruitless: int = 0
    waited: int = 0  # restarts, since it worked last
    ending: Ending | None = None  # of the last process
    is_starting: bool = True  # the current process was never ready
    answered: bool = False  # the current process, at least once
    silent_s: float = 0.0  # since its last answer
    reserved: Sequence[socket.socket] = ()  # for its ports
    log_start: int = 0  # where in the log the current process began

    def source_changed(self) -> bool:
        """Whether the current process runs an older `source` than the present one. Returns True once for each change."""
        now = None if self.source is None else signature(self.source)
        changed = self.pid is not None and now not in (None, self.source_signature)
        if changed:
            self.source_signature = now
        return changed

    def set_ready(self, ready: bool, otherwise: str) -> None:
        """Set the state of a running service to "ready", or to `otherwise`."""
        if self.pid is not None:
            self.was_ready = self.was_ready or ready
            self.state = "ready" if ready else otherwise
            if ready:
                self.is_starting = False
                self.note_let_in()

    def note_let_in(self) -> None:
        """Note that the current process uses the buffer's server, or is ready: it waits for nothing."""
        self.was_let_in = True
        self.waits_for, self.waited = "", 0

    def note_wait(self, waits: str, why: str) -> None:
        """Note that the last process ended because it had to wait."""
        self.waits_since = self.waits_since if self.waits_for == waits else time.monotonic()
        self.waits_for, self.waits_why = waits, why

    def keep_log_small(self, limit: int) -> None:
        """Move the log to `NAME.log.1` once it has `limit` bytes. The running process continues to write to the same file, from its
        start.

        Output between the copy and the truncation, a moment later, is lost: the process holds the file open, so the file can't be
        replaced.
        """
        if self.log is not None and self.log.exists() and self.log.stat().st_size >= limit:
            older = self.log.with_name(self.log.name + ".1")
            shutil.copyfile(self.log, older)
            os.truncate(self.log, 0)
            self.log_start = 0

    def note_probe(self, answered: bool, after_s: float) -> None:
        """Note whether the current process answered a probe, `after_s` after the previous one. A process that has never answered is still
        starting: its silence doesn't count."""
        self.answered = self.answered or answered
        self.silent_s = 0.0 if answered or not self.answered else self.silent_s + after_s

    @property
    def ending_file(self) -> Path | None:
        """The file in which a process of the service records the exception that ends it."""
        return None if self.log is None else self.log.absolute().with_suffix(".ending")

    def take_ending(self) -> Ending | None:
        """Return the exception that ended the last process, and forget it; None if it told none: it was killed, or is not a service."""
        if self.ending_file is None:
            return None
        try:
            told = self.ending_file.read_bytes()
            self.ending_file.unlink()
            return msgspec.json.decode(told, type=Ending)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # none, a part, or its disk is away
            return None

    def log_tail(self) -> str:
        """Return the last lines that the current process logged."""
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:] if line.strip())


class Supervisor:
    """Keeps children running. Each leads its own process group, so that its own children can be signalled too.

    `report` is called with one line for each event that the user should know about.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        report: Callable[[str], None],
        policy: RestartPolicy | None = None,
        grace_s: float = 20.0,
        log_bytes: int = LOG_BYTES,
    ) -> None:
        self.environ = dict(environ)
        self.report = report
        self.policy = policy or RestartPolicy()
        self.log_bytes = log_bytes
        self.grace_s = grace_s  # between SIGTERM and SIGKILL
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._told = Repeats()  # restarts that wait
        self._guard = self._start_guard()
        self._guarding: asyncio.Task[None] | None = None

    def _start_guard(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(self.grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    async def _keep_guard(self) -> None:
        """Replace a guard that was killed, and tell the new one the groups."""
        while True:
            await _wait(self._guard)
            with contextlib.suppress(BrokenPipeError):  # a line that it never read
                self._guard.communicate()
            self._guard = self._start_guard()
            for process in self._processes.values():
                self._notify_guard("+", process.pid)
            self.report(
                "the guard, which ends the services if this process is killed, was killed itself; there is another now"
            )

    async def supervise(self, child: Child) -> None:
        """Run `child`, and restart it when it exits. Returns when its work is done; raises `ServiceFailed` if it can't continue."""
        while True:
            before = child.ending
            try:
                process = self._start(child)
            except OSError as error:  # its log, or the process itself, can't be made
                code, child.ending = EXIT_INTERNAL_ERROR, Ending.of(error)
            else:
                code = await self._follow(child, process)
                child.ending = child.take_ending()
            match self.policy.decide(
                code,
                ends_run=child.ends_run,
                was_ready=child.was_ready,
                was_let_in=child.was_let_in,
                is_starting=child.is_starting,
                fruitless=child.fruitless,
                waited=child.waited,
                is_user_code=child.is_user_code,
                ending=child.ending,
                before=before,
            ):
                case Finished():
                    child.state = "finished"
                    return
                case GiveUp(reason):
                    child.state, child.waits_for = "failed", ""
                    if child.ending is not None and child.ending.error == StoppedByAlarm.__name__:
                        raise StoppedByAlarm(reason)
                    raise ServiceFailed(
                        f"{child.name} can't continue: {reason}; the end of {child.log}:\n{child.log_tail()}"
                    )
                case Restart(delay_s, reason, waits):
                    child.state = "restarting"
                    if not waits or self._told.due(f"{child.name}: {reason}"):
                        self.report(f"{child.name}: {reason}; restarting it in {delay_s:.0f} s")
                    if waits:
                        child.note_wait(waits, reason)
                    else:
                        child.waits_for = ""  # what it waited for is there: it has crashed
                    await asyncio.sleep(delay_s)
                    child.restarts += 1
                    child.waited += bool(waits)
                    child.fruitless += not waits

    async def run(self, child: Child) -> int:
        """Start `child` and wait for it. Returns its exit code once its whole process group is gone."""
        return await self._follow(child, self._start(child))

    def _start(self, child: Child) -> subprocess.Popen[bytes]:
        """Start `child`. No await comes between this and `_wait`: a cancelled task leaves no process that `stop` doesn't know of."""
        if self._guarding is None:
            self._guarding = asyncio.create_task(self._keep_guard())
        child.is_starting = True
        source = None if child.source is None else signature(child.source)  # before the process reads it
        with contextlib.ExitStack() as opened:
            log = None
            if child.log is not None:
                child.log.parent.mkdir(parents=True, exist_ok=True)
                log = opened.enter_context(child.log.open("ab"))
                child.log_start = log.tell()
            child.take_ending()  # of an earlier run
            own = self.environ if child.environ is None else child.environ
            process = subprocess.Popen(
                child.argv,
                pass_fds=[sock.fileno() for sock in child.reserved],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env={
                    **own,
                    **pass_sockets(child.reserved),
                    **({} if child.ending_file is None else {ENDING: str(child.ending_file)}),
                },
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._processes[child.name] = process
        child.pid, child.state, child.answered, child.silent_s = process.pid, "starting", False, 0.0
        child.source_signature = source
        self._notify_guard("+", process.pid)
        return process

    async def _follow(self, child: Child, process: subprocess.Popen[bytes]) -> int:
        """Wait for a process of `child`. Returns its exit code once its whole group is gone. An error must not be taken for its end."""
        bounding = asyncio.create_task(self._bound_log(child))
        try:
            code = await _wait(process)
        finally:
            bounding.cancel()
        await self._end_group(child.name, process.pid)
        for sock in child.reserved:
            reserve_again(sock)
        child.pid = None
        return code

    async def _bound_log(self, child: Child) -> None:
        failing = False
        while True:
            try:
                await asyncio.to_thread(child.keep_log_small, self.log_bytes)
                failing = False
            except OSError as error:
                if not failing:
                    self.report(f"{child.log} can't be kept small now ({error.strerror}); it continues to grow")
                failing = True
            await asyncio.sleep(_LOOK_AT_LOGS_S)

    async def _end_group(self, name: str, group: int) -> None:
        """End what an exited leader left of its group. The embedded server gets a moment to write its files."""
        await asyncio.to_thread(guard.end_groups, [group], min(5.0, self.grace_s))
        self._notify_guard("-", group)
        self._processes.pop(name, None)

    async def stop(self, children: Iterable[Child], grace_s: float | None = None) -> None:
        """Send SIGTERM to all of these at once, and SIGKILL to those still running after `grace_s` (default: the supervisor's)."""
        grace_s = self.grace_s if grace_s is None else grace_s
        running = [(child, self._processes[child.name]) for child in children if child.name in self._processes]

        async def end(child: Child, process: subprocess.Popen[bytes]) -> None:
            process.terminate()
            try:
                await asyncio.wait_for(_wait(process), grace_s)
            except TimeoutError:
                self.report(f"{child.name}: still running {grace_s:.0f} s after SIGTERM; killed")
                guard.signal_group(process.pid, signal.SIGKILL)
                await _wait(process)
            await self._end_group(child.name, process.pid)
            child.pid, child.state = None, "stopped"

        await asyncio.gather(*(end(child, process) for child, process in running))

    def replace(self, child: Child, reason: str, signum: signal.Signals = signal.SIGKILL) -> None:
        """Send SIGKILL to a hanging service, or SIGTERM to one that answers, so that `supervise` restarts it."""
        process = self._processes.get(child.name)
        if process is not None:
            how = "killed" if signum == signal.SIGKILL else "ended"
            self.report(f"{child.name}: {reason}; {how}, to be restarted")
            guard.signal_group(process.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to everything."""
        for process in self._processes.values():
            guard.signal_group(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the guard process, once every child has been stopped."""
        if self._guarding is not None:
            self._guarding.cancel()
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            self._guard.communicate()

    def _notify_guard(self, sign: str, group: int) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"{sign}{group}\n")
            self._guard.stdin.flush()
        except BrokenPipeError:
            return  # it was killed: `_keep_guard` tells the next one every group


async def _wait(process: subprocess.Popen[Any]) -> int:
    """Wait for the process to exit, and reap it. Returns its exit code. Several tasks may wait."""
    if process.returncode is None:
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    return process.wait()


# What torchrun tells a rank. Below a shell that has it, a trainer would wait for ranks that nobody starts.
_OF_TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+")


def child_environ(environ: Mapping[str, str], kept: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of services: all variables (HF_TOKEN, HF_HOME, …) except HEADRACE_*. These are already resolved into the run's
    configuration, and would override the command line. Those in `kept`, to which the configuration refers, stay. Those that torchrun gives
    its ranks go too: what is started here starts its own.

    PYTHONSAFEPATH keeps the working directory off the module search path of every process below, including torchrun's and vLLM's: a user's
    random.py or services.py must not replace a module. Programs reach what runs on this machine without a proxy.
    """
    own = {
        name: value
        for name, value in environ.items()
        if name in kept or not (name.upper().startswith("HEADRACE_") or _OF_TORCHRUN.fullmatch(name))
    }
    return {**own, **without_proxy(environ), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
