"""Folders that are there for a while: removed at the end, or after the death of the process that made them."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# a folder and a socket of vLLM (`headrace-engine-xxxxxxxx/` and a UUID) follow
_LONGEST_FOLDER_OF_SOCKETS = 40
# A file in each scratch folder. The process that made the folder holds its lock (`flock`), which the kernel drops when the process ends.
_MARK = ".headrace-scratch"
# A file in a scratch folder whose name ends so stands for shared memory, which outlives its processes: what has the rest of the name and a
# hyphen before its own.
_SHARED = ".shared-memory"
SHARED_MEMORY = Path("/dev/shm")
# what the names of all scratch folders begin with that are in the folder for temporary files
TEMPORARY = "headrace-"


@contextlib.contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder that only this user may enter, whose name begins with `prefix`, in `parent`, or else in the folder for temporary
    files. It is removed at the end. What processes that were killed left there under this prefix is removed now."""
    parent = parent or folder_for_sockets()
    remove_abandoned(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)  # once more, because NFS keeps files that are open
        stack.callback(os.close, _mark(folder))
        stack.callback(_remove, folder)
        yield folder


def remove_abandoned(prefix: str = TEMPORARY, parent: Path | None = None) -> None:
    """Remove the scratch folders of this user, in `parent` and under this prefix, whose processes have ended. A folder without a mark is
    none."""
    for mark in (parent or folder_for_sockets()).glob(f"{glob.escape(prefix)}*/{_MARK}"):
        # a living process holds the lock, or the folder is somebody else's, or gone by now
        with contextlib.suppress(OSError):
            lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():  # root may open everybody's
                    _remove(mark.parent)
            finally:
                os.close(lock)


def note_shared_memory(folder: Path, name: str) -> None:
    """Note that shared memory whose names begin with `name` and a hyphen ends with the scratch folder."""
    (folder / f"{name}{_SHARED}").touch()


def _remove(folder: Path) -> None:
    for note in folder.glob(f"*{_SHARED}"):
        for left in SHARED_MEMORY.glob(f"{glob.escape(note.name.removesuffix(_SHARED))}-*"):
            with contextlib.suppress(OSError):
                left.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _mark(folder: Path) -> int:
    """Make the mark of a folder, locked from the beginning. Return the lock."""
    unlocked = folder / f"{_MARK}.new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # on a file system without locks the folder gets no mark
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / _MARK)
    return lock


def folder_for_sockets() -> Path:
    """Return the folder for temporary folders of Unix sockets: TMPDIR, unless the path of a socket in it could be longer than the kernel
    allows (107 bytes)."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= _LONGEST_FOLDER_OF_SOCKETS else Path("/tmp")
