"""Writes the lineage of each step beside the checkpoints; `headrace.run.lineage` describes the files and reads them."""

from __future__ import annotations

import contextlib
import gzip
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import ServiceError
from headrace.base.files import atomic_write, fsync
from headrace.records.origin import GroupLineage, Origin, with_timelines
from headrace.records.trajectory import Group
from headrace.run.lineage import ABANDONED, SCHEMA, Header, LineageFiles, find_timeline


class LineageWriter:
    """The only writer of a run's lineage files.

    A file exists completely or not at all. It survives a power cut once `fsync` has returned. That is called before a checkpoint that
    contains its step is published. The files of steps that no checkpoint contains need not survive.
    """

    def __init__(self, folder: Path, timeline: str) -> None:
        self._folder = folder
        self._timeline = timeline
        self._unsynced: list[Path] = []
        self._changes: list[tuple[int, str]] = []

    def supersede(self, version: int) -> None:
        """Move the files of steps >= `version` aside, because the run resumes from it (idempotent)."""
        files = LineageFiles(self._folder)
        with self._disk_errors():
            for step, _, path in files.list_files():
                if step >= version:
                    (self._folder / ABANDONED).mkdir(exist_ok=True)
                    path.rename(self._folder / ABANDONED / path.name)
        self._changes = files.timelines()

    def write(self, step: int, groups: Sequence[Group], origins: Mapping[str, Sequence[Origin]]) -> None:
        """Write the file of `step`, which trained on `groups`. `origins` are those of their trajectories, by group id. Raises
        `ServiceError` if the disk is full."""
        records = [
            GroupLineage(
                group=group.id,
                state="trained",
                task=group.task_name,
                env=group.env_name,
                order=group.order,
                step=step,
                timeline=self._timeline,
                trajectories=tuple(
                    with_timelines(origin, lambda version: find_timeline(self._changes, version))
                    for origin in sorted(origins[group.id], key=lambda origin: origin.index)
                ),
            )
            for group in groups
        ]
        header = Header(SCHEMA, step, self._timeline, time.time(), tuple(group.id for group in groups))
        path = self._folder / f"step_{step}-{self._timeline}.jsonl.gz"
        with self._disk_errors():
            self._folder.mkdir(
                parents=not self._changes, exist_ok=True
            )  # a run whose folder was deleted does not make it again
            with atomic_write(path) as unfinished, gzip.open(unfinished, "wb", compresslevel=6) as file:
                for line in (header, *records):
                    file.write(msgspec.json.encode(line) + b"\n")
        self._unsynced.append(path)
        if not self._changes or self._changes[-1][1] != self._timeline:
            self._changes.append((step, self._timeline))

    def fsync(self) -> None:
        """Flush everything written so far to disk, so that it survives a power cut. Another thread may write meanwhile."""
        unsynced = list(self._unsynced)
        if not unsynced:
            return
        with self._disk_errors():
            for path in (*unsynced, self._folder):
                fsync(path)
        del self._unsynced[: len(unsynced)]

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ServiceError(
                f"can't write the lineage of a step to {self._folder} ({error}); free space there, or set "
                "checkpointing.checkpoint_dir"
            ) from error
