"""`headrace acl CONFIG --passwords FILE`: a Redis ACL with one user per role of a run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from headrace.cli.common import ConfigArgument, Overrides, load_entry_point
from headrace.config import load
from headrace.errors import ConfigError


def acl(
    config: ConfigArgument,
    overrides: Overrides = None,
    passwords: Annotated[
        Path,
        typer.Option(
            "--passwords",
            help="YAML with a password for each role. It is created, or completed with random ones, and readable by you alone.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
) -> None:
    """Print a Redis ACL file with a user for each role of the run: replay, trainer, rollout, reader, up (all of these), admin."""
    run_id = load(config, overrides or ()).run.id
    if run_id is None:
        raise ConfigError("run.id is not set: give run.id=NAME")
    users = load_entry_point("headrace.tools", "acl", extra="replay")
    roles = load_entry_point("headrace.tools", "acl-roles", extra="replay")()
    for line in users(run_id, _passwords(passwords, roles)):
        typer.echo(line)
    typer.echo(
        f"put each service's own login into its replay.redis_url: redis://{run_id}-trainer:PASSWORD@HOST:PORT/0 for the trainer, "
        f"and so on; the passwords are in {passwords}",
        err=True,
    )


def _passwords(path: Path, roles: list[str]) -> dict[str, str]:
    """The passwords in the file, completed with random ones for roles that it doesn't name."""
    try:
        known: Any = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--passwords {path}: can't be read ({error}); give a YAML file of `role: password` lines"
        ) from error
    if not isinstance(known, dict) or not all(isinstance(word, str) and word for word in known.values()):
        raise ConfigError(f"--passwords {path}: not `role: password` lines; put the passwords in quotes")
    unknown = sorted(set(known) - set(roles))
    if unknown:
        raise ConfigError(
            f"--passwords {path}: no roles are called {', '.join(map(str, unknown))}; they are {', '.join(roles)}"
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
