"""`headrace page`: print the address of a run's page of curves, with a code that signs a browser in."""

from __future__ import annotations

import typer

from headrace.base.errors import ConfigError
from headrace.cli.common import RunOption
from headrace.launch import runs


def page(run: RunOption) -> None:
    """Print the address of the run's curves. It signs one browser in, once; addresses printed earlier stop working."""
    config = runs.find(run)
    if not config.trainer.port:
        raise ConfigError(f"--run {run}: trainer.port is 0, so only the trainer's log has its port; set trainer.port")
    typer.echo(runs.page_address(config))
