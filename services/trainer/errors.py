"""Errors that more than one part of the trainer raises."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ServiceError


def cannot_write(folder: Path, error: BaseException) -> ServiceError:
    """A checkpoint that was to be written to `folder`."""
    return ServiceError(
        f"can't write a checkpoint to {folder} ({error}); the earlier ones are untouched. Free space there, or set "
        "checkpointing.checkpoint_dir"
    )
