"""The Linux kernel features of a sandbox: namespaces and mounts, Landlock, a system-call filter, dropped capabilities.

Every function raises `OSError` with the name of the call that the kernel refused. Nothing they do can be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
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
# Calls that a program is denied even in its own namespaces: those that reach the kernel's other users, or its processes from outside.
# Sockets are among them, because not every socket family has namespaces.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "socket": (41, 198),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_secret": (447, 447),
}
_NEW_PROCESS = {"fork": (57, None), "vfork": (58, None)}
_CLONE3 = {"clone3": (435, 435)}
_CLONE, _PRLIMIT = (56, 220), (302, 261)
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020000  # a thread; any new namespace
_X32 = 0x40000000  # x86_64's other numbers of system calls

# Python's `open` asks whether the file is a terminal. It never is, and all other device requests are refused in the same way.
_NOT_A_TERMINAL = {"ioctl": (16, 29)}

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
    """Make the calls in `_DENIED` fail from now on and, unless `processes`, the start of a process (threads are allowed).

    Needs `drop_privileges` and separate namespaces: this filter alone contains little.
    """
    _install(_program_filter(processes))


def _install(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, sock_fprog, 0, 0))


# instructions of classic BPF (LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, JMP|JSET|K, RET|K), and the return values of a filter
_LOAD, _EQUAL, _AT_LEAST, _ANY_OF, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`

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
    """Apply `steps`, which end in a return value, to this system call only."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _filter() -> bytes:
    """Build the filter that allows the listed calls and nothing else."""
    allowed = _answer(_ALLOWED, _ALLOW) + _answer(_NOT_A_TERMINAL, _FAIL | errno.ENOTTY)
    return b"".join([*_start(), *allowed, _step(_GIVE, _KILL)])


def _program_filter(processes: bool) -> bytes:
    """Build the filter that denies the listed calls and allows everything else."""
    processor, allow, deny = _processor(), _step(_GIVE, _ALLOW), _step(_GIVE, _FAIL | errno.EPERM)
    argument = _step(_LOAD, _FIRST_ARGUMENT)
    thread = [allow] if processes else [_step(_ANY_OF, _CLONE_THREAD, 0, 1), allow, deny]
    steps = [
        *_start(),
        *(_step(_AT_LEAST, _X32, 0, 1), deny),
        *_answer(_DENIED if processes else {**_DENIED, **_NEW_PROCESS}, _FAIL | errno.EPERM),
        # its arguments are in memory, where a filter can't look; the C library falls back to clone
        *_answer(_CLONE3, _FAIL | errno.ENOSYS),
        *_when(_CLONE[processor], [argument, _step(_ANY_OF, _CLONE_NEW, 0, 1), deny, *thread]),
        *_when(_PRLIMIT[processor], [argument, _step(_EQUAL, 0, 0, 1), allow, deny]),  # only its own limits
        allow,
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
