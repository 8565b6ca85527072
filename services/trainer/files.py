"""Files that are there whole or not at all, and bytes that outlive a power cut."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what is to be at `path`, which has it when the context ends without an error: until then there is what was there
    before. What a writer that died leaves is hidden (its name begins with a dot), and the next one writes over it."""
    unfinished = path.with_name(f".{path.name}")
    yield unfinished
    unfinished.replace(path)


def force(path: Path) -> None:
    """What was written to this file, or the names that this folder holds, outlive a power cut once this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
