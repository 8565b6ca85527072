"""`headrace model NAME DIR`: make a model that needs no download from a hub."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import plugins


def make(
    name: Annotated[str, typer.Argument(help="tiny or smollm2.", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.", show_default=False)],
) -> None:
    """Make a model: `tiny`, a small arithmetic model warmed up on the spot, or `smollm2`, the real SmolLM2-135M-Instruct."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plugins.find("headrace.models", name, extra="trainer")(directory)
    typer.echo(f"{directory}")
