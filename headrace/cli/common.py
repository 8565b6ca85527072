"""What the commands share: their arguments, how they print an error, and how they load the services' code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.episode import without_keys
from headrace.errors import HeadraceError, MissingPackage
from headrace.printable import LineFormatter, printable
from headrace.service import importing

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML.", show_default=False)]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]…", help="Overrides, for example grpo.num_prompts_per_step=8.", show_default=False
    ),
]
RunOption = Annotated[
    str, typer.Option("--run", metavar="RUN", help="The run's folder, or its id under ./runs.", show_default=False)
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's folder, or its id under ./runs.", show_default=False)
]


# Of a console for what is copied or piped: rich would fit it to a narrow terminal or a pipe, and cut it off.
WIDTH = 1000


def say(console: Console, line: str, keep: str = "") -> None:
    """Print a line as it is: no markup, no control characters but those to `keep`, no line breaks at the width of the console."""
    console.print(printable(line, keep), markup=False, highlight=False, soft_wrap=True)


def plain_table(*columns: str, **options: Any) -> Table:
    """A table without borders, and with these columns; `options` are those of rich's table."""
    table = Table(box=None, padding=(0, 2, 0, 0), **options)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def cell(text: str, style: str = "") -> Text:
    """The cell of a table with what others wrote: no markup, no control characters."""
    return Text(printable(text), style)


def print_error(error: HeadraceError) -> None:
    text = printable(str(error), keep="\n")
    typer.echo(f"error: {text}", err=True)


def log_lines() -> None:
    """Log to standard error, a record a line, without the keys of episodes."""
    handler = logging.StreamHandler()
    handler.addFilter(without_keys)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def load_entry_point(group: str, name: str, extra: str) -> Callable[..., Any]:
    """Load entry point `name` of `group`: `headrace` finds services this way and imports none.

    Raises `HeadraceError` if there is no such entry point, and `MissingPackage` if a package that it needs is missing; `extra` is what to
    install then.
    """
    points = entry_points(group=group)
    if name not in points.names:
        known = ", ".join(sorted(points.names)) or "none; is headrace installed?"
        raise HeadraceError(f"{name!r} is not one of {group} ({known})")
    try:
        with importing():
            loaded: Callable[..., Any] = next(point for point in points if point.name == name).load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "headrace", "headrace_services"):  # our own: a bug, not a missing package
            raise
        raise MissingPackage(
            f"{_command(name)} needs the package {missing!r}, which is not installed: pip install 'headrace[{extra}]'"
        ) from error
    return loaded


def _command(otherwise: str) -> str:
    """The command that runs, as it is typed; `otherwise` outside of one."""
    from headrace.cli.app import COMMANDS  # which imports this module

    words = sys.argv[1:3]
    if not words or words[0] not in COMMANDS:
        return otherwise
    is_group = COMMANDS[words[0]].endswith(":app")
    return " ".join(["headrace", *words[: 1 + is_group]])
