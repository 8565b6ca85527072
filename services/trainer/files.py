"""Atomic writes, and data that survives a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import ServiceError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` when the context ends without an error: until then readers of `path` find the old content.

    A writer that dies leaves a hidden file (its name begins with a dot), which the next writer overwrites.
    """
    unfinished = path.with_name(f".{path.name}")
    yield unfinished
    unfinished.replace(path)


def fsync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk: they survive a power cut once this has returned."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cannot_write_checkpoint(folder: Path, error: BaseException) -> ServiceError:
    """The error for a checkpoint that could not be written to `folder`."""
    return ServiceError(
        f"can't write a checkpoint to {folder} ({error}); the earlier ones are untouched. Free space there, or set "
        "checkpointing.checkpoint_dir"
    )
