"""`headrace acl CONFIG --passwords FILE`: users of the Redis server for one run, each with the rights of its role."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from headrace.cli import plugins
from headrace.cli.options import ConfigArgument, Overrides
from headrace.config import load
from headrace.errors import ConfigError


def acl(
    config: ConfigArgument,
    overrides: Overrides = None,
    passwords: Annotated[
        Path,
        typer.Option(
            "--passwords",
            help="YAML with a password for each role; made, or completed with random ones, readable by you alone.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
) -> None:
    """Print a Redis ACL file with a user for each role of the run: replay, trainer, rollout, reader, up (all of these), admin."""
    run_id = load(config, overrides or ()).run.id
    if run_id is None:
        raise ConfigError("run.id is not set: give run.id=NAME")
    users = plugins.find("headrace.tools", "acl", extra="replay")
    roles = plugins.find("headrace.tools", "acl-roles", extra="replay")()
    for line in users(run_id, _passwords(passwords, roles)):
        typer.echo(line)
    typer.echo(
        f"each service's own login goes into its replay.redis_url: redis://{run_id}-trainer:PASSWORD@HOST:PORT/0 for the trainer, "
        f"and so on; passwords are in {passwords}",
        err=True,
    )


def _passwords(path: Path, roles: list[str]) -> dict[str, str]:
    """What the file says, and random ones for roles it does not name."""
    try:
        known: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--passwords {path}: can't be read ({error}); give a YAML file of `role: password` lines"
        ) from error
    if not isinstance(known, dict) or not all(isinstance(word, str) and word for word in known.values()):
        raise ConfigError(f"--passwords {path}: not `role: password` lines; put the passwords in quotes")
    strange = sorted(set(known) - set(roles))
    if strange:
        raise ConfigError(
            f"--passwords {path}: no roles are called {', '.join(map(str, strange))}; they are {', '.join(roles)}"
        )
    complete = {role: known.get(role) or secrets.token_urlsafe(32) for role in roles}
    if complete != known:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yaml.safe_dump(complete, file, sort_keys=False)
        except OSError as error:
            raise ConfigError(f"--passwords {path}: can't be written ({error.strerror}); give another file") from error
    return complete
