"""`headrace migrate`: write the configuration of a run of TRL or verl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ConfigError
from headrace.base.printable import printable
from headrace.config.migrate import trl, verl
from headrace.config.migrate.draft import Draft

app = typer.Typer(help="Write the configuration of a run of TRL or verl.", no_args_is_help=True)

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="The file to write, which must not exist; by default stdout."),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Trainer steps of the run, for schedules, if only the data decides it.")
]


@app.command("trl")
def of_trl(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|COMMAND", help="A script that calls GRPOTrainer, or the command that runs one, in quotes."
        ),
    ],
    out: Out = None,
    steps: Steps = None,
    processes: Annotated[int, typer.Option(min=1, help="The processes that accelerate starts.")] = 1,
) -> None:
    """Write the configuration of a run of TRL's GRPOTrainer. The script is read, and never executed."""
    _write(trl.migrate(source, processes, steps, out.parent if out else Path()), source, out)


@app.command("verl")
def of_verl(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.sh|COMMAND", help="A script with verl's overrides, or a command or the overrides, in quotes."
        ),
    ],
    out: Out = None,
    steps: Steps = None,
) -> None:
    """Write the configuration of a run of verl. The script is read, and never executed."""
    _write(verl.migrate(source, steps), source, out)


def _write(draft: Draft, source: str, out: Path | None) -> None:
    if problem := draft.problem():
        draft.add(f"what makes it a configuration: {problem}")
    text = draft.text(" ".join(source.split())[:100])
    files: dict[Path, str] = {}
    if out is None:
        for name in draft.files:
            draft.add(f"{name}, which has what the run needs of the script; --out writes it beside the configuration")
        typer.echo(text, nl=False)
    else:
        files = {out: text, **{out.parent / name: content for name, content in draft.files.items()}}
        if there := [str(path) for path in files if path.exists()]:  # all are written, or none
            raise ConfigError(f"--out: {' and '.join(there)} can't be written (File exists); give a new file")
        for path, content in files.items():
            _create(path, content)
    counts = (
        f"{len(draft.settings)} keys written, {len(draft.same)} the same by default, {len(draft.replaced)} not needed"
    )
    typer.echo(f"{counts}, {len(draft.missing)} without a counterpart, {len(draft.to_add)} to add", err=True)
    for title, notes in (("no counterpart", draft.missing), ("to add", draft.to_add)):
        for note in notes:
            typer.echo(printable(f"{title}: {note}"), err=True)
    if out is not None:
        written = ", ".join(str(path) for path in files)
        typer.echo(f"{written}; what is still missing: headrace config check {out}", err=True)


def _create(path: Path, content: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(
            f"--out: {path} can't be written ({error.strerror}); give a new file in an existing folder"
        ) from error
