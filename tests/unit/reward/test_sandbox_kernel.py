"""The filters of system calls, run as the kernel runs them, for both processors; and a machine that can't have one."""

from __future__ import annotations

import ctypes
import errno
import struct
import subprocess
import sys
from typing import Any

import pytest

from headrace_services.reward import sandbox_kernel as kernel

KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, X32 = 0x40000003, 0x40000000


def answer(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Return what the filter says to a system call."""
    wide = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("<iIQ6Q", number, architecture, 0, *wide)
    steps = list(struct.iter_unpack("=HBBI", program))
    place = loaded = 0
    while True:
        code, if_true, if_false, value = steps[place]
        place += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", call, value)
            case 0x54:
                loaded &= value
            case 0x05:
                place += value
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x25:
                place += if_true if loaded > value else if_false
            case 0x35:
                place += if_true if loaded >= value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"{code:#x} is in no filter")


class Elsewhere:
    """libseccomp as it is on a machine with this processor."""

    def __init__(self, architecture: int) -> None:
        self._library, self._architecture = kernel._libseccomp(), architecture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def seccomp_init(self, otherwise: int) -> int:
        context = ctypes.c_void_p(self._library.seccomp_init(otherwise))
        here = self._library.seccomp_arch_native()
        if here != self._architecture:
            assert self._library.seccomp_arch_add(context, self._architecture) == 0
            assert self._library.seccomp_arch_remove(context, here) == 0
        assert context.value is not None
        return context.value


@pytest.fixture(params=ARCHITECTURES)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = Elsewhere(ARCHITECTURES[request.param])
    monkeypatch.setattr(kernel, "_libseccomp", lambda: library)
    return str(request.param)


@pytest.mark.parametrize("processes", [False, True])
def test_a_program_may_call_what_is_listed_and_nothing_else(processor: str, processes: bool) -> None:
    here, architecture = list(ARCHITECTURES).index(processor), ARCHITECTURES[processor]
    read, clone, mmap, ioctl, prctl = {"x86_64": (0, 56, 9, 16, 157), "aarch64": (63, 220, 222, 29, 167)}[processor]
    prlimit, fcntl, socketpair, flock = ((302, 261), (72, 25), (53, 199), (73, 32))
    other = ARCHITECTURES["aarch64" if processor == "x86_64" else "x86_64"]
    enosys, enotty = FAIL | errno.ENOSYS, FAIL | errno.ENOTTY
    program = kernel.program_filter.__wrapped__(processes=processes)
    assert answer(program, architecture, read) == ALLOW
    assert {answer(program, each, read) for each in (I386, other)} == {KILL}
    assert answer(program, architecture, read | X32) == (KILL if processor == "x86_64" else enosys)
    assert answer(program, architecture, 99999) == enosys
    assert answer(program, architecture, 435) == enosys  # clone3
    # socket, shmget, memfd_create, ptrace, unshare, add_key
    outliving = {"x86_64": (41, 29, 319, 101, 272, 248), "aarch64": (198, 194, 279, 117, 97, 217)}
    assert {answer(program, architecture, each) for each in outliving[processor]} == {enosys}
    assert answer(program, architecture, clone, 0x50F00) == ALLOW  # a thread
    assert answer(program, architecture, clone, 17) == (ALLOW if processes else enosys)
    for namespace in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30):
        assert {answer(program, architecture, clone, flags | namespace) for flags in (17, 0x50F00, 17 | 1 << 40)} == {
            enosys
        }
    assert answer(program, architecture, mmap, 0, 4096, 3, 0x22) == ALLOW  # private
    assert answer(program, architecture, mmap, 0, 4096, 3, 0x01) == ALLOW  # a file
    assert {answer(program, architecture, mmap, 0, 4096, 3, flags) for flags in (0x21, 0x23, 0x21 | 1 << 40)} == {
        enosys
    }
    assert answer(program, architecture, prlimit[here], 0) == ALLOW
    assert answer(program, architecture, prlimit[here], 1) == enosys
    assert answer(program, architecture, fcntl[here], 3, 1030) == ALLOW
    assert {answer(program, architecture, fcntl[here], 3, each) for each in (8, 1024, 1026, 1031)} == {enosys}
    assert {answer(program, architecture, fcntl[here], 3, each) for each in (5, 6, 7)} == {FAIL}
    assert answer(program, architecture, flock[here], 3) == FAIL
    assert answer(program, architecture, ioctl, 3, 0x5421) == ALLOW
    assert {answer(program, architecture, ioctl, 3, each) for each in (0x5401, 0x5413)} == {enotty}
    assert {answer(program, architecture, ioctl, 3, each) for each in (0x5412, 0x5452, 0x8901)} == {enosys}
    assert [answer(program, architecture, prctl, each) for each in (15, 4)] == [ALLOW, enosys]
    assert answer(program, architecture, socketpair[here], 1) == ALLOW
    assert answer(program, architecture, socketpair[here], 16) == enosys
    called = {number for number in range(1024) if answer(program, architecture, number) == ALLOW}
    assert 100 < len(called) < 180


def test_a_scorer_may_compute_and_nothing_else(processor: str) -> None:
    architecture = ARCHITECTURES[processor]
    mmap, ioctl, write, socket = {"x86_64": (9, 16, 1, 41), "aarch64": (222, 29, 64, 198)}[processor]
    program = kernel.scorer_filter.__wrapped__()
    found = [answer(program, architecture, mmap, 0, 4096, 3, flags) for flags in (0x22, 0x01, 0x21)]
    assert found == [ALLOW, ALLOW, KILL]
    assert answer(program, architecture, ioctl, 1, 0x5401) == FAIL | errno.ENOTTY
    assert answer(program, architecture, write) == ALLOW
    assert {answer(program, architecture, each) for each in (socket, 99999)} == {KILL}
    assert answer(program, I386, write) == KILL


def test_no_call_is_misspelt() -> None:
    """It would be denied without a word."""
    resolve = kernel._libseccomp().seccomp_syscall_resolve_name
    names = f"{kernel._COMPUTATION} {kernel._PROGRAM}".split()
    assert len({*names}) == len(names)
    assert {name for name in names if resolve(name.encode()) == -1} <= {"fchmodat2"}  # newer than some libseccomp


def test_another_processor_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PROCESSORS", ())
    with pytest.raises(OSError, match="x86_64 and aarch64"):
        kernel._libseccomp.__wrapped__()


WITHOUT = """\
import ctypes, os, socket, sys
real = ctypes.CDLL
def missing(name, *rest, **more):
    if name == "libseccomp.so.2": raise OSError(f"{name}: cannot open shared object file")
    return real(name, *rest, **more)
ctypes.CDLL = missing
from headrace_services.reward.code_worker import _CodeWorker
from headrace_services.reward.frames import read_frame
from headrace_services.reward.sandbox import Level, Sandbox, SandboxDenied
ours, theirs = socket.socketpair()
_CodeWorker(theirs.detach()).serve()
print(read_frame(ours.makefile("rb")).decode())
try:
    Sandbox({Level.A, Level.B})
except SandboxDenied as denied:
    print(denied)
"""


def test_without_libseccomp_no_sandbox_and_the_remedy_is_named() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=True)
    program, scorer = ran.stdout.splitlines()
    assert "apt-get install libseccomp2" in program
    assert "apt-get install libseccomp2" in scorer
