"""What the commands share: their arguments, how they print an error, and how they load the services' code."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import HeadraceError
from headrace.printable import printable

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


def print_error(error: HeadraceError) -> None:
    text = printable(str(error), keep="\n")
    typer.echo(f"error: {text}", err=True)


def load_entry_point(group: str, name: str, extra: str) -> Callable[..., Any]:
    """Load entry point `name` of `group`: `headrace` finds services this way and imports none.

    Raises `HeadraceError` if there is no such entry point, or if a package that it needs is missing; `extra` is what to install then.
    """
    points = entry_points(group=group)
    if name not in points.names:
        known = ", ".join(sorted(points.names)) or "none; is headrace installed?"
        raise HeadraceError(f"{name!r} is not one of {group} ({known})")
    try:
        loaded: Callable[..., Any] = next(point for point in points if point.name == name).load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "headrace", "headrace_services"):  # our own: a bug, not a missing package
            raise
        raise HeadraceError(
            f"{name} needs the package {missing!r}, which is not installed: pip install 'headrace[{extra}]'"
        ) from error
    return loaded
