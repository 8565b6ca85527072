"""The process that runs the code of completions for one scoring worker: `python -m headrace_services.reward.code_worker`.

It enters its own namespaces, whose read-only root holds only the system's programs and Python. There it runs each program as a new
process, in PID and IPC namespaces of its own and an empty in-memory folder, with limits, and leaves nothing of it behind. It gets programs
and their input, never the expected output.

Standard input and output carry msgpack in frames like those of `scoring_worker`. The first frame out names what the machine denies (empty:
nothing). Then each `Run` in is followed by a `ProgramResult` out. The process ends when its input does.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from headrace.service import die_with_parent
from headrace_services.reward import sandbox_kernel as kernel
from headrace_services.reward.frames import read_frame, write_frame

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
# how often the memory of a program's processes is added up, and how often in a row it must be too much
_COUNT_EVERY_S, _LOOKS_ABOVE = 0.05, 2
_ENDING = struct.Struct("=id")  # how the program ended, as `wait` says it, and the CPU seconds that it used


class Run(msgspec.Struct):
    """A program, as text, and how to run it: `command`, followed by the name of the program's file. With `processes` above 1 it may start
    others. They have `memory_bytes` together."""

    command: list[str]
    program: str
    input: bytes
    cpu_s: int
    wall_s: float
    memory_bytes: int
    processes: int


class ProgramResult(msgspec.Struct):
    """The output of a program. `failure`: why the program failed (empty: it ended normally). `late`: it ran out of time. `problem`: why it
    could not be run, through no fault of its own."""

    output: bytes = b""
    failure: str = ""
    late: bool = False
    error: str = ""  # the end of its standard error
    problem: str = ""


def main() -> None:
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # the new root has none
        user = _isolate()
        for processes in (1, 2):
            _run(Run(PYTHON, "", b"", 10, 10.0, 1 << 30, processes), user, proc)
    except OSError as error:
        write_frame(replies, str(error).encode())
        return
    _serve(requests, replies, user, proc)


def _serve(requests: BinaryIO, replies: BinaryIO, user: int, proc: int) -> None:
    write_frame(replies, b"")
    while (request := read_frame(requests)) is not None:
        try:
            outcome = _run(msgspec.msgpack.decode(request, type=Run), user, proc)
        except OSError as error:
            outcome = ProgramResult(problem=str(error))
        write_frame(replies, msgspec.msgpack.encode(outcome))


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
        _end_with(child)
    die_with_parent(signal.SIGKILL)
    kernel.unshare_all()
    os.write(unshared[1], b"x")
    os.read(mapped[0], 1)
    for end in (*unshared, *mapped):
        os.close(end)
    if child := os.fork():
        _end_with(child)
    die_with_parent(signal.SIGKILL)
    if user != 0:
        kernel.map_user(user, group)
    kernel.keep_only(readable, [FOLDER])
    return user or _NOBODY


def _end_with(child: int) -> NoReturn:
    die_with_parent(signal.SIGKILL)
    os.waitpid(child, 0)
    os._exit(0)


def _readable() -> list[Path]:
    """Return the paths of the system's programs and libraries, and Python's."""
    places = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", sys.base_prefix]
    paths = sorted({Path(place) for place in places if Path(place).exists()})
    return [path for path in paths if not any(parent in path.parents for parent in paths)]


def _run(run: Run, user: int, proc: int) -> ProgramResult:
    """Run a program until it ends or its time is up. Every process that it started is gone when this returns."""
    kernel.mount_scratch(FOLDER, user, _SCRATCH_BYTES, _FILES)
    try:
        PROGRAM.write_text(run.program, encoding="utf-8")
        PROGRAM.chmod(0o755)
        _INPUT.write_bytes(run.input)
        return _watched(run, user, proc)
    finally:
        kernel.unmount(FOLDER)


def _watched(run: Run, user: int, proc: int) -> ProgramResult:
    given = os.open(_INPUT, os.O_RDONLY | os.O_CLOEXEC)
    (out, out_end), (error, error_end), (broken, broken_end), (ended, ended_end) = (os.pipe() for _ in range(4))
    first = kernel.fork_apart()
    if first == 0:
        _start(run, user, (given, out_end, error_end, broken_end), ended_end)
    for end in (given, out_end, error_end, broken_end, ended_end):
        os.close(end)
    written = {out: bytearray(), error: bytearray()}
    late = large = False
    try:
        try:
            if problem := os.read(broken, 1000):  # empty once the program has started
                raise OSError(problem.decode(errors="replace"))
            count = _counter(first, proc) if run.processes > 1 else lambda: 0
            deadline = time.monotonic() + run.wall_s
            above = 0  # a process that has just been started may share all its memory with its parent, and then counts twice
            while not (late := time.monotonic() >= deadline) and not (large := above == _LOOKS_ABOVE):
                above = above + 1 if count() > run.memory_bytes else 0
                if _read_until(ended, written, out, min(deadline, time.monotonic() + _COUNT_EVERY_S)):
                    break
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
    elif code:
        failure = f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
    said = bytes(written[error][-_ERROR_BYTES:]).decode(errors="replace")
    return ProgramResult(bytes(written[out][:MAX_OUTPUT_BYTES]), failure, late, said)


def _read_until(ended: int, written: dict[int, bytearray], out: int, deadline: float) -> bool:
    """Read until the program ends or has written too much. Return False if the deadline came first."""
    poll = select.poll()
    for source in (ended, *written):
        poll.register(source, select.POLLIN)
    while len(written[out]) <= MAX_OUTPUT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        for source, _ in poll.poll(math.ceil(1000 * left)):
            if source == ended:
                return True
            if piece := os.read(source, 1 << 16):
                _keep(written, source, piece, out)
            else:
                poll.unregister(source)
    return True


def _counter(first: int, proc: int) -> Callable[[], int]:
    """Return what adds up the memory of all processes below `first`. A page that several share counts once."""
    handle = os.pidfd_open(first)
    try:  # `proc` is of the namespace outside, where the process has another number
        told = _text(proc, f"self/fdinfo/{handle}")
    finally:
        os.close(handle)
    top = next(line.split()[1] for line in told.splitlines() if line.startswith("Pid:"))

    def of(process: str) -> int:
        return sum(_own(child, proc) + of(child) for child in _children(process, proc))

    return lambda: of(top)


def _children(process: str, proc: int) -> list[str]:
    try:
        folder = os.open(f"{process}/task", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    except FileNotFoundError:
        return []
    try:
        return [child for thread in os.listdir(folder) for child in _text(folder, f"{thread}/children").split()]
    finally:
        os.close(folder)


def _own(process: str, proc: int) -> int:
    try:
        pages = [line.split() for line in _text(proc, f"{process}/smaps_rollup").splitlines()]
    except PermissionError:  # a program that may not be read, of somebody whom this namespace doesn't know
        return sys.maxsize
    return sum(1024 * int(words[1]) for words in pages if words[0] in ("Pss:", "SwapPss:"))


def _text(folder: int, name: str) -> str:
    """Return a file of a process; nothing if the process is gone."""
    try:
        with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), encoding="ascii") as file:
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
    try:
        die_with_parent(signal.SIGKILL)
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
        os.setsid()
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
        kernel.filter_program(processes=run.processes > 1)
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
