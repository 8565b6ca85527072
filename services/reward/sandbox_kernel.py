"""The Linux kernel features of a sandbox: namespaces and mounts, Landlock, a system-call filter, dropped capabilities.

Every function raises `OSError` with the name of the call that the kernel refused. Nothing they do can be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# the numbers of system calls that have no name in the C library (x86_64, aarch64)
_PIVOT_ROOT, _CAPSET = (155, 41), (126, 91)
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = (442, 442), (444, 444), (445, 445), (446, 446)

_PROCESSORS = ("x86_64", "aarch64")
_AUDIT_ARCH = (0xC000003E, 0xC00000B7)

# Computing, memory, reading allowed files, writing to open files, ending. Any other call ends the process: an error would not do, because
# a scorer may swallow it, which would look like a wrong answer.
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
# What an ordinary program needs besides: its own files, pipes, threads, signals, timers and waits. Whatever is not here does not exist for
# it, nor does a new call of a newer kernel. Left out on purpose is what outlives a process, isn't counted as its memory, or is seen by
# others: sockets with an address, System V and POSIX queues and shared memory, files in memory, keys, inotify, io_uring, locks.
_PROGRAM = _ALLOWED | {
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "creat": (85, None),
    "openat2": (437, 437),
    "close_range": (436, 436),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    "umask": (95, 166),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "getdents": (78, None),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "signalfd4": (289, 74),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "sendto": (44, 206),  # of a pair of sockets: there are no others
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    "msync": (26, 227),
    "membarrier": (324, 283),
    "execve": (59, 221),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "pause": (34, None),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "time": (201, None),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "arch_prctl": (158, None),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "setpgid": (109, 154),
    "getsid": (124, 156),
    "setsid": (112, 157),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "getcpu": (309, 168),
    "getpriority": (140, 141),
    "sched_getscheduler": (145, 120),
    "sched_getparam": (143, 121),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
}
_NEW_PROCESS = {"fork": (57, None), "vfork": (58, None)}
# Anybody who may open a file can lock it and see its locks, so a lock on a shared file is a message. A program is alone with its own files:
# it is told that it has the lock.
_FLOCK, _FCNTL_LOCKS = {"flock": (73, 32)}, (5, 6, 7)
# duplicate, and get and set the flags of descriptor and file: no owners of signals, leases, notifications or larger pipes
_FCNTL, _FCNTL_COMMANDS = (72, 25), (0, 1, 2, 3, 4, 1030)
# Python's `open` asks whether the file is a terminal. It never is, and other device requests are refused in the same way, except FIONCLEX,
# FIOCLEX, FIONBIO and FIONREAD of a program.
_IOCTL, _IOCTL_REQUESTS = (16, 29), (0x5450, 0x5451, 0x5421, 0x541B)
_PRCTL, _PRCTL_OPTIONS = (157, 167), (1, 15, 16, 0x53564D41)  # PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_SOCKETPAIR, _AF_UNIX = (53, 199), 1
_CLONE, _PRLIMIT = (56, 220), (302, 261)
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020000  # a thread; any new namespace
# Memory that is shared and has no file stays until the last page of it is unmapped, but counts only as far as it is mapped: no limit on a
# process's addresses holds for it.
_MMAP, _MAP_SHARED, _MAP_ANONYMOUS = (9, 222), 0x01, 0x20

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_MOUNT_ATTR_RDONLY_NOSUID_NODEV, _AT_FDCWD, _AT_RECURSIVE = 1 | 2 | 4, -100, 0x8000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# The new root is mounted here before it becomes the root: a directory that every Linux has, and whose content is not needed.
_STAGE = "/proc"

_libc = ctypes.CDLL(None, use_errno=True)


def unshare_all() -> None:
    """Enter new user, mount, PID, network and IPC namespaces. The next child is the first process of the PID namespace and must call
    `map_user`. Without it there can be no other process."""
    _processor()
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    _check("unshare", _libc.unshare(flags))


def map_user(user: int, group: int) -> None:
    """Keep the same user and group ids in the new user namespace as outside."""
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


def map_users(process: int, users: Sequence[int]) -> None:
    """Map these users and groups to themselves in the new user namespace of `process`. Needs root."""
    lines = "".join(f"{user} {user} 1\n" for user in users)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process}/{name}").write_text(lines, encoding="ascii")


def keep_only(readable: Sequence[Path], empty: Sequence[Path] = ()) -> None:
    """Replace the root with one that holds only `readable`, read-only, and `empty` folders. Needs a separate mount namespace."""
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
    for path in empty:
        Path(_STAGE + str(path)).mkdir(parents=True, exist_ok=True)
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY_NOSUID_NODEV, 0, 0, 0)
    _call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, _STAGE.encode(), _AT_RECURSIVE, attributes, len(attributes))
    os.chdir(_STAGE)
    _call("pivot_root", _PIVOT_ROOT, b".", b".")  # the old root now lies on top of the new one
    _check("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def mount_scratch(path: Path, user: int, size: int, files: int) -> None:
    """Mount an empty in-memory file system at `path` that belongs to `user` and holds at most this many bytes and files."""
    options = f"size={size},nr_inodes={files},mode=0700,uid={user},gid={user}"
    _mount("tmpfs", str(path), "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def fork_apart() -> int:
    """Like `os.fork`, for a process without threads; the child is the first process of new PID and IPC namespaces, which end with it."""
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | signal.SIGCHLD
    return _call("clone", _CLONE, flags, 0, 0, 0, 0)


def unmount(path: Path) -> None:
    _check(f"umount2 {path}", _libc.umount2(str(path).encode(), _MNT_DETACH))


def drop_privileges() -> None:
    """Drop all capabilities, and every way to gain any."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _call("capset", _CAPSET, header, none)
    _check("prctl(PR_SET_NO_NEW_PRIVS)", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def landlock(readable: Sequence[Path]) -> None:
    """Allow only `readable` to be opened from now on, for reading. As far as the kernel's Landlock supports it, deny TCP, and signals and
    abstract sockets to all processes but this one's children."""
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
    """End the process with SIGSYS on any system call that a computation doesn't need: no sockets, no new processes or threads, no exec, no
    signals, no ptrace, nothing that changes a file. Needs `drop_privileges`."""
    _install(_filter())


def filter_program(*, processes: bool) -> None:
    """Make every system call fail from now on that an ordinary program doesn't need and, unless `processes`, the start of a process
    (threads are allowed). They fail as on a kernel that lacks them, so that libraries do without.

    Needs `drop_privileges` and separate namespaces.
    """
    _install(_program_filter(processes))


def _install(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, sock_fprog, 0, 0))


# instructions of classic BPF (LD|W|ABS, JMP|JEQ|K, JMP|JSET|K, RET|K), and the return values of a filter
_LOAD, _EQUAL, _ANY_OF, _GIVE = 0x20, 0x15, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in `struct seccomp_data`

_Calls = Mapping[str, tuple[int, int | None]]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a `struct sock_filter`. `if_true` and `if_false` are numbers of steps to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _start() -> list[bytes]:
    """Load the number of the system call, and kill calls of another architecture."""
    architecture = _AUDIT_ARCH[_processor()]
    return [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, architecture, 1, 0), _step(_GIVE, _KILL), _step(_LOAD, _NUMBER)]


def _answer(calls: _Calls, action: int) -> list[bytes]:
    numbers = (numbers[_processor()] for numbers in calls.values())
    return [part for number in numbers if number is not None for part in _when(number, [_step(_GIVE, action)])]


def _when(number: int, steps: Sequence[bytes]) -> list[bytes]:
    """Apply `steps`, which end in a return value, to this number only: of a system call, or of what else is loaded."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _argument(place: int, answers: Mapping[int, int], otherwise: int) -> list[bytes]:
    """Answer by the argument in this place: what `answers` gives for its value, or `otherwise`."""
    known = [part for value, action in answers.items() for part in _when(value, [_step(_GIVE, action)])]
    return [_step(_LOAD, _ARGUMENTS + 8 * place), *known, _step(_GIVE, otherwise)]


def _map(otherwise: int) -> list[bytes]:
    """Allow mmap, except of memory that is shared and has no file."""
    return _when(
        _MMAP[_processor()],
        [
            _step(_LOAD, _ARGUMENTS + 8 * 3),
            _step(_ANY_OF, _MAP_SHARED, 0, 2),
            _step(_ANY_OF, _MAP_ANONYMOUS, 0, 1),
            _step(_GIVE, otherwise),
            _step(_GIVE, _ALLOW),
        ],
    )


def _filter() -> bytes:
    """Build the filter that allows the listed calls and nothing else."""
    allowed = _answer(_ALLOWED, _ALLOW) + _map(_KILL) + _answer({"ioctl": _IOCTL}, _FAIL | errno.ENOTTY)
    return b"".join([*_start(), *allowed, _step(_GIVE, _KILL)])


def _program_filter(processes: bool) -> bytes:
    """Build the filter that allows a program the listed calls, and denies everything else."""
    here, deny, gone, done = _processor(), _FAIL | errno.EPERM, _FAIL | errno.ENOSYS, _FAIL | 0
    commands = dict.fromkeys(_FCNTL_COMMANDS, _ALLOW) | dict.fromkeys(_FCNTL_LOCKS, done)
    thread = [] if processes else [_step(_ANY_OF, _CLONE_THREAD, 1, 0), _step(_GIVE, deny)]
    steps = [
        *_start(),
        *_answer(_PROGRAM | _NEW_PROCESS if processes else _PROGRAM, _ALLOW),
        *_answer(_FLOCK, done),
        *_map(deny),
        *_when(_FCNTL[here], _argument(1, commands, deny)),
        *_when(_IOCTL[here], _argument(1, dict.fromkeys(_IOCTL_REQUESTS, _ALLOW), _FAIL | errno.ENOTTY)),
        *_when(_PRCTL[here], _argument(0, dict.fromkeys(_PRCTL_OPTIONS, _ALLOW), deny)),
        *_when(_SOCKETPAIR[here], _argument(0, {_AF_UNIX: _ALLOW}, deny)),
        *_when(_PRLIMIT[here], _argument(0, {0: _ALLOW}, deny)),  # only its own limits
        *_when(
            _CLONE[here],
            [
                _step(_LOAD, _ARGUMENTS),
                _step(_ANY_OF, _CLONE_NEW, 0, 1),
                _step(_GIVE, deny),
                *thread,
                _step(_GIVE, _ALLOW),
            ],
        ),
        _step(_GIVE, gone),  # clone3 too: a filter can't see its arguments, and the C library does without
    ]
    return b"".join(steps)


def _processor() -> int:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _PROCESSORS or sys.maxsize < 1 << 32:
        raise OSError(
            errno.ENOSYS, f"{sys.platform} on {machine} is not supported; use 64-bit Linux on one of {_PROCESSORS}"
        )
    return _PROCESSORS.index(machine)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    names = (source.encode(), target.encode(), kind and kind.encode())
    done = _libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None)
    _check(f"mount {target}", done)


def _call(name: str, numbers: tuple[int, int], *arguments: int | bytes | None) -> int:
    # a plain number would be passed as a 32-bit int, but a system call reads the whole register
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(name, _libc.syscall(ctypes.c_long(numbers[_processor()]), *wide))


def _check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
