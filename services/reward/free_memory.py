"""How much memory this process and its children may still take."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psutil

from headrace.base import control_groups


def free_memory() -> int:
    """Return the bytes that are free on the machine, or less if the process's control groups allow less."""
    free = (_left(folder, version) for folder, version in control_groups.folders("memory"))
    return min([psutil.virtual_memory().available, *(left for left in free if left is not None)])


def _left(folder: Path, version: Literal[1, 2]) -> int | None:
    """Return what is left of a group's limit, or None without a limit. Copies of files that nobody uses don't count as used."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        limit, used, parts = ((folder / name).read_text(encoding="utf-8") for name in (*names, "memory.stat"))
    except OSError:  # the root has no limit
        return None
    if limit.strip() == "max":
        return None
    counts = dict(line.split() for line in parts.splitlines())
    cached = int(counts["inactive_file" if version == 2 else "total_inactive_file"])
    return int(limit) - int(used) + cached
