"""The sandbox in which built-in environments score. A worker enters it once, and computes each score in a separate child process.

Level A: separate user, mount, PID, network and IPC namespaces, with a read-only root that holds only Python and its libraries; and all of
level B. Level B, for machines that deny namespaces (in a container): no privileges, Landlock, and in the child a filter of system calls. At
either level the child can compute, read Python's own files and write its result, and nothing else: it can't open a socket, start a process
or thread, signal, trace, or change a file. NONE still has a child for each score, and its limits.

The sandbox contains a scorer, but can't make it honest. Code that a scorer evaluates runs in the process that judges it, so only answers
known to be harmless may reach `eval`: see `environments/gym_answers.py`.
"""

from __future__ import annotations

import enum
import math
import os
import resource
import select
import signal
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import headrace
from headrace.base.errors import ServiceError
from headrace.base.parent import die_with_parent

from . import sandbox_kernel as kernel

MAX_RESULT_BYTES = 64 * 1024
# What allows unprivileged user namespaces on the usual distributions.
NAMESPACE_SETTINGS = "sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0"
# A completion may ask for a number with more digits than fit in memory. Then only its own process may fail.
_MEMORY_LIMIT_BYTES = 2 * 1024**3
_OPEN_FILES = 256  # a worker has one for each program that sleeps (`pool`)
_TRIAL_S = 10.0
_RESULT_FD = 3
_LENGTH = struct.Struct(">I")


class Level(enum.StrEnum):
    """How strongly a scorer is isolated. `docs/environments.md` describes what each level stops."""

    A = "A"
    B = "B"
    NONE = "none"


class ChildFailed(Exception):
    """Raised when the child returned no result. The message says how the child ended."""


class SandboxDenied(ServiceError):
    """Raised when the machine grants no sandbox of the requested levels. The message says what it denies."""


class Sandbox:
    """Puts this process, which must have no threads, into the best sandbox of `levels` that the machine grants. Raises `SandboxDenied`.

    With namespaces, a new process continues in the sandbox. The calling process stays outside and ends with the new one. If the machine
    grants namespaces but no new root, level B keeps the namespaces.
    """

    def __init__(self, levels: Collection[Level]) -> None:
        self.denials: list[str] = []
        self._nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
        self.level = self._isolate(levels)
        die_with_parent(signal.SIGKILL)  # again, because a change of privileges resets it
        try:
            self.run(lambda: b"", _TRIAL_S)
        except (ChildFailed, TimeoutError) as error:
            self.denials.append(f"a filter of system calls (seccomp): {error or 'a trial took too long'}")
            self.level = Level.NONE
        if self.level not in levels:
            raise SandboxDenied("; ".join(self.denials))

    def _isolate(self, levels: Collection[Level]) -> Level:
        if levels == {Level.NONE} or not self._granted(kernel.scorer_filter):
            return Level.NONE
        user, group, readable = os.geteuid(), os.getegid(), _readable()
        rooted = False
        if Level.A in levels and self._granted(kernel.unshare_all):
            if child := os.fork():
                kernel.end_with(child)
            rooted = self._granted(kernel.map_user, user, group) and self._granted(kernel.keep_only, readable)
        landlocked = self._granted(kernel.drop_privileges) and self._granted(kernel.landlock, readable)
        if rooted:
            return Level.A  # even without Landlock: there is nothing else to open
        return Level.B if landlocked else Level.NONE

    def _granted(self, step: Callable[..., object], *arguments: object) -> bool:
        try:
            step(*arguments)
        except OSError as error:
            self.denials.append(str(error))
            return False
        return True

    def run(self, work: Callable[[], bytes], timeout_s: float) -> bytes:
        """Run `work` in its own process, and return its result (at most `MAX_RESULT_BYTES`). The process is gone when this returns.

        Raises `TimeoutError` after `timeout_s`, and `ChildFailed` if the process ended without returning exactly one result.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            self._work(work, writer, timeout_s)
        os.close(writer)
        try:
            answer = _read_all(reader, time.monotonic() + timeout_s)
        finally:
            os.close(reader)
            os.kill(child, signal.SIGKILL)  # in a sandbox it leaves no processes behind, because it can't start any
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if len(answer) < _LENGTH.size or len(answer) != _LENGTH.size + _LENGTH.unpack_from(answer)[0]:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            why = " (a system call that the sandbox denies)" if code == -signal.SIGSYS else ""
            raise ChildFailed(f"the scoring process {how}{why}; it gave no result, or more than one")
        return answer[_LENGTH.size :]

    def _work(self, work: Callable[[], bytes], writer: int, timeout_s: float) -> NoReturn:
        """Do the work of the child: give up everything but the pipe, compute, answer, end."""
        try:
            die_with_parent(signal.SIGKILL)
            self._confine(writer, timeout_s)
            result = work()
            answer = _LENGTH.pack(len(result)) + result
            while answer:
                answer = answer[os.write(_RESULT_FD, answer) :]
        except BaseException:  # noqa: BLE001  # the parent sees that there is no result
            os._exit(1)
        os._exit(0)

    def _confine(self, writer: int, timeout_s: float) -> None:
        for standard in range(_RESULT_FD):
            os.dup2(self._nowhere, standard)
        os.dup2(writer, _RESULT_FD)
        os.closerange(_RESULT_FD + 1, _OPEN_FILES)
        limits = {
            resource.RLIMIT_CPU: math.ceil(timeout_s) + 1,
            resource.RLIMIT_AS: _MEMORY_LIMIT_BYTES,
            resource.RLIMIT_NPROC: 0,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if self.level is not Level.NONE:
            kernel.install_filter(kernel.scorer_filter())


def _read_all(reader: int, deadline: float) -> bytes:
    answer = b""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    while len(answer) <= _LENGTH.size + MAX_RESULT_BYTES:
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError
        piece = os.read(reader, MAX_RESULT_BYTES)
        if not piece:
            break
        answer += piece
    return answer


def _readable() -> list[Path]:
    """Return the paths of Python, its packages, this project's code and the system's libraries: what a scorer may still import."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    places += [*headrace.__path__, str(Path(__file__).parents[1])]
    places += [sysconfig.get_config_var("LIBDIR") or "", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return kernel.existing(places)
