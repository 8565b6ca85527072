"""`headrace env token`: what a process on another machine needs in order to attach an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import env_check, env_new, env_try, runs
from headrace.cli.common import RunOption
from headrace.credentials import Credentials
from headrace.errors import ConfigError

app = typer.Typer(help="Environments of a run.", no_args_is_help=True)


@app.callback()
def environments() -> None:
    """Environments of a run."""


app.command()(env_new.new)
app.command()(env_check.check)
app.command(name="try")(env_try.try_)


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="The environment, as env.NAME names it.", show_default=False)],
    run: RunOption,
) -> None:
    """Print the line `environment NAME TOKEN`, for `headrace.attach(…, token=…)` or its token_file. Who has it may attach as NAME."""
    config = runs.with_credentials(runs.find(run))
    if name not in config.env or not config.env[name].is_served:
        known = ", ".join(other for other, env in config.env.items() if env.is_served) or "none"
        raise ConfigError(
            f"{name}: run {config.run.id} has no such environment in a process of its own (it has {known})"
        )
    role = f"environment {name}"
    typer.echo(f"{role} {Credentials(Path(str(config.security.credentials))).token(role)}")
