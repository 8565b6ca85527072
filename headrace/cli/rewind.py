"""`headrace rewind`: make a stopped run continue from an older checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ServiceError
from headrace.cli.common import RunArgument
from headrace.launch import runs
from headrace.run import checkpoints as folders
from headrace.run.checkpoints import FolderLock, Start
from headrace.run.journal import JOURNAL, Journal, read_journal, surviving

WHY = "WHY.txt"


def rewind(
    run: RunArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The checkpoint to continue from.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="The folder of RUN, instead of ./runs.", hidden=True)
    ] = None,
) -> None:
    """Move the checkpoints newer than VERSION aside, so that the next start of the run continues from VERSION.

    Nothing is deleted: they go to a folder beside them. The buffer follows when the trainer starts. A run that is still up is refused,
    wherever its trainer runs.
    """
    config = runs.find(run if folder is None else str(folder / run))
    name = config.run_folder.name
    with runs.lock(config), _no_trainer_in(config.checkpoint_folder, name):
        moved, place = set_aside(config.checkpoint_folder, version, datetime.datetime.now())
        if _note(config.run_folder / JOURNAL, version) and not moved:
            _cut(config.checkpoint_folder, version)  # there may be a snapshot of later weights
    if not moved:
        typer.echo(f"run {name}: checkpoint {version} is already the newest")
        return
    typer.echo(f"run {name} continues from checkpoint {version}; newer ones are in {place}: {_join(moved)}")


def _note(journal: Path, version: int) -> bool:
    """Note in the journal that the run is back at `version`, if it tells of later weights, so that all that is shown of the run is of the
    weights that it has now. Returns whether it did."""
    told = any(line.kind == "train" and line.step >= version for line in surviving(read_journal(journal)))
    if told:
        Journal(journal).append("rewind", version, f"rewind-{secrets.token_hex(8)}", {})
    return told


def _cut(checkpoints: Path, version: int) -> None:
    """Cut the chain at `version`."""
    folders.append_start(checkpoints, Start(f"rewind-{secrets.token_hex(8)}", version))


@contextlib.contextmanager
def _no_trainer_in(checkpoints: Path, run: str) -> Iterator[None]:
    """Hold the lock of the folder. Raises `ServiceError` if a trainer has it."""
    try:
        lock = FolderLock(checkpoints)
        holder = lock.try_take()
    except OSError as error:
        raise ServiceError(f"can't lock {checkpoints} ({error}); rewind the run where its trainer runs") from error
    try:
        if holder is not None:
            raise ServiceError(f"a trainer of run {run} is at work in {checkpoints} ({holder}); stop it first")
        yield
    finally:
        lock.release()


def set_aside(checkpoints: Path, version: int, now: datetime.datetime) -> tuple[list[int], Path]:
    """Move the checkpoints newer than `version` to a folder with a note. Returns their versions and the folder.

    The chain is cut first. So no trainer resumes from one of them, and a trainer that wakes up late publishes no other. If this is
    interrupted, the same command finishes the job. Raises `ServiceError` if the checkpoint does not exist, or the folder can't be
    written.
    """
    there = folders.find_published(checkpoints)
    if version not in there:
        raise ServiceError(
            f"{checkpoints} has no checkpoint of version {version}; it has {_join(there)}. The initial model is not a checkpoint: to "
            "start from it, give another run.id"
        )
    place = checkpoints / f"set-aside-{now:%Y%m%d-%H%M%S}"
    written = (re.fullmatch(r"step_(\d+)", path.name) for path in checkpoints.glob("step_*"))  # complete or not
    newer = sorted({step for match in written if match and (step := int(match[1])) > version})
    try:
        if newer:
            place.mkdir(exist_ok=True)
            (place / WHY).write_text(
                f"{now:%Y-%m-%d %H:%M:%S}: `headrace rewind` set the run back to checkpoint {version}. These are the newer "
                f"checkpoints: {_join(newer)}.\nNothing needs them any more. Remove them, or load them like any Hugging Face checkpoint. "
                "To undo this before the run has started again, remove the last line of ../chain.jsonl and that of the run's "
                "metrics.jsonl, and move them back.\n",
                encoding="utf-8",
            )
            _cut(checkpoints, version)
        for step in reversed(newer):
            folders.path_of(checkpoints, step).rename(folders.path_of(place, step))
    except OSError as error:
        raise ServiceError(f"can't set checkpoints aside in {place} ({error}); nothing is lost") from error
    return newer, place


def _join(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "none"
