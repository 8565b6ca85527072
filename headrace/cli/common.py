"""Code shared by the commands: arguments, the printing of errors, and the loading of the services' code."""

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

from headrace.base.errors import HeadraceError, MissingPackage
from headrace.base.printable import LineFormatter, printable
from headrace.cli.commands import COMMANDS
from headrace.env.episode import without_keys
from headrace.net.service import importing

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


# The console's width for output that is copied or piped: rich would cut it off at the width of a narrow terminal or a pipe.
WIDTH = 1000


def say(console: Console, line: str, keep: str = "") -> None:
    """Print a line as it is: without markup, without control characters except those in `keep`, and without breaking it at the console's
    width."""
    console.print(printable(line, keep), markup=False, highlight=False, soft_wrap=True)


def plain_table(*columns: str, **options: Any) -> Table:
    """Return a table with these columns and no borders. `options` are passed to rich's table."""
    table = Table(box=None, padding=(0, 2, 0, 0), **options)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def cell(text: str, style: str = "") -> Text:
    """Return a table cell for text from outside, without markup and control characters."""
    return Text(printable(text), style)


def print_error(error: HeadraceError) -> None:
    text = printable(str(error), keep="\n")
    typer.echo(f"error: {text}", err=True)


def log_lines() -> None:
    """Log to standard error, one line per record, without the keys of episodes."""
    handler = logging.StreamHandler()
    handler.addFilter(without_keys)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def load_entry_point(group: str, name: str, extra: str) -> Callable[..., Any]:
    """Load entry point `name` of `group`. In this way `headrace` finds services and imports none.

    Raises `HeadraceError` if the entry point does not exist, and `MissingPackage` if a package that it needs is missing; `extra` names the
    extra to install.
    """
    points = entry_points(group=group)
    if name not in points.names:
        known = ", ".join(sorted(points.names)) or "none; is headrace installed?"
        raise HeadraceError(f"{name!r} is not an entry point of {group} ({known})")
    try:
        with importing():
            loaded: Callable[..., Any] = next(point for point in points if point.name == name).load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "headrace", "headrace_services"):  # Headrace's own module: a bug, not a missing package
            raise
        raise MissingPackage(
            f"{_command(name)} needs the package {missing!r}, which is not installed: pip install 'headrace[{extra}]'"
        ) from error
    return loaded


def _command(otherwise: str) -> str:
    """Return the running command as the user typed it, or `otherwise` outside of one."""
    words = sys.argv[1:3]
    if not words or words[0] not in COMMANDS:
        return otherwise
    is_group = COMMANDS[words[0]].endswith(":app")
    return " ".join(["headrace", *words[: 1 + is_group]])
