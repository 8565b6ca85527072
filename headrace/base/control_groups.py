"""The Linux control groups of this process, which may have less than the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

MOUNT = Path("/sys/fs/cgroup")


def own() -> str:
    """Return the content of this process's /proc/…/cgroup; nothing on other systems than Linux."""
    try:
        return Path("/proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""


def folders(controller: str) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Yield the folders of the groups that limit `controller` for this process, and of their parents, with the version of their hierarchy.
    In a container the mount may be the group itself."""
    for line in own().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = MOUNT / controllers
        folder = mount / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(mount):
                yield each, 1 if controllers else 2
