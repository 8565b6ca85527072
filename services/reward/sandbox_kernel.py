"""What a sandbox asks of the Linux kernel: namespaces and mounts, Landlock, a system-call filter, no capabilities.

Every function raises `OSError` naming the call that the kernel refused. None of them can be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# Numbers of system calls that have no name in the C library, (x86_64, aarch64).
_PIVOT_ROOT, _CAPSET = (155, 41), (126, 91)
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = (442, 442), (444, 444), (445, 445), (446, 446)

_PROCESSORS = ("x86_64", "aarch64")
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)

# Computing, memory, reading files that are allowed, writing to what is open, ending. All else ends the process: an error
# that a scorer swallows would look like a wrong answer.
_ALLOWED = {
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "write": (1, 64),
    "writev": (20, 66),
    "close": (3, 57),
    "lseek": (8, 62),
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "getdents64": (217, 61),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrusage": (98, 165),
    "times": (100, 153),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
# `open` asks whether what it opened is a terminal; it never is, and other questions to a device are refused likewise.
_NOT_A_TERMINAL = {"ioctl": (16, 29)}

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_MOUNT_ATTR_RDONLY_NOSUID_NODEV, _AT_FDCWD, _AT_RECURSIVE = 1 | 2 | 4, -100, 0x8000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# The new root is mounted here until it is the root: a directory that every Linux has and that holds nothing to be kept.
_STAGE = "/proc"

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_all() -> None:
    """New user, mount, PID, network and IPC namespaces. The next child is the first process of the PID namespace, and must
    `map_user`; without it there can be no other."""
    _processor()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    _check("unshare", _libc.unshare(flags))


def map_user(user: int, group: int) -> None:
    """Stay who it was, outside the new user namespace."""
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def keep_only(readable: Sequence[Path]) -> None:
    """A root that holds nothing but `readable`, read-only. Needs a mount namespace of its own."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV)
    for path in readable:
        target = Path(_STAGE + str(path))
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        _mount(str(path.resolve()), str(target), None, _MS_BIND | _MS_REC)
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    _call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, _STAGE.encode(), _AT_RECURSIVE, attributes, len(attributes))
    os.chdir(_STAGE)
    _call("pivot_root", _PIVOT_ROOT, b".", b".")  # the old root now lies on top of the new one
    _check("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def drop_privileges() -> None:
    """No capabilities, and no way to gain any."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call("capset", _CAPSET, header, none)
    _check("prctl(PR_SET_NO_NEW_PRIVS)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def landlock(readable: Sequence[Path]) -> None:
    """From now on only `readable` can be opened, for reading; no TCP; no signals or abstract sockets to other processes than
    this one's children, as far as the kernel's Landlock goes."""
    version = _call("Landlock", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    files = (1 << 13) - 1  # what version 1 knows: execute, read, write, remove, make
    for since, right in ((2, 1 << 13), (3, 1 << 14), (5, 1 << 15)):  # link elsewhere, truncate, control a device
        files |= right if version >= since else 0
    tcp = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    attributes = struct.pack("=QQQ", files, tcp, scopes)
    rules = _call("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, len(attributes), 0)
    for path in readable:
        rights = _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if path.is_dir() else 0)
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call("landlock_add_rule", _LANDLOCK_ADD, rules, _LANDLOCK_PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
        os.close(beneath)
    _call("landlock_restrict_self", _LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def filter_system_calls() -> None:
    """From now on any system call but those of a computation ends the process with SIGSYS: no sockets, no new processes or
    threads, no exec, no signals, no ptrace, nothing that changes a file. Needs `drop_privileges`."""
    program = _filter()
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, sock_fprog, 0, 0))


def _filter() -> bytes:
    """The classic BPF program: `struct sock_filter[]`."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    kill, allow, fail = 0x80000000, 0x7FFF0000, 0x00050000

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    processor = _processor()
    program = [step(load, 4), step(jump_if_equal, _AUDIT_ARCH[processor], 1, 0), step(give, kill), step(load, 0)]
    for calls, action in ((_ALLOWED, allow), (_NOT_A_TERMINAL, fail | errno.ENOTTY)):
        for number in (numbers[processor] for numbers in calls.values()):
            if number is not None:
                program += [step(jump_if_equal, number, 0, 1), step(give, action)]
    return b"".join([*program, step(give, kill)])


def _processor() -> int:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _PROCESSORS or sys.maxsize < 1 << 32:
        raise OSError(errno.ENOSYS, f"{sys.platform} on {machine} is not supported, but 64-bit Linux on {_PROCESSORS}")
    return _PROCESSORS.index(machine)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    done = _libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None)
    _check(f"mount {target}", done)


def _call(name: str, numbers: tuple[int, int], *arguments: int | bytes | None) -> int:
    # a plain number would be passed as a 32-bit int, and a system call reads the whole register
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(name, _libc.syscall(ctypes.c_long(numbers[_processor()]), *wide))


def _check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
