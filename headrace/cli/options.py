"""What several commands share: their arguments, and how an error is said."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import HeadraceError

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML.", show_default=False)]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]…", help="Overrides, for example grpo.num_prompts_per_step=8.", show_default=False
    ),
]


def say_error(error: HeadraceError) -> None:
    typer.echo(f"error: {error}", err=True)
