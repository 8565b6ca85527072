"""`headrace model`: make the models of the examples."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from headrace.launch.entry_points import load_entry_point


def model(
    name: Annotated[str, typer.Argument(help="tiny, tiny-two-turns, tiny-calculator or smollm2.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")],
) -> None:
    """Make a model: `tiny`, a small arithmetic model that is warmed up now; `tiny-two-turns`, which was asked again after wrong answers;
    `tiny-calculator`, which seldom calls its tool; or `smollm2`, the real SmolLM2-135M-Instruct."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    load_entry_point("headrace.models", name, extra="trainer")(directory)
    typer.echo(f"{directory}")
