"""The filters of system calls, run as the kernel runs them, for both processors."""

from __future__ import annotations

import errno
import platform
import struct

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
            case 0x15:
                place += if_true if loaded == value else if_false
            case 0x45:
                place += if_true if loaded & value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(f"{code:#x} is in no filter")


@pytest.mark.parametrize("processor", ARCHITECTURES)
def test_a_program_may_call_what_is_listed_and_nothing_else(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: processor)
    here, architecture = list(ARCHITECTURES).index(processor), ARCHITECTURES[processor]
    read, clone, mmap = {"x86_64": (0, 56, 9), "aarch64": (63, 220, 222)}[processor]
    prlimit, fcntl, socketpair, flock = ((302, 261), (72, 25), (53, 199), (73, 32))
    other = ARCHITECTURES["aarch64" if processor == "x86_64" else "x86_64"]
    eperm, enosys = FAIL | errno.EPERM, FAIL | errno.ENOSYS
    for processes in (False, True):
        program = kernel._program_filter(processes)
        assert answer(program, architecture, read) == ALLOW
        assert {answer(program, each, read) for each in (I386, other)} == {KILL}
        assert answer(program, architecture, read | X32) == enosys
        assert answer(program, architecture, 99999) == enosys
        assert answer(program, architecture, clone, 0x50F00) == ALLOW  # a thread
        assert answer(program, architecture, clone, 17) == (ALLOW if processes else eperm)
        assert answer(program, architecture, clone, 17 | 1 << 28) == eperm  # with a user namespace
        assert answer(program, architecture, mmap, 0, 4096, 3, 0x22) == ALLOW  # private
        assert answer(program, architecture, mmap, 0, 4096, 3, 0x01) == ALLOW  # a file
        assert {answer(program, architecture, mmap, 0, 4096, 3, flags) for flags in (0x21, 0x23)} == {eperm}
        assert answer(program, architecture, prlimit[here], 0) == ALLOW
        assert answer(program, architecture, prlimit[here], 1) == eperm
        assert answer(program, architecture, fcntl[here], 3, 1030) == ALLOW
        assert {answer(program, architecture, fcntl[here], 3, each) for each in (8, 1024, 1026, 1031)} == {eperm}
        assert {answer(program, architecture, fcntl[here], 3, each) for each in (5, 6, 7)} == {FAIL}
        assert answer(program, architecture, flock[here], 3) == FAIL
        assert answer(program, architecture, socketpair[here], 1) == ALLOW
        assert answer(program, architecture, socketpair[here], 16) == eperm
        called = {number for number in range(1024) if answer(program, architecture, number) == ALLOW}
        assert len(called) < 180


def test_a_scorer_may_not_share_memory_that_has_no_file() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("numbers of x86_64")
    program = kernel._filter()
    found = [answer(program, ARCHITECTURES["x86_64"], 9, 0, 4096, 3, flags) for flags in (0x22, 0x01, 0x21)]
    assert found == [ALLOW, ALLOW, KILL]
