"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The run's YAML.", show_default=False)]
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value]…", help="Overrides, for example grpo.num_prompts_per_step=8.", show_default=False
    ),
]
