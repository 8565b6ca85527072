"""`headrace deploy`: what runs a configuration on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.common import App, ConfigArgument, Overrides
from headrace.config import load
from headrace.launch import slurm

app = App(help="Write what runs a configuration on a cluster.", no_args_is_help=True)


@app.callback()
def deploy() -> None:
    """Write what runs a configuration on a cluster."""


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
