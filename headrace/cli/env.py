"""`headrace env`: serve an environment, attach one to a run, and the token that this takes on another machine."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Annotated

import typer

import headrace
from headrace import environment_file
from headrace.addresses import LOOPBACK
from headrace.cli import environment, runs
from headrace.cli.common import RunOption, log_lines
from headrace.credentials import Credentials
from headrace.errors import ConfigError

_log = logging.getLogger("headrace.environment")

app = typer.Typer(help="Environments: serve one, attach one to a run.", no_args_is_help=True)

Target = Annotated[
    str, typer.Argument(metavar="FILE.py:CLASS", help="A subclass of headrace.Environment.", show_default=False)
]


@app.command()
def serve(
    target: Target,
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            envvar=environment.PORT,
            help="Where it listens; 0 takes a free one, and logs it.",
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(envvar=environment.HOST, help="Where it listens.")] = LOOPBACK,
    token_file: Annotated[
        str | None,
        typer.Option(envvar=environment.TOKEN_FILE, help="Has a line `environment NAME TOKEN`.", show_default=False),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file.", show_default=False)] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file.", show_default=False)] = None,
) -> None:
    """Serve an environment over gRPC until SIGTERM or Ctrl-C, as headrace.serve does."""
    log_lines()
    headrace.serve(environment_file.load(target), port, host, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key)


@app.command()
def attach(
    target: Target,
    hub: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The run's reward hub.", show_default=False)],
    name: Annotated[
        str | None, typer.Option(help="As env.NAME names it; otherwise its own name.", show_default=False)
    ] = None,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Samples that it works on at a time.", show_default=False)
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="Has a line `environment NAME TOKEN`.", show_default=False)
    ] = None,
    tls_ca: Annotated[str | None, typer.Option(help="PEM file.", show_default=False)] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Load the file again, and attach anew, when it changes.")
    ] = False,
) -> None:
    """Attach an environment to a run's reward hub until SIGTERM or Ctrl-C, as headrace.attach does. It listens nowhere."""
    log_lines()
    file, attached, changed = environment_file.path_of(target), None, True
    while changed:
        seen = _stamp(file)  # before it is read: what is written meanwhile is another change
        try:
            loaded = environment_file.load(target)
            name = name or loaded.label
            attached = headrace.attach(
                hub, loaded, name, capacity=capacity, token_file=token_file, tls_ca=tls_ca, wait=False
            )
            _log.info("environment %s: %s, build %s", name, target, loaded.build)
        except ConfigError as error:
            if attached is None:
                raise
            _log.error("%s\nThe former one goes on until the file is repaired.", error)
        changed = attached.wait(functools.partial(_differs, file, seen) if reload else lambda: False)


def _differs(file: Path, seen: tuple[int, ...]) -> bool:
    return _stamp(file) != seen


def _stamp(file: Path) -> tuple[int, ...]:
    """What changes with the file; nothing while it isn't there."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


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
