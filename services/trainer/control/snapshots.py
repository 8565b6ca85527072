"""Snapshots of the trainer between its checkpoints, in memory that outlives its processes (`checkpointing.snapshot_dir`).

A rank that dies takes its part of the weights and moments with it, and the others end. The next start continues from the newest checkpoint,
and takes the steps since then again. A snapshot of every step makes that one step. It has the files of a checkpoint, without digests, and
nothing waits until it is on a disk:

    step_12-93ab…/              of version 12, made on this timeline; renamed once every rank has written its part
    .unfinished-step_13-93ab…/

Each host of the ranks has such a folder, with what its ranks wrote. Only rank 0's host renames: the newest that is complete there is
complete everywhere. The other hosts keep the one before while the next is written, for which rank 0 has to have completed it.

A snapshot publishes nothing: no step is committed because of it. A trainer that starts first turns it into a checkpoint (`adopt`), and then
continues from that, as from any other. So a machine that is lost with its memory loses no more than without snapshots, and the buffer never
learns of them. The chain of the checkpoints decides whether a snapshot is the run's (`headrace.run.checkpoints`): one of a trainer that was
frozen and wakes up late, or from before a `headrace rewind`, never is.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from headrace.base.files import fsync
from headrace.config import Config
from headrace.run import checkpoints as folders
from headrace.run import snapshots

from .checkpoint import (
    Checkpoints,
    CheckpointState,
    disk_errors,
    read_state,
    write_state,
)

_COMPLETE = re.compile(r"step_[0-9]+-[0-9a-f]+")
_VERSION = re.compile(r"step_([0-9]+)-")


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """The snapshots of a run between its `checkpoints`: what the ranks of this host write of them, in `folder`."""

    folder: Path
    checkpoints: Checkpoints

    @classmethod
    def of(cls, config: Config, checkpoints: Checkpoints) -> Snapshots | None:
        """Return those of a run; None if it takes none. Raises `ServiceError` if the folder can't be made."""
        folder = snapshots.locate(config)
        if folder is None:
            return None
        with disk_errors(folder):
            snapshots.make(folder)
        return cls(folder, checkpoints)

    def begin(self, version: int, timeline: str) -> Path:
        """Make an empty folder for the learner's files. The newest snapshot stays, and what else is there is removed. Raises `ServiceError`
        if another trainer has taken over, or the folder can't be made."""
        before = [*self.folder.iterdir()]
        self._remove(timeline, but=_complete(before) or sorted(before, key=_version)[-1:])
        unfinished = self.locate_unfinished(version, timeline)
        with disk_errors(self.folder):
            unfinished.mkdir()
        return unfinished

    def locate_unfinished(self, version: int, timeline: str) -> Path:
        """Return the folder that `begin(version, timeline)` makes, into which every rank of this host saves."""
        return self.folder / folders.unfinished_name(version, timeline)

    def publish(self, state: CheckpointState, ledger: Mapping[int, Sequence[str]], files: Mapping[str, bytes]) -> None:
        """On rank 0's host: turn the folder from `begin`, now complete on all hosts, into the newest snapshot, and remove the one before.
        The arguments are those of `Checkpoints.publish`. Raises as `begin` does."""
        unfinished = self.locate_unfinished(state.version, state.timeline)
        complete = self.folder / f"step_{state.version}-{state.timeline}"
        with disk_errors(self.folder):
            write_state(unfinished, state, ledger, files)
            unfinished.rename(complete)
        self._remove(state.timeline, but=[complete])

    def newest(self) -> CheckpointState | None:
        """On rank 0's host: return the state of the newest snapshot to which the checkpoints lead, None if there is none."""
        states = (read_state(path) for path in _complete(self.folder.iterdir()) if self.checkpoints.leads_to(path))
        return max(states, key=lambda state: state.version, default=None)

    def locate(self, version: int, timeline: str) -> Path:
        """Return the folder of a snapshot that is complete on rank 0's host; there may be none on this one."""
        complete = self.folder / f"step_{version}-{timeline}"
        return complete if complete.exists() else self.locate_unfinished(version, timeline)

    def list_files(self, version: int, timeline: str) -> list[str]:
        """Return the paths of the files that this host has of it, relative to its folder."""
        folder = self.locate(version, timeline)
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    def copy(self, version: int, timeline: str, target: Path) -> None:
        """Copy what this host has of it to `target`, on a disk. Raises `ServiceError` if it can't be written."""
        with disk_errors(target):
            for name in self.list_files(version, timeline):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.locate(version, timeline) / name, target / name)
                fsync(target / name)  # the rank that publishes can't flush another machine's writes

    def clear(self) -> None:
        """Remove whatever is in the folder."""
        for path in self.folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)

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


def _complete(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if _COMPLETE.fullmatch(path.name)]


def _version(folder: Path) -> int:
    found = _VERSION.search(folder.name)
    return int(found[1]) if found else -1
