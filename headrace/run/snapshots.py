"""The folder of a run's snapshots (`checkpointing.snapshot_dir`), on the host of its trainer."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from headrace.base.errors import ServiceError
from headrace.config import Config


def locate(config: Config) -> Path | None:
    """Return the folder, whether it exists or not; None if the run takes no snapshots. Its name is of this run, and of this start of the
    machine: what is not flushed to a disk is whole for as long as that lasts, whichever process dies."""
    parent = config.checkpointing.snapshot_dir
    if parent is None or not config.checkpointing.enabled:
        return None
    boot = b""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    name = hashlib.sha256(boot + os.fsencode(config.checkpoint_folder.resolve())).hexdigest()[:16]
    return Path(parent) / f"headrace-snapshots-{name}"


def make(folder: Path) -> None:
    """Make the folder, for its owner alone. Raises `OSError`, and `ServiceError` if it is there and somebody else's: anybody may write in
    /dev/shm."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise ServiceError(
            f"{folder} belongs to another user; remove it, or set checkpointing.snapshot_dir to another folder"
        )


def remove(config: Config) -> None:
    """Remove the snapshots of a run that has ended."""
    if (folder := locate(config)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
