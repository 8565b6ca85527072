"""Snapshots of the trainer between its checkpoints, in memory that outlives its processes (`checkpointing.snapshot_dir`).

A rank that dies takes its part of the weights and moments with it, and the others end. The next start continues from the newest checkpoint,
and takes the steps since then again. A snapshot of every step makes that one step. It has the files of a checkpoint, without digests, and
nothing waits until it is on a disk:

    step_12-93ab…/              of version 12, made on this timeline; renamed once every rank has written its part
    .unfinished-step_13-93ab…/

A snapshot publishes nothing: no step is committed because of it. A trainer that starts first turns it into a checkpoint (`adopt`), and then
continues from that, as from any other. So a machine that is lost with its memory loses no more than without snapshots, and the buffer never
learns of them. The chain of the checkpoints decides whether a snapshot is the run's (`headrace.run.checkpoints`): one of a trainer that was
frozen and wakes up late, or from before a `headrace rewind`, never is.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.run import checkpoints as folders
from headrace.run import snapshots
from headrace_services.trainer.control.checkpoint import (
    Checkpoints,
    CheckpointState,
    disk_errors,
    read_state,
    write_state,
)
from headrace_services.trainer.distributed.ranks import spans_hosts

log = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step_[0-9]+-[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """The snapshots of a run in `folder`, between its `checkpoints`."""

    folder: Path
    checkpoints: Checkpoints

    @classmethod
    def of(cls, config: Config, checkpoints: Checkpoints) -> Snapshots | None:
        """Return those of a run; None if it takes none. Raises `ServiceError` if the folder can't be made, or not all ranks see it."""
        folder = snapshots.locate(config)
        if folder is None:
            return None
        if spans_hosts(os.environ):
            raise ServiceError(
                f"checkpointing.snapshot_dir {config.checkpointing.snapshot_dir}: the trainer's ranks are on several hosts, and snapshots "
                "are on one; set it to null"
            )
        with disk_errors(folder):
            snapshots.make(folder)
        return cls(folder, checkpoints)

    def begin(self, version: int, timeline: str) -> Path:
        """Make an empty folder for the learner's files. The newest snapshot stays, and what else is there is removed. Raises `ServiceError`
        if another trainer has taken over, or the folder can't be made."""
        self._remove(timeline, but=[path for path in self.folder.iterdir() if _COMPLETE.fullmatch(path.name)])
        unfinished = self.folder / folders.unfinished_name(version, timeline)
        with disk_errors(self.folder):
            unfinished.mkdir()
        return unfinished

    def publish(self, state: CheckpointState, ledger: Mapping[int, Sequence[str]], files: Mapping[str, bytes]) -> None:
        """Turn the folder from `begin`, now complete, into the newest snapshot, and remove the one before. The arguments are those of
        `Checkpoints.publish`. Raises as `begin` does."""
        unfinished = self.folder / folders.unfinished_name(state.version, state.timeline)
        complete = self.folder / f"step_{state.version}-{state.timeline}"
        with disk_errors(self.folder):
            write_state(unfinished, state, ledger, files)
            unfinished.rename(complete)
        self._remove(state.timeline, but=[complete])

    def adopt(self) -> int | None:
        """Turn the newest snapshot to which the checkpoints lead into one of them. Returns its version, None if there is no such snapshot.
        Whatever is in the folder is removed. Raises `ServiceError` as `Checkpoints.publish` does."""
        complete = (path for path in self.folder.iterdir() if _COMPLETE.fullmatch(path.name))
        ours = {read_state(path).version: path for path in complete if self.checkpoints.leads_to(path)}
        version = max(ours, default=None)
        if version is not None:
            self.checkpoints.adopt(ours[version])
            log.info("continuing from the snapshot of version %d, which is a checkpoint now", version)
        for path in self.folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return version

    def remove(self) -> None:
        """Remove the folder, once the run's newest weights are in a checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _remove(self, timeline: str, but: Collection[Path]) -> None:
        """Remove what is in the folder and not `but`, unless another trainer has taken over: a trainer that wakes up late then removes
        nothing of its successor's. Raises `ServiceError`."""
        others = [path for path in self.folder.iterdir() if path not in but]
        self.checkpoints.require_newest(timeline)
        for path in others:
            shutil.rmtree(path, ignore_errors=True)
