"""`headrace deploy`: what runs a configuration on several machines."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ConfigError
from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.cli.common import MOST_GPUS, App, ConfigArgument, Overrides
from headrace.config import Config, load
from headrace.config.yaml_text import dump_value
from headrace.launch import preflight, runs, skypilot, slurm
from headrace.launch.chart_values import Cluster, chart_values
from headrace.launch.hosts import Host, check, parse_hosts, place, refuse_given
from headrace.launch.ssh import SshRun

app = App(help="Run a configuration on several machines, or write what runs it on a cluster.", no_args_is_help=True)


@app.command("slurm")
def write_slurm(
    config: ConfigArgument,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 2,
    gpus: Annotated[int, typer.Option("--gpus-per-node", min=0, help="GPUs of a node; 0: train on CPUs.")] = 8,
) -> None:
    """Print a job for `sbatch` that runs CONFIG on several nodes: buffer and reward service on the first, the trainer and the replicas on
    all, with TLS and tokens. What dies is started again. Before its time ends the job saves a checkpoint; submitted again, it continues.

    Run it where the nodes see the same files: paths of CONFIG start in the current folder, and this environment's programs are used.
    """
    loaded = load(config, overrides or ())
    text = slurm.write_job(
        loaded,
        config.absolute(),
        overrides or (),
        nodes=nodes,
        gpus=gpus,
        folder=Path.cwd(),
        programs=Path(sys.executable).parent,
    )
    typer.echo(text, nl=False)


@app.command("ssh")
def run_by_ssh(
    config: ConfigArgument,
    overrides: Overrides = None,
    hosts: Annotated[
        str, typer.Option(metavar="HOST,…", help="The hosts, as `ssh` takes them: NAME, USER@NAME, USER@NAME:PORT.")
    ] = ...,  # type: ignore[assignment]
    python: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The Python of each host that has Headrace.", show_default="the path of this one"
        ),
    ] = sys.executable,
    folder: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The folder of each host in which paths start.", show_default="the path of this one"
        ),
    ] = None,
) -> None:
    """Run CONFIG on several hosts until it ends, or on Ctrl-C: `headrace up` and the buffer's server on the first, replicas on all with
    room for them, with TLS and tokens. Nothing is left running there.

    Each host has the same build of Headrace and, in DIR, what CONFIG names. `ssh` must come in without a password. The run's folder is
    on the first host. With run.id=NAME of an earlier run, continue it.
    """
    loaded = load(config, overrides or ())
    with contextlib.ExitStack() as own:
        if loaded.run.id is None:
            run_id = own.enter_context(runs.new_folder(Path(loaded.run.dir), config.stem, datetime.datetime.now()))
            loaded = load(config, [*(overrides or ()), f"run.id={run_id}"])
        refuse_given(loaded)
        code = asyncio.run(_run_by_ssh(loaded, parse_hosts(hosts), python, folder or str(Path.cwd())))
    raise typer.Exit(code)


async def _run_by_ssh(config: Config, hosts: list[Host], python: str, folder: str) -> int:
    def say(line: str) -> None:
        typer.echo(printable(line, keep="\n"), err=True)

    found = await check(config, hosts, python, folder)
    placed = place(config, [host.name for host in hosts], [len(each.gpus) for each in found])
    for host, each, replicas in zip(hosts, found, placed, strict=True):
        own = "trainer, services, " if host is hosts[0] else ""
        say(f"{host.name} ({each.address}): {own}replicas: {len(replicas)}")
    return await SshRun(config, hosts, found, placed, python=python, folder=folder, report=say).run()


@app.command("skypilot")
def write_skypilot(
    config: ConfigArgument,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 2,
    gpus: Annotated[
        str, typer.Option(metavar="NAME:N", help="The GPUs of a node, as SkyPilot names them; none: train on CPUs.")
    ] = "H100:8",
) -> None:
    """Print a task for `sky launch` that runs CONFIG on several nodes as `headrace deploy ssh` does, which the first node calls.

    Run it in the folder that has CONFIG and what it names: SkyPilot copies it to all nodes.
    """
    loaded = load(config, overrides or ())
    typer.echo(
        skypilot.write_task(loaded, config, overrides or (), nodes=nodes, gpus=gpus, folder=Path.cwd()), nl=False
    )
    if loaded.checkpointing.store is None:
        typer.echo(
            "note: checkpointing.store is not set: the run's checkpoints end with the cluster; copy them first, or set it",
            err=True,
        )


@app.command("helm")
def write_helm(
    config: ConfigArgument,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write them; without it, print them.")
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus-per-node", min=0, max=MOST_GPUS, help="GPUs of a node; 0: the run is on CPUs.")
    ] = 0,
    environments: Annotated[
        list[str] | None,
        typer.Option(
            "--environment",
            metavar="NAME=IMAGE",
            help="The image that runs your environment env.NAME; may be repeated.",
        ),
    ] = None,
) -> None:
    """Write the values of the chart deploy/helm/headrace for CONFIG: the configuration, the pods and GPUs of each service, their memory.
    Print what is left to do, and refuse what the chart can't run."""
    images = dict(_image(each) for each in environments or ())
    loaded = load(config, overrides or ())
    with preflight.hiding(loaded) as hide:
        values, remarks = chart_values(loaded, Cluster(gpus, images))
    configuration = textwrap.indent(values.pop("config"), "  ")
    text = f"# headrace deploy helm {config}\nconfig: |\n{configuration}{dump_value(values)}"
    if output is None:
        typer.echo(text, nl=False)
    else:
        with atomic_write(output) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    for remark in remarks:
        typer.echo(f"note: {printable(hide(remark))}", err=True)


def _image(given: str) -> tuple[str, str]:
    name, _, image = given.partition("=")
    if not name or not image:
        raise ConfigError(f"--environment {given}: give NAME=IMAGE:TAG")
    return name, image
