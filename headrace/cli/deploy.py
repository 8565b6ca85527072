"""`headrace deploy`: what runs a configuration on a cluster."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ConfigError
from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.cli.common import MOST_GPUS, App, ConfigArgument, Overrides
from headrace.config import load
from headrace.config.yaml_text import dump_value
from headrace.launch import preflight, slurm
from headrace.launch.chart_values import Cluster, chart_values

app = App(help="Write the job or the values of a chart that run a configuration on a cluster.", no_args_is_help=True)


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
