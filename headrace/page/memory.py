"""Memory of the page's server: what answers no longer need goes back to the system."""

from __future__ import annotations

import ctypes
import os
from typing import Any

# Of glibc's malloc.h: blocks from this size on are given back as soon as they are freed. Left alone, glibc raises it up to 32 MiB.
_MMAP_THRESHOLD, _BLOCK_BYTES = -3, 1 << 20


def keep_little_memory() -> None:
    """Have the C library give large blocks back, and pyarrow use the C library: its own pools keep what each thread ever used. Does nothing
    on a system without glibc. To be called before pyarrow is imported."""
    if mallopt := _find("mallopt"):
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
        mallopt(_MMAP_THRESHOLD, _BLOCK_BYTES)


def release_memory() -> None:
    """Give back to the system what was freed: the C library keeps it for the thread that computed an answer."""
    if trim := _find("malloc_trim"):
        trim(0)


def _find(function: str) -> Any:
    """Return a function of the C library; None if it doesn't have it."""
    return getattr(ctypes.CDLL(None), function, None)
