"""The `headrace` command: its subcommands, and the exit code of a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import exposure, history
from headrace.cli import (
    acl,
    certs,
    common,
    config,
    credentials,
    data,
    env,
    evaluate,
    export,
    functions,
    groups,
    page,
    plan,
    rescore,
    rewind,
    run_list,
    runs,
    samples,
    serve,
    status,
    up,
)
from headrace.cli.common import ConfigOption, Overrides, RunOption
from headrace.config import load
from headrace.errors import ConfigError, HeadraceError, ReplayUnavailable, Restartable
from headrace.files import is_locked
from headrace.service import EXIT_BUFFER_UNAVAILABLE, EXIT_INTERNAL_ERROR, EXIT_USER_ERROR

_log = logging.getLogger("headrace.security")

SERVICES = {
    "replay": "The replay buffer: its state machine in Redis, the scorer and the HTTP API.",
    "reward": "The gRPC hub of reward environments.",
    "rollout": "One generation replica: a vLLM engine. Start as many as you like, at any time.",
    "agents": "A runner of episodes, and the gateway that their programs call. Start as many as you like, at any time.",
    "trainer": "The trainer; under torchrun, one of its ranks.",
}

app = typer.Typer(
    name="headrace",
    help="Reinforcement-learning post-training for language models as a pipeline of independent services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line. Exits with 1 for an error that the user must fix, 70 and a traceback for an unexpected one."""
    try:
        app()
    except HeadraceError as error:
        common.print_error(error)
        sys.exit(EXIT_USER_ERROR)
    except Exception:  # noqa: BLE001 - the traceback is printed, and the exit code lets a supervisor restart the service
        traceback.print_exc()
        sys.exit(EXIT_INTERNAL_ERROR)


def service_command(name: str) -> Callable[..., None]:
    """`headrace replay|reward|rollout|trainer`: one service as a process of its own."""

    def command(config: ConfigOption, overrides: Overrides = None) -> None:
        loaded = load(config, overrides or ())
        if loaded.run.id is None:
            raise ConfigError("run.id is not set: give run.id=NAME (`headrace up` makes one by itself)")
        common.log_lines()
        exposure.check(loaded, name)
        if loaded.security.credentials is None:
            _log.warning("security.credentials is not set: everybody who reaches this service may use it")
        # Threads that wait for each other must not hold the cores meanwhile, which other services compute on: torch read this when it is
        # imported. Waiting actively, a training step with two threads on two busy cores took four times the CPU time of one.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        service = common.load_entry_point("headrace.services", name, extra=name)
        leads = name == "trainer" and os.environ.get("RANK", "0") == "0"
        # `up` says itself how its run ends
        unsupervised = leads and not is_locked(loaded.run_folder / history.RUN_LOCK)
        noting = runs.unsupervised(loaded, config) if unsupervised else contextlib.nullcontext()
        try:
            with noting:
                service(loaded)
        except ReplayUnavailable as error:
            common.print_error(error)
            raise typer.Exit(EXIT_BUFFER_UNAVAILABLE) from error
        except Restartable as error:
            common.print_error(error)
            raise typer.Exit(EXIT_INTERNAL_ERROR) from error

    return command


def model(
    name: Annotated[str, typer.Argument(help="tiny, tiny-two-turns, tiny-calculator or smollm2.", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.", show_default=False)],
) -> None:
    """Make a model: `tiny`, a small arithmetic model warmed up on the spot, `tiny-two-turns`, which was asked again after wrong answers,
    `tiny-calculator`, which seldom calls the tool that it has, or `smollm2`, the real SmolLM2-135M-Instruct."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    common.load_entry_point("headrace.models", name, extra="trainer")(directory)
    typer.echo(f"{directory}")


def replay_step(
    step: Annotated[int, typer.Argument(metavar="N", min=0, help="The step.", show_default=False)],
    run: RunOption,
    tolerance: Annotated[
        float,
        typer.Option(min=0.0, help="Largest difference, relative to the logged value or to 0.01, whichever is more."),
    ] = 1e-3,
) -> None:
    """Recompute loss, gradient norm and reward of a step that the buffer retained (replay.retain_steps), from its checkpoint.

    Exits with 1 if one of them differs from the logged value by more than the tolerance.
    """
    config = runs.find(run)
    recompute = common.load_entry_point("headrace.tools", "replay-step", extra="trainer")

    async def work() -> Any:
        async with runs.open_buffer(config) as replay:
            return await recompute(config, replay, step)

    result = asyncio.run(work())
    typer.echo(f"step {step}: {result.trajectories} trajectories of {result.groups} groups, weights {result.weights}")
    typer.echo(f"{'':10}{'logged':>16}{'recomputed':>16}{'difference':>14}")
    for name, logged, now in result.values:
        typer.echo(f"{name:10}{logged:16.9g}{now:16.9g}{now - logged:14.3g}")
    differing = result.differing(tolerance)
    if differing:
        typer.echo(f"{', '.join(differing)}: more than the tolerance {tolerance:g} away from what was logged", err=True)
        raise typer.Exit(1)
    typer.echo(f"all within the tolerance {tolerance:g}")


app.command()(up.up)
app.command()(status.status)
app.command()(samples.samples)
app.command()(rewind.rewind)
app.command()(rescore.rescore)
app.command(name="eval")(evaluate.evaluate)
app.command()(serve.serve)
app.command()(export.export)
for service_name, service_help in SERVICES.items():
    app.command(name=service_name, help=service_help)(service_command(service_name))
app.add_typer(env.app, name="env")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(groups.app, name="groups")
app.add_typer(run_list.app, name="runs")
app.add_typer(plan.app, name="plan")
app.command(name="replay-step")(replay_step)
app.command()(model)
app.command()(acl.acl)
app.command()(functions.functions)
app.command()(certs.certs)
app.command()(credentials.credentials)
app.command()(page.page)
