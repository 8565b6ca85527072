"""`headrace rewind`: make a stopped run continue from an older checkpoint."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import runs
from headrace.config import load
from headrace.errors import ServiceError

WHY = "WHY.txt"


def rewind(
    run_id: Annotated[
        str, typer.Argument(metavar="RUN_ID", help="The run, which must be stopped.", show_default=False)
    ],
    version: Annotated[
        int, typer.Argument(metavar="VERSION", help="The checkpoint to go on from.", show_default=False)
    ],
    folder: Annotated[Path, typer.Option("--dir", help="The folder of runs (run.dir).")] = Path("runs"),
) -> None:
    """Move the checkpoints newer than VERSION aside, so that the next start of the run continues from VERSION.

    Nothing is deleted: they go to a folder beside them. The buffer follows when the trainer starts.
    """
    saved = folder / run_id / runs.SAVED
    if not saved.exists():
        known = sorted(path.parent.name for path in folder.glob(f"*/{runs.SAVED}"))
        raise ServiceError(
            f"{folder} holds no run {run_id!r} ({', '.join(known) or 'none at all'}); --dir names another folder of runs"
        )
    config = load(saved, [f"run.dir={folder}"], environ={})  # the run may have been started from another directory
    with runs.locked(config):
        moved, place = set_aside(config.checkpoint_folder, version, datetime.datetime.now())
    if not moved:
        typer.echo(f"run {run_id}: checkpoint {version} is the newest already")
        return
    typer.echo(f"run {run_id} goes on from checkpoint {version}; set aside in {place}: {_listed(moved)}")


def set_aside(checkpoints: Path, version: int, now: datetime.datetime) -> tuple[list[int], Path]:
    """Move the checkpoints newer than `version` to a folder with a note; returns their versions and the folder.

    The newest is moved first: if this is interrupted, the rest is still a valid history, and the same command finishes the job.
    Raises `ServiceError` if there is no such checkpoint, or the folder can't be written.
    """
    there = published(checkpoints)
    if version not in there:
        raise ServiceError(
            f"{checkpoints} holds no checkpoint of version {version}: {_listed(sorted(there))}. The initial model is none: to start "
            "from it, give run.id another name"
        )
    place = checkpoints / f"set-aside-{now:%Y%m%d-%H%M%S}"
    newer = [step for step in _steps(checkpoints) if step > version]
    try:
        if newer:
            place.mkdir(exist_ok=True)
            (place / WHY).write_text(
                f"{now:%Y-%m-%d %H:%M:%S}: the run was set back to checkpoint {version} by `headrace rewind`. These are the newer "
                f"ones: {_listed(newer)}.\nNothing needs them any more; remove them, or load them as any Hugging Face checkpoint. A "
                "trainer that finds one of them among the others again goes on from it.\n",
                encoding="utf-8",
            )
        for step in reversed(newer):
            (checkpoints / f"step_{step}").rename(place / f"step_{step}")
    except OSError as error:
        raise ServiceError(f"can't set checkpoints aside in {place} ({error}); nothing is lost") from error
    return newer, place


def published(checkpoints: Path) -> dict[int, Path]:
    """Complete checkpoints, by version."""
    return {step: path for step, path in _steps(checkpoints).items() if (path / "state.json").is_file()}


def _steps(checkpoints: Path) -> dict[int, Path]:
    """Checkpoint folders, complete or not, oldest first."""
    named = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in checkpoints.glob("step_*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def _listed(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "there is none"
