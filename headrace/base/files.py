"""Atomic writes, and data that survives a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.base.errors import CodecError, ServiceError

T = TypeVar("T")

# What reading raises for a file that is damaged, of another kind, or out of reach; `FileNotFoundError` is one of them.
UNREADABLE = (OSError, EOFError, zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def read_json(path: Path, kind: type[T]) -> T | None:
    """Return the content of a JSON file; None without one. Raises `CodecError` for a file that holds something else or is out of reach."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CodecError(f"{path} can't be read ({error}); remove it") from error


def cannot_write(path: Path, error: OSError) -> ServiceError:
    """Return the error for something in a run's folder that could not be written."""
    return ServiceError(f"run.dir: can't write {path} ({error.strerror}); give a folder that you may write to")


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` when the context ends without an error. Until then readers of `path` find the
    old content.

    A writer that dies leaves a hidden file (its name begins with a dot), which the next writer overwrites.
    """
    unfinished = path.with_name(f".{path.name}")
    yield unfinished
    unfinished.replace(path)


def fsync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk. Once this returns, they survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make `target` the file `source`, or a copy of it where the file system has no links. Raises `OSError`."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock (`flock`) of a file. This check itself takes the lock for a moment, and a process that tries to take
    it then may fail, so call it rarely."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_gone(path: Path) -> bool:
    """Whether `path` doesn't exist. While its file server answers with an error (ESTALE, EIO), nobody knows, and it is not gone."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return values that change whenever the file does; None while it can't be looked at: an editor may be replacing it."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def cut_torn_line(path: Path) -> None:
    """Remove the half line that a process leaves when it is killed during a write, so that the next line is not appended to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        if end == 0:
            return
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def keep_newest(folder: Path, pattern: str, count: int) -> None:
    """Delete all but the `count` files written last. Files are ordered by time, because a rewound run repeats steps, and by step if their
    times are equal."""

    def age(path: Path) -> tuple[int, int, str]:
        return path.stat().st_mtime_ns, len(path.name), path.name

    for path in sorted(folder.glob(pattern), key=age, reverse=True)[count:]:
        path.unlink()
