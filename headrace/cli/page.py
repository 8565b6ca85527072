"""`headrace page`: print the address of a run's page of curves, with a code that signs a browser in."""

from __future__ import annotations

import typer

from headrace.base.errors import ConfigError, ServiceError
from headrace.cli.common import RunOption
from headrace.launch import runs
from headrace.run import history


def page(run: RunOption) -> None:
    """Print the address of the run's curves. It signs one browser in, once; addresses printed earlier stop working."""
    config = runs.find(run)
    past = history.read(config)
    if past.is_down:
        folder = config.run_folder
        curves = folder / history.CURVES
        raise ServiceError(
            f"run {folder.name} is down ({past.state}), so nothing answers at its page. Its curves: "
            f"{curves if curves.exists() else 'none were drawn'}. What it wrote: headrace samples {folder}. To continue it: "
            f"{runs.resume_hint(config)}"
        )
    if not config.trainer.port:
        raise ConfigError(f"--run {run}: trainer.port is 0, so only the trainer's log has its port; set trainer.port")
    typer.echo(runs.page_address(config))
