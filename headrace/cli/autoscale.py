"""`headrace autoscale`: as many replicas as a run that is up wants, on this machine or by a batch system."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Annotated

import typer

from headrace.base.errors import ConfigError
from headrace.base.printable import printable
from headrace.cli.common import RunArgument
from headrace.config import Config
from headrace.launch import device_plan, runs
from headrace.launch.autoscaler import Further, Jobs, Processes, replica_command
from headrace.launch.autoscaler import autoscale as keep
from headrace.launch.supervisor import Supervisor, child_environ
from headrace.net.credentials import buffer_url
from headrace.net.service import stop_on_signals
from headrace.replay import ReplayClient
from headrace.run import history


def autoscale(
    run: RunArgument,
    most: Annotated[int, typer.Option("--max", min=1, help="The most replicas, those of `headrace up` included.")],
    devices: Annotated[
        str | None, typer.Option(metavar="N,…", help="GPUs of this machine that further replicas may take.")
    ] = None,
    submit: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Start a replica by this command, which prints the job's id last."),
    ] = None,
    cancel: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="End the job {id} by this command, with SIGTERM.")
    ] = None,
) -> None:
    """Start further replicas of a run that is up while its trainer waits for generation, and end them when fewer do as well.

    It ends only what it started, and all of it at Ctrl-C or when the run is over. An ended replica gives back its groups with what it has
    generated.
    """
    config = runs.find(run)
    if history.judge(config, [], None).is_down:
        raise ConfigError(f"{run} is not up; start it with `headrace up {config.run_folder / runs.SAVED}`")
    if most <= config.rollout.replicas:
        raise ConfigError(
            f"--max {most}: `headrace up` has started {config.rollout.replicas} replicas; give more than that"
        )
    if (submit is None) != (cancel is None):
        raise ConfigError(
            "--submit and --cancel belong together: what starts a job has to be ended by something; give both"
        )
    if submit is not None and devices is not None:
        raise ConfigError(
            f"--devices {devices} are GPUs of this machine, and --submit starts replicas elsewhere; give one of the two"
        )
    lock, taken = config.run_folder / ".autoscale.lock", f"run {config.run.id} has an autoscaler already"
    with runs.held(lock, taken, "stop that one first"):
        asyncio.run(_keep(config, most, devices, submit, cancel))


async def _keep(config: Config, most: int, devices: str | None, submit: str | None, cancel: str | None) -> None:
    def report(line: str) -> None:
        typer.echo(printable(line), err=True)

    supervisor = Supervisor(child_environ(os.environ, config.variables), report)
    try:
        saved = config.run_folder.absolute() / runs.SAVED
        further: Further
        if submit is not None and cancel is not None:
            further = Jobs(submit, cancel, saved.parent / "autoscale.jobs")
        else:
            slices = _slices(config, devices, most)
            further = Processes(supervisor, replica_command(saved), saved.parent / "logs", slices)
        async with contextlib.aclosing(
            await ReplayClient.connect(buffer_url(config, "reader"), config.run.id)
        ) as client:
            await keep(config, client, further, most, stop_on_signals(), report)
    finally:
        supervisor.close()


def _slices(config: Config, devices: str | None, most: int) -> list[str] | None:
    """Return the devices of each further replica on this machine; None if replicas take none. Raises `ConfigError`."""
    size, further = config.policy.generation.vllm_cfg.tensor_parallel_size, most - config.rollout.replicas
    if devices is None:
        if device_plan.has_gpus_for_replicas(config.run_folder):
            raise ConfigError(
                f"the replicas of this run are on GPUs; give those of {further} more with --devices, {size} for each"
            )
        return None
    names = [name.strip() for name in devices.split(",")]
    if len(set(names)) < len(names) or not all(names) or len(names) < further * size:
        raise ConfigError(
            f"--devices {devices}: --max {most} needs {further * size} different GPUs for {further} further replicas, {size} for each"
        )
    return [",".join(names[start : start + size]) for start in range(0, further * size, size)]
