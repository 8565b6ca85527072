"""`headrace env`: create, check, calibrate, try and serve an environment, attach one to a run, print the token for that on another machine,
and list a run's environments."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import grpc
import msgspec
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

import headrace
from headrace.base.addresses import LOOPBACK
from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import signature
from headrace.cli import env_calibrate, env_check, env_new, env_try
from headrace.cli.common import WIDTH, App, RunArgument, RunOption, cell, log_lines, plain_table, say
from headrace.cli.status import waits_for
from headrace.config import Config
from headrace.env import environment_file
from headrace.launch import environment_processes, runs
from headrace.launch.buffer import open_buffer
from headrace.net import rpc
from headrace.net.credentials import FILE, Credentials, make_token_source
from headrace.replay import EnvironmentState
from headrace.v1 import reward_pb2, reward_pb2_grpc

_HUB_S = 5.0
_AS_JSON: dict[str, Any] = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
_log = logging.getLogger("headrace.env.environment")

app = App(help="Make a reward of your own; test, try, serve or attach it; list those of a run.", no_args_is_help=True)

Target = Annotated[
    str,
    typer.Argument(
        metavar="FILE.py[:NAME]",
        help="A subclass of headrace.Environment, or a reward function; FILE.py is enough if it has just one.",
    ),
]


@app.command()
def serve(
    target: Target,
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            envvar=environment_processes.PORT,
            help="The port to listen on; 0 chooses a free one and logs it.",
        ),
    ],
    host: Annotated[str, typer.Option(envvar=environment_processes.HOST, help="The host to listen on.")] = LOOPBACK,
    token_file: Annotated[
        str | None,
        typer.Option(envvar=environment_processes.TOKEN_FILE, help="A file with a line `environment NAME TOKEN`."),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM file.")] = None,
) -> None:
    """Serve an environment over gRPC until SIGTERM or Ctrl-C, like headrace.serve."""
    log_lines()
    loaded = environment_file.load(environment_file.complete_target(target))
    headrace.serve(loaded, port, host, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key)


@app.command()
def attach(
    target: Target,
    hub: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The run's reward hub.")],
    name: Annotated[str | None, typer.Option(help="The name in env.NAME; by default the environment's own.")] = None,
    capacity: Annotated[int | None, typer.Option(min=1, help="Samples to work on at a time.")] = None,
    token_file: Annotated[str | None, typer.Option(help="A file with a line `environment NAME TOKEN`.")] = None,
    tls_ca: Annotated[str | None, typer.Option(help="PEM file.")] = None,
    reload: Annotated[bool, typer.Option("--reload", help="Reload the file and attach again when it changes.")] = False,
) -> None:
    """Attach an environment to a run's reward hub until SIGTERM or Ctrl-C, like headrace.attach. It listens on no port."""
    log_lines()
    target = environment_file.complete_target(target)
    file, attached, changed = environment_file.path_of(target), None, True
    while changed:
        seen = signature(file)  # before the file is read, so that a later write counts as another change
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
            _log.error("%s\nThe previous environment stays attached until the file is fixed.", error)
        changed = attached.wait(functools.partial(_differs, file, seen) if reload else lambda: False)


def _differs(file: Path, seen: tuple[int, int, int] | None) -> bool:
    return signature(file) != seen


@app.command("list")
def list_environments(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False
) -> None:
    """Show the environments of a running run as its hubs see them: attached processes, builds, work in progress, and the results of the
    last minute. Also shows which environments the run waits for. Exits with 1 if a hub doesn't answer."""
    config = _find_started(run)
    hubs, away, states = asyncio.run(_read(config))
    if as_json:
        found = {address: MessageToDict(hub, **_AS_JSON)["environments"] for address, hub in hubs.items()}
        typer.echo(json.dumps({"hubs": found, "away": away, "breakers": msgspec.to_builtins(states)}, indent=2))
    else:
        console = Console(width=WIDTH)
        for address, hub in hubs.items():
            if len(hubs) + len(away) > 1:
                say(console, f"hub {address}")
            console.print(environment_table(hub.environments))
        for address, reason in away.items():
            say(console, f"hub {address} doesn't answer ({reason}); restart it, or remove it from reward.address")
        for title, line in waits_for(states):
            say(console, f"{title:14}{line}")
    if away:
        raise typer.Exit(1)


def _find_started(run: str) -> Config:
    """Return the configuration of a run that has been up and has its credentials. Raises `ServiceError` for any other."""
    config = runs.with_credentials(runs.find(run))
    own = config.run_folder.absolute() / FILE
    if config.security.credentials == str(own) and not own.exists():
        raise ServiceError(
            f"run {config.run.id} has no {own}; `headrace up` makes it when it first starts the run: "
            f"{runs.resume_hint(config)}"
        )
    return config


async def _read(
    config: Config,
) -> tuple[dict[str, reward_pb2.ListEnvironmentsResponse], dict[str, str], Sequence[EnvironmentState]]:
    """Return each hub's answer by its address, why other hubs don't answer, and the buffer's states of the environments. Raises
    `ServiceError` if no hub answers."""
    token = make_token_source(config, "reader")
    hubs, away = {}, {}
    for address in config.reward.addresses:
        async with rpc.channel(address, security=config.security, token=token) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            try:
                hubs[address] = await stub.ListEnvironments(reward_pb2.ListEnvironmentsRequest(), timeout=_HUB_S)
            except grpc.aio.AioRpcError as error:
                away[address] = f"{error.code().name}: {error.details()}"
    if not hubs:
        tried = "; ".join(f"at {address} ({reason})" for address, reason in away.items())
        raise ServiceError(f"no hub of run {config.run.id} answers: {tried}; is the run up?")
    async with open_buffer(config) as replay:
        return hubs, away, await replay.environments()


def environment_table(environments: Iterable[reward_pb2.EnvironmentStatus]) -> Table:
    """Return a table with a row for each environment, and below an attached one a row for each process."""
    table = plain_table(
        "environment", "kind", "where", "build", "in hand", "capacity", "scores/s", "p50", "p99", "failed", "state"
    )
    for each in environments:
        kind = reward_pb2.EnvironmentStatus.Kind.Name(each.kind).removeprefix("KIND_").lower().replace("_", " ")
        recent, described = each.recent, each.description
        rate = recent.scored / (recent.window_ms / 1000) if recent.window_ms else 0.0
        where = each.target or (f"{len(each.processes)} processes" if kind == "attached" else "hub")
        counts = f"{each.in_hand}", f"{described.episodes or described.capacity or '-'}", f"{rate:.1f}"
        took = (f"{each_ms:.0f} ms" if recent.scored else "-" for each_ms in (recent.p50_ms, recent.p99_ms))
        state = "ready" if each.ready else each.message
        texts = each.name, kind, where, described.build or "-", *counts, *took, f"{recent.failed}", state
        table.add_row(*map(cell, texts))
        for process in each.processes:
            state = "at work" if process.works else "idle: a newer build gets the work, or the process is leaving"
            counts = f"{process.in_hand}", f"{process.capacity}", ""
            texts = "", "", process.address, process.build or "-", *counts, "", "", "", state
            table.add_row(*map(cell, texts))
    return table


app.command()(env_new.new)
app.command()(env_check.check)
app.command()(env_calibrate.calibrate)
app.command(name="try")(env_try.try_)


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="The environment, as env.NAME names it.")],
    run: RunOption,
) -> None:
    """Print the line `environment NAME TOKEN`, for `headrace.attach(…, token=…)` or its token_file. Its holder may attach as NAME."""
    config = _find_started(run)
    if name not in config.custom:
        known = ", ".join(config.custom) or "none"
        raise ConfigError(
            f"{name}: run {config.run.id} has no environment of this name in its own process; it has {known}"
        )
    role = f"environment {name}"
    typer.echo(f"{role} {Credentials(Path(str(config.security.credentials))).token(role)}")
