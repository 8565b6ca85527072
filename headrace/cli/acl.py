"""`headrace acl CONFIG --credentials FILE`: a Redis ACL with one user per role of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ConfigError
from headrace.cli.common import ConfigArgument, Overrides
from headrace.config import load
from headrace.launch.entry_points import load_entry_point
from headrace.net.credentials import REDIS_ROLES, Credentials, complete


def acl(
    config: ConfigArgument,
    overrides: Overrides = None,
    credentials: Annotated[
        Path,
        typer.Option(
            "--credentials",
            help="File with a line `redis ROLE PASSWORD` for each role. It is created, or completed with random passwords.",
        ),
    ] = ...,  # type: ignore[assignment]
    own_server: Annotated[
        bool,
        typer.Option(
            "--own-server",
            help="The server serves this run alone, so its replay service may load the functions. On a shared server the "
            "administrator loads them (`headrace functions`).",
        ),
    ] = False,
) -> None:
    """Print a Redis ACL file with a user for each role of the run: replay, trainer, rollout, agents, reader, up (all of these), admin."""
    run_id = load(config, overrides or ()).run.id
    if run_id is None:
        raise ConfigError("run.id is not set: give run.id=NAME")
    users = load_entry_point("headrace.tools", "acl", extra="replay")
    complete(credentials, [f"redis {role}" for role in REDIS_ROLES])
    known = Credentials(credentials)
    for line in users(run_id, {role: known.token(f"redis {role}") for role in REDIS_ROLES}, own_server=own_server):
        typer.echo(line)
    typer.echo(f"services find their passwords with security.credentials={credentials}", err=True)
