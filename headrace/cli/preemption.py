"""`headrace preemption-watch`: run a command, and stop it in order when the cloud is about to take the machine away."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Annotated

import typer

from headrace.base.errors import ConfigError, ServiceError
from headrace.launch.preemption import Cloud, Notices

_LOOK_S = 5.0


def preemption_watch(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What to run, after --: headrace up run.yaml, or a service."),
    ],
    cloud: Annotated[Cloud, typer.Option(help="Whose machine this is.")],
    server: Annotated[
        str | None, typer.Option("--metadata", help="Another address of the metadata server.", hidden=True)
    ] = None,
) -> None:
    """Run COMMAND, and send it SIGTERM when the cloud gives notice that it takes this machine away: the trainer ends its step, and its
    checkpoint reaches checkpointing.store while there is time. Exits with the code of COMMAND."""
    notices = Notices(cloud, server)
    notices.find()  # a wrong --cloud would be noticed when it is too late
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise ConfigError(f"{command[0]} can't be started ({error.strerror}); give a command after --") from error
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command too
    failing = False
    while process.poll() is None:
        try:
            if notice := notices.find():
                say(f"{cloud} takes this machine away: {notice}; stopping {command[0]}")
                process.terminate()
                signal.signal(
                    signal.SIGTERM, signal.SIG_IGN
                )  # of the shutdown: a second one would end `headrace up` at once
                break
            failing = False
        except ServiceError as error:
            if not failing:
                say(f"warning: {error}; asking again")
            failing = True
        try:
            process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            continue
    code = process.wait()
    raise typer.Exit(128 - code if code < 0 else code)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
