"""What each step was made of, written beside the checkpoints (`headrace.lineage` says how, and reads it)."""

from __future__ import annotations

import contextlib
import gzip
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.errors import ServiceError
from headrace.lineage import (
    ABANDONED,
    SCHEMA,
    GroupLineage,
    Header,
    LineageFiles,
    Origin,
    timeline_of,
    with_timelines,
)
from headrace.trajectory import Group
from services.trainer.files import force, whole_file


class Lineage:
    """The writer of one trainer: there is one a run.

    A file is there whole or not at all. It survives a power cut once `force` returned, which comes before the checkpoint that
    its step led to: of steps that no checkpoint holds, nothing has to survive.
    """

    def __init__(self, folder: Path, timeline: str) -> None:
        self._folder = folder
        self._timeline = timeline
        self._unforced: list[Path] = []
        self._changes: list[tuple[int, str]] = []

    def supersede(self, version: int) -> None:
        """The run goes on from `version`: what was trained at steps >= version is moved aside (idempotent)."""
        files = LineageFiles(self._folder)
        with self._disk_errors():
            for step, path in files.files():
                if step >= version:
                    (self._folder / ABANDONED).mkdir(exist_ok=True)
                    path.rename(self._folder / ABANDONED / path.name)
        self._changes = files.timelines()

    def write(self, step: int, groups: Sequence[Group], origins: Mapping[str, Sequence[Origin]]) -> None:
        """Step `step` has trained on `groups`; `origins` of each group's trajectories by its id. Raises `ServiceError` for a full disk."""
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
                    with_timelines(origin, lambda version: timeline_of(self._changes, version))
                    for origin in sorted(origins[group.id], key=lambda origin: origin.index)
                ),
            )
            for group in groups
        ]
        header = Header(SCHEMA, step, self._timeline, time.time(), tuple(group.id for group in groups))
        path = self._folder / f"step_{step}-{self._timeline}.jsonl.gz"
        with self._disk_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as unfinished, gzip.open(unfinished, "wb", compresslevel=6) as file:
                for line in (header, *records):
                    file.write(msgspec.json.encode(line) + b"\n")
        self._unforced.append(path)
        if not self._changes or self._changes[-1][1] != self._timeline:
            self._changes.append((step, self._timeline))

    def force(self) -> None:
        """What was written so far outlives a power cut."""
        if not self._unforced:
            return
        with self._disk_errors():
            for path in (*self._unforced, self._folder):
                force(path)
        self._unforced.clear()

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ServiceError(
                f"can't write the lineage of a step to {self._folder} ({error}); free space there, or set "
                "checkpointing.checkpoint_dir"
            ) from error
