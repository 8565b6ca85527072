"""The Linux kernel features of a sandbox: namespaces and mounts, Landlock, a system-call filter, dropped capabilities.

Every function raises `OSError` with the name of the call that the kernel refused. What one does to a process can't be undone.

libseccomp writes the filters, because it knows the calls of each processor by name. Like the C library it is called through ctypes: its own
binding for Python is not on PyPI. Namespaces are made here and not by bubblewrap, which would save about 3 of the 17 ms of a core that a
program costs, but limits neither the files of a folder in memory nor the processes of root, and doesn't say what time a program used.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import signal
import socket
import struct
import termios
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from headrace.base.parent import die_with_parent

# Computing, memory, reading allowed files, writing to open files, ending. Any other call ends the process: an error would not do, because
# a scorer may swallow it, which would look like a wrong answer.
_COMPUTATION = """
    read readv pread64 write writev close lseek
    open openat stat lstat fstat newfstatat statx access faccessat faccessat2 getdents64 readlink readlinkat getcwd
    mprotect munmap mremap madvise brk
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack futex
    getpid gettid getuid geteuid getgid getegid uname sysinfo getrusage times
    gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep restart_syscall sched_yield sched_getaffinity getrandom
    exit exit_group
"""
# What an ordinary program needs besides: its own files, pipes, threads, signals, timers and waits. Whatever is not here does not exist for
# it, nor does a new call of a newer kernel (nor clone3, whose flags a filter can't see: the C library does without). Left out on purpose is
# what outlives a process, isn't counted as its memory, or is seen by others: sockets with an address, System V and POSIX queues and shared
# memory, files in memory, keys, inotify, io_uring, locks. (What is sent and received goes through a pair of sockets: there are no others.)
_PROGRAM = """
    pwrite64 preadv pwritev creat openat2 close_range fsync fdatasync truncate ftruncate fallocate sendfile copy_file_range
    rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat mkdir mkdirat rmdir
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat
    getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr umask chdir fchdir getdents statfs fstatfs
    dup dup2 dup3 pipe pipe2 select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
    eventfd eventfd2 signalfd4 timerfd_create timerfd_settime timerfd_gettime
    sendto recvfrom sendmsg recvmsg shutdown getsockname getpeername setsockopt getsockopt
    msync membarrier execve wait4 waitid
    kill tkill tgkill rt_sigpending rt_sigtimedwait rt_sigsuspend pause alarm getitimer setitimer time
    set_tid_address set_robust_list rseq arch_prctl
    getppid getpgrp getpgid setpgid getsid setsid getresuid getresgid getgroups
    getrlimit setrlimit getcpu getpriority sched_getscheduler sched_getparam sched_get_priority_max sched_get_priority_min
"""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 1, 15, 16, 0x53564D41
_TCGETS, _TCGETS2 = 0x5401, 0x802C542A
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020000  # a thread; any new namespace
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_MOUNT_ATTR_RDONLY_NOSUID_NODEV, _AT_FDCWD, _AT_RECURSIVE = 1 | 2 | 4, -100, 0x8000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522
# calls that a C library may lack: newer ones have one number on every processor
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# The new root is mounted here before it becomes the root: a directory that every Linux has, and whose content is not needed.
_STAGE = "/proc"

_SECCOMP_KILL, _SECCOMP_ALLOW, _SECCOMP_FAIL = 0x80000000, 0x7FFF0000, 0x00050000
# libseccomp's attributes, and what they are set to
_OTHER_PROCESSOR, _OPTIMIZATION, _TREE = 2, 8, 2
_MASKED_EQUAL = 7
_PROCESSORS = (0xC000003E, 0xC00000B7)  # x86_64 and aarch64

_libc = ctypes.CDLL(None, use_errno=True)


def existing(places: Iterable[str]) -> list[Path]:
    """Return the paths of these that exist and are below no other."""
    paths = sorted({Path(place) for place in places if place and Path(place).exists()})
    return [path for path in paths if not any(parent in path.parents for parent in paths)]


def end_with(child: int) -> NoReturn:
    """Wait for `child`, and end as it did. If this process is killed, so is the child."""
    die_with_parent(signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def unshare_all() -> None:
    """Enter new user, mount, PID, network and IPC namespaces. The next child is the first process of the PID namespace and must call
    `map_user`. Without it there can be no other process."""
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
    _check("pivot_root", _libc.pivot_root(b".", b"."))  # the old root now lies on top of the new one
    _check("umount2", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def mount_scratch(path: Path, user: int, size: int, files: int) -> None:
    """Mount an empty in-memory file system at `path` that belongs to `user` and holds at most this many bytes and files."""
    options = f"size={size},nr_inodes={files},mode=0700,uid={user},gid={user}"
    _mount("tmpfs", str(path), "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def fork_apart() -> int:
    """Like `os.fork`, for a process without threads; the child is the first process of new PID and IPC namespaces, which end with it."""
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | signal.SIGCHLD
    return _call("clone", _libseccomp().seccomp_syscall_resolve_name(b"clone"), flags, 0, 0, 0, 0)


def unmount(path: Path) -> None:
    _check(f"umount2 {path}", _libc.umount2(str(path).encode(), _MNT_DETACH))


def drop_privileges() -> None:
    """Drop all capabilities, and every way to gain any."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check("capset", _libc.capset(header, none))
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


@functools.cache
def scorer_filter() -> bytes:
    """Return a filter that ends the process with SIGSYS on any system call that a computation doesn't need: no sockets, no new processes or
    threads, no exec, no signals, no ptrace, nothing that changes a file."""
    calls = _Filter(_SECCOMP_KILL)
    calls.answer(_SECCOMP_ALLOW, _COMPUTATION)
    calls.allow_private_memory()
    calls.answer(_SECCOMP_FAIL | errno.ENOTTY, "ioctl")  # Python's `open` asks whether the file is a terminal
    return calls.compiled()


@functools.cache
def program_filter(*, processes: bool) -> bytes:
    """Return a filter that makes every system call fail that an ordinary program doesn't need and, unless `processes`, the start of a
    process (threads are allowed). They fail as on a kernel that lacks them, so that libraries do without. Needs separate namespaces."""
    calls = _Filter(_SECCOMP_FAIL | errno.ENOSYS)
    calls.answer(_SECCOMP_ALLOW, _COMPUTATION + _PROGRAM)
    calls.allow_private_memory()
    # Anybody who may open a file can lock it and see its locks, so a lock on a shared file is a message. A program is alone with its own
    # files: it is told that it has the lock.
    calls.answer(_SECCOMP_FAIL | 0, "flock")
    calls.answer_where(_SECCOMP_FAIL | 0, "fcntl", 1, fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW)
    # duplicate, and get and set the flags of descriptor and file: no owners of signals, leases, notifications or larger pipes
    commands = (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL)
    calls.answer_where(_SECCOMP_ALLOW, "fcntl", 1, *commands)
    calls.answer_where(_SECCOMP_ALLOW, "ioctl", 1, termios.FIONCLEX, termios.FIOCLEX, termios.FIONBIO, termios.FIONREAD)
    # by which libraries tell a terminal from a file
    terminal = (_TCGETS, _TCGETS2, termios.TIOCGPGRP, termios.TIOCGWINSZ)
    calls.answer_where(_SECCOMP_FAIL | errno.ENOTTY, "ioctl", 1, *terminal)
    calls.answer_where(_SECCOMP_ALLOW, "prctl", 0, _PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA)
    calls.answer_where(_SECCOMP_ALLOW, "socketpair", 0, socket.AF_UNIX)
    calls.answer_where(_SECCOMP_ALLOW, "prlimit64", 0, 0)  # only its own limits
    if processes:
        calls.answer(_SECCOMP_ALLOW, "fork vfork")
        calls.answer_where(_SECCOMP_ALLOW, "clone", 0, 0, mask=_CLONE_NEW)
    else:
        calls.answer_where(_SECCOMP_ALLOW, "clone", 0, _CLONE_THREAD, mask=_CLONE_NEW | _CLONE_THREAD)
    return calls.compiled()


def install_filter(program: bytes) -> None:
    """Filter the system calls of this process, and of those that it starts, from now on. Needs `drop_privileges`."""
    buffer = ctypes.create_string_buffer(program, len(program))
    sock_fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check("seccomp", _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, sock_fprog, 0, 0))


class _Filter:
    """What libseccomp compiles for this processor: answers to system calls by name. To any other call the answer is `otherwise`, and a call
    of another processor ends the process."""

    def __init__(self, otherwise: int) -> None:
        self._library = _libseccomp()
        self._context = ctypes.c_void_p(self._library.seccomp_init(otherwise))
        self._do("attr_set", _OTHER_PROCESSOR, _SECCOMP_KILL)
        self._do("attr_set", _OPTIMIZATION, _TREE)

    def answer(self, action: int, names: str) -> None:
        for name in names.split():
            self._add(action, name)

    def answer_where(self, action: int, name: str, argument: int, *values: int, mask: int = 0xFFFFFFFF) -> None:
        """Answer if the argument in this place has one of `values` in the bits of `mask`."""
        for value in values:
            self._add(action, name, struct.pack("=IIQQ", argument, _MASKED_EQUAL, mask, value))

    def allow_private_memory(self) -> None:
        """Allow mmap, except of memory that is shared and has no file: it stays until the last page of it is unmapped, but counts only as
        far as it is mapped, so no limit on a process's addresses holds for it."""
        for flag in (mmap.MAP_SHARED, mmap.MAP_ANONYMOUS):
            self.answer_where(_SECCOMP_ALLOW, "mmap", 3, 0, mask=flag)

    def compiled(self) -> bytes:
        with open(os.memfd_create("filter"), "r+b") as file:
            self._do("export_bpf", file.fileno())
            self._library.seccomp_release(self._context)
            file.seek(0)
            return file.read()

    def _add(self, action: int, name: str, condition: bytes = b"") -> None:
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # a call that an older libseccomp doesn't know is denied, as all others
            self._do("rule_add_array", action, number, 1 if condition else 0, condition)

    def _do(self, what: str, *arguments: int | bytes) -> None:
        result = getattr(self._library, f"seccomp_{what}")(self._context, *arguments)
        if result < 0:
            raise OSError(-result, f"seccomp_{what}{arguments}: {os.strerror(-result)}")


@functools.cache
def _libseccomp() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        remedy = "the sandbox needs Linux with libseccomp 2.5 or newer: apt-get install libseccomp2"
        raise OSError(f"{error}; {remedy}") from error
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_arch_native.restype = ctypes.c_uint32
    if library.seccomp_arch_native() not in _PROCESSORS:  # on some others, `clone` has its flags in another place
        raise OSError(f"the sandbox knows x86_64 and aarch64 with 64 bits, and not this {platform.machine()}")
    return library


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    names = (source.encode(), target.encode(), kind and kind.encode())
    done = _libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None)
    _check(f"mount {target}", done)


def _call(name: str, number: int, *arguments: int | bytes | None) -> int:
    # a plain number would be passed as a 32-bit int, but a system call reads the whole register
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(name, _libc.syscall(ctypes.c_long(number), *wide))


def _check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
