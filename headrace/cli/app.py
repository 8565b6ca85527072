"""The commands in one place, and how a failure leaves the process: `error: …` and exit 1, or a traceback for what nobody foresaw."""

from __future__ import annotations

import sys

import typer

from headrace.cli import config, model, service
from headrace.errors import HeadraceError

app = typer.Typer(
    name="headrace",
    help="Reinforcement-learning post-training for language models as a pipeline of independent services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
service.add_to(app)
app.add_typer(config.app, name="config")
app.command(name="model")(model.make)


def main() -> None:
    try:
        app()
    except HeadraceError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(1)
