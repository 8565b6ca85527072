"""The processes that run the code of completions for one scoring worker: `python -m headrace_services.reward.code_worker`.

Its standard input is a socket. For each socket that arrives on it, it forks a *code worker*, which serves that socket until it is closed.
So programs that run at the same time are in different code workers.

A code worker enters its own namespaces, whose read-only root holds only the system's programs and Python. There it runs one program at a
time as a new process, in PID and IPC namespaces of its own and an empty in-memory folder, with limits, and leaves nothing of it behind. It
gets programs and their input, never the expected output.

The sockets carry msgpack in frames (`frames`). The first frame out names what the machine denies (empty: nothing). Then
each `Run` in is followed by a `ProgramResult` out, after an empty frame if the program fell asleep.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.base.parent import die_with_parent

from . import sandbox_kernel as kernel
from .frames import read_frame, write_frame

PYTHON = [os.path.realpath(sys.executable), "-I", "-S", "-B"]  # with only the standard library
FOLDER = Path("/tmp")
PROGRAM = FOLDER / "program"
_INPUT = FOLDER / ".input"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": str(FOLDER),
    "TMPDIR": str(FOLDER),
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
_NOBODY = 65534
_THREADS, _OPEN_FILES, _FILES = 64, 64, 1024
_SCRATCH_BYTES = 64 * 1024**2
_ERROR_BYTES = 2000
MAX_OUTPUT_BYTES = 1024**2
# How often it is looked what a program's processes do. Their memory must be too much this often in a row.
_LOOK_EVERY_S, _LOOKS_ABOVE = 0.05, 2
# Of the time since the look before, no more than this counts as the program's own: the machine stood still.
_LONGEST_LOOK_S = 0.5
# A program is asleep that in this many looks in a row wanted no core and used no more than this share of one.
_LOOKS_ASLEEP, _ASLEEP_SHARE = 2, 0.1
# the priority of a program that fell asleep: if it wakes, it gets what the others leave
_BEHIND = 19
_ENDING = struct.Struct("=id")  # how the program ended, as `wait` says it, and the CPU seconds that it used


class Run(msgspec.Struct):
    """A program, as text, and how to run it: `command`, followed by the name of the program's file. With `processes` above 1 it may start
    others. They have `memory_bytes` together. `wall_s` does not count the time in which it wanted a core and got none, but `longest_s`
    does. `behind`: other programs come first."""

    command: list[str]
    program: str
    input: bytes
    cpu_s: int
    wall_s: float
    longest_s: float
    memory_bytes: int
    processes: int
    behind: bool = False


class ProgramResult(msgspec.Struct):
    """The output of a program. `failure`: why the program failed (empty: it ended normally). `late`: it ran out of time. `problem`: why it
    could not be run, through no fault of its own. `unfinished`: it was stopped after `longest_s`, before its own time was up."""

    output: bytes = b""
    failure: str = ""
    late: bool = False
    error: str = ""  # the end of its standard error
    problem: str = ""
    unfinished: bool = False


def main() -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a code worker
    asked = socket.socket(fileno=0)
    while True:
        word, ends, _, _ = socket.recv_fds(asked, 1, 1)
        if not word:
            return
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                asked.close()
                _CodeWorker(ends[0]).serve()
            finally:
                os._exit(0)
        os.close(ends[0])


class _CodeWorker:
    """Runs the programs that come through a socket."""

    def __init__(self, end: int) -> None:
        self._requests = os.fdopen(end, "rb", buffering=0)
        self._replies = os.fdopen(os.dup(end), "wb")

    def serve(self) -> None:
        die_with_parent(signal.SIGKILL)
        try:
            for processes in (False, True):  # compiled here, and not in each program
                kernel.program_filter(processes=processes)
            self._proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # the new root has none
            self._user = _isolate()
        except OSError as error:
            write_frame(self._replies, str(error).encode())
            return
        write_frame(self._replies, b"")
        while (request := read_frame(self._requests)) is not None:
            try:
                outcome = self._run(msgspec.msgpack.decode(request, type=Run))
            except OSError as error:
                outcome = ProgramResult(problem=str(error))
            write_frame(self._replies, msgspec.msgpack.encode(outcome))

    def _run(self, run: Run) -> ProgramResult:
        """Run a program until it ends or its time is up. Every process that it started is gone when this returns."""
        kernel.mount_scratch(FOLDER, self._user, _SCRATCH_BYTES, _FILES)
        try:
            PROGRAM.write_text(run.program, encoding="utf-8")
            PROGRAM.chmod(0o755)
            _INPUT.write_bytes(run.input)
            return self._watch(run)
        finally:
            kernel.unmount(FOLDER)

    def _watch(self, run: Run) -> ProgramResult:
        given = os.open(_INPUT, os.O_RDONLY | os.O_CLOEXEC)
        (out, out_end), (error, error_end), (broken, broken_end), (ended, ended_end) = (os.pipe() for _ in range(4))
        first = kernel.fork_apart()
        if first == 0:
            _start(run, self._user, (given, out_end, error_end, broken_end), ended_end)
        for end in (given, out_end, error_end, broken_end, ended_end):
            os.close(end)
        written = {out: bytearray(), error: bytearray()}
        late = large = unfinished = False
        try:
            try:
                if problem := os.read(broken, 1000):  # empty once the program has started
                    raise OSError(problem.decode(errors="replace"))
                most = run.memory_bytes if run.processes > 1 else None  # of one process, its own limit is enough
                began, looks, told = time.monotonic(), _Looks(first, self._proc, most), run.behind
                while not self._read_until(ended, written, out, time.monotonic() + _LOOK_EVERY_S):
                    looks.take()
                    if large := looks.large:
                        break
                    late, unfinished = looks.own_s >= run.wall_s, time.monotonic() - began >= run.longest_s
                    if late or unfinished:
                        break
                    if looks.asleep and not told:
                        told = True
                        os.kill(first, signal.SIGUSR1)
                        write_frame(self._replies, b"")
            finally:
                os.kill(first, signal.SIGKILL)  # and with it, every process of its namespace
                os.waitpid(first, 0)
            _drain(written, out)
            ending = os.read(ended, _ENDING.size)
        finally:
            for end in (out, error, broken, ended):
                os.close(end)
        status, used_s = _ENDING.unpack(ending) if ending else (signal.SIGKILL, 0.0)
        code = os.waitstatus_to_exitcode(status)
        late = late or code == -signal.SIGXCPU or (code == -signal.SIGKILL and used_s >= run.cpu_s)
        failure = ""
        if len(written[out]) > MAX_OUTPUT_BYTES:
            failure = f"it wrote more than {MAX_OUTPUT_BYTES} bytes"
        elif large:
            failure = f"its processes used more than {run.memory_bytes >> 20} MiB of memory together, or hid how much"
        elif late:
            failure = f"it ran out of time ({run.cpu_s} s of CPU time, {run.wall_s:g} s in all)"
        elif unfinished:
            return ProgramResult(unfinished=True)
        elif code:
            failure = f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
        errors = bytes(written[error][-_ERROR_BYTES:]).decode(errors="replace")
        return ProgramResult(bytes(written[out][:MAX_OUTPUT_BYTES]), failure, late, errors)

    def _read_until(self, ended: int, written: dict[int, bytearray], out: int, deadline: float) -> bool:
        """Read until the program ends or has written too much. Return False if the deadline came first. Ends the process if nobody waits
        for the result any more."""
        poll = select.poll()
        for source in (self._requests.fileno(), ended, *written):
            poll.register(source, select.POLLIN)
        while len(written[out]) <= MAX_OUTPUT_BYTES:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for source, _ in poll.poll(math.ceil(1000 * left)):
                if source == self._requests.fileno():
                    raise SystemExit
                if source == ended:
                    return True
                if piece := os.read(source, 1 << 16):
                    _keep(written, source, piece, out)
                else:
                    poll.unregister(source)
        return True


class _Looks:
    """What the processes of a program do, look by look.

    `own_s` is the time that went by without the time in which the program wanted a core and had none. The kernel adds up how long a thread
    waited once it runs again. So of the time between two looks, what the threads ran counts if one wants a core at the second look, and
    else all but the longest wait of a thread that ended. (A thread that waits for another of the program loses the program's own time.)
    """

    def __init__(self, first: int, proc: int, most_bytes: int | None) -> None:
        """Without `most_bytes`, the memory of the processes is not looked at."""
        self._proc = proc
        self._most_bytes = most_bytes
        self._top = _number(first, proc)
        self._at = time.monotonic()
        self._before: dict[str, tuple[int, int]] = {}  # of each thread, the nanoseconds that it ran and that it waited
        self._quiet = self._above = 0
        self.own_s = 0.0

    def take(self) -> None:
        """Look. Of the memory of all processes, a page that several share counts once."""
        now, seen, states, used_bytes = time.monotonic(), {}, set(), 0
        for process in _below(self._top, self._proc):
            used_bytes += 0 if self._most_bytes is None else _own(process, self._proc)
            for thread in _names(f"{process}/task", self._proc):
                times = _text(self._proc, f"{process}/task/{thread}/schedstat").split()
                state = _text(self._proc, f"{process}/task/{thread}/stat").rpartition(")")[2].split()
                if times and state:
                    seen[thread] = int(times[0]), int(times[1])
                    states.add(state[0])
        since = [
            (ran - ran_before, waited - waited_before)
            for thread, (ran, waited) in seen.items()
            for ran_before, waited_before in [self._before.get(thread, (0, 0))]
        ]
        passed_s = min(now - self._at, _LONGEST_LOOK_S)
        ran_s = sum(ran for ran, _ in since) / 1e9
        if "R" in states:
            self.own_s += min(passed_s, ran_s)
        else:
            self.own_s += max(0.0, passed_s - max((waited for _, waited in since), default=0) / 1e9)
        idle = bool(seen) and not states & {"R", "D"} and ran_s < _ASLEEP_SHARE * passed_s
        self._quiet = self._quiet + 1 if idle else 0
        self._above = self._above + 1 if self._most_bytes is not None and used_bytes > self._most_bytes else 0
        self._before, self._at = seen, now

    @property
    def asleep(self) -> bool:
        return self._quiet >= _LOOKS_ASLEEP

    @property
    def large(self) -> bool:
        """Whether the processes have more than `most_bytes`. One that has just been started may share all its memory with its parent, and
        then counts twice."""
        return self._above >= _LOOKS_ABOVE


def _isolate() -> int:
    """Enter the namespaces, and return the user that programs run as. Raises `OSError` for what the machine denies.

    The processes outside the namespaces wait for the one inside and end with it. A limit on processes does not bind root, not even an
    unprivileged one, so root runs programs as `nobody`.
    """
    user, group = os.geteuid(), os.getegid()
    readable = _readable()
    unshared, mapped = os.pipe(), os.pipe()
    if child := os.fork():  # the child has none of the threads that libraries may have started
        os.close(unshared[1])
        if os.read(unshared[0], 1):
            if user == 0:
                kernel.map_users(child, (0, _NOBODY))
            os.write(mapped[1], b"x")
        kernel.end_with(child)
    die_with_parent(signal.SIGKILL)
    kernel.unshare_all()
    os.write(unshared[1], b"x")
    os.read(mapped[0], 1)
    for end in (*unshared, *mapped):
        os.close(end)
    if child := os.fork():
        kernel.end_with(child)
    die_with_parent(signal.SIGKILL)
    if user != 0:
        kernel.map_user(user, group)
    kernel.keep_only(readable, [FOLDER])
    return user or _NOBODY


def _readable() -> list[Path]:
    """Return the paths of the system's programs and libraries, and Python's."""
    places = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", sys.base_prefix]
    return kernel.existing(places)


def _number(process: int, proc: int) -> str:
    """Return the number of a child in `proc`, which is of the namespace outside, where the process has another number."""
    handle = os.pidfd_open(process)
    try:
        told = _text(proc, f"self/fdinfo/{handle}")
    finally:
        os.close(handle)
    return next(line.split()[1] for line in told.splitlines() if line.startswith("Pid:"))


def _below(process: str, proc: int) -> Iterator[str]:
    """Yield the numbers of all processes below `process`."""
    for thread in _names(f"{process}/task", proc):
        for child in _text(proc, f"{process}/task/{thread}/children").split():
            yield child
            yield from _below(child, proc)


def _names(folder: str, proc: int) -> list[str]:
    """Return the names in a folder of a process; none if the process is gone."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.listdir(handle)
        finally:
            os.close(handle)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _own(process: str, proc: int) -> int:
    try:
        pages = [line.split() for line in _text(proc, f"{process}/smaps_rollup").splitlines()]
    except PermissionError:  # a program that may not be read, of somebody whom this namespace doesn't know
        return sys.maxsize
    return sum(1024 * int(words[1]) for words in pages if words[0] in ("Pss:", "SwapPss:"))


def _text(folder: int, name: str) -> str:
    """Return a file of a process; nothing if the process is gone."""
    try:
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), encoding="latin-1") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _drain(written: dict[int, bytearray], out: int) -> None:
    """Read what is left in the pipes. Nothing writes to them any more."""
    for source in written:
        while piece := os.read(source, 1 << 16):
            _keep(written, source, piece, out)


def _keep(written: dict[int, bytearray], source: int, piece: bytes, out: int) -> None:
    written[source] += piece
    if source != out:
        del written[source][:-_ERROR_BYTES]


def _start(run: Run, user: int, ends: tuple[int, int, int, int], ended: int) -> NoReturn:
    """Be the first process of the program's namespace: start the program, say how it ended, and end. A program that were the first itself
    would be deaf to signals."""

    def fall_behind(*_: object) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_USER, user, _BEHIND)  # of this namespace only

    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGUSR1, fall_behind)
        if (program := os.fork()) == 0:
            _become(run, user, *ends)
        for end in ends:
            os.close(end)
        waited = 0
        while waited != program:  # orphans of the program are its children too
            waited, status, usage = os.wait4(-1, 0)
        os.write(ended, _ENDING.pack(status, usage.ru_utime + usage.ru_stime))
    finally:
        os._exit(0)


def _become(run: Run, user: int, given: int, out: int, error: int, broken: int) -> NoReturn:
    """Give up everything in the child, and run the program. An error before that is written to `broken`, which closes when the program
    starts."""
    try:
        # Its process group is its own. Its session is not: with `autogroup`, priorities hold only within a session.
        os.setpgid(0, 0)
        if run.behind:
            os.setpriority(os.PRIO_PROCESS, 0, _BEHIND)
        for place, end in enumerate((given, out, error)):
            os.dup2(end, place)
        os.dup2(broken, 3, inheritable=False)
        os.closerange(4, _OPEN_FILES)
        os.chdir(FOLDER)
        if os.geteuid() != user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        _limit(run)
        kernel.drop_privileges()
        kernel.install_filter(kernel.program_filter(processes=run.processes > 1))
        os.execvpe(run.command[0], [*run.command, str(PROGRAM)], _ENVIRONMENT)
    except BaseException as failure:  # noqa: BLE001  # reported to the parent
        os.write(3, f"{run.command[0]}: {failure}".encode()[:1000])
    os._exit(127)


def _limit(run: Run) -> None:
    processes = run.processes if run.processes > 1 else _THREADS
    limits: Sequence[tuple[int, int, int]] = (
        (resource.RLIMIT_CPU, run.cpu_s, run.cpu_s + 1),
        (resource.RLIMIT_AS, run.memory_bytes, run.memory_bytes),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_FSIZE, _SCRATCH_BYTES, _SCRATCH_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0, 0),
    )
    for limit, soft, hard in limits:
        resource.setrlimit(limit, (soft, hard))


if __name__ == "__main__":
    main()
