"""`headrace plan memory`: the GPU memory that a run needs, computed without GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from headrace.base.devices import DeviceMemory, Site
from headrace.base.errors import ConfigError
from headrace.cli.common import MOST_GIB, WIDTH, ConfigArgument, Overrides, plain_table, say
from headrace.config import load
from headrace.launch.entry_points import load_entry_point

app = typer.Typer(help="Plan the resources of a run.", no_args_is_help=True)

GIB = 2**30


@app.callback()
def plans() -> None:
    """Plan the resources of a run."""


@app.command()
def memory(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[str, typer.Option("--gpus", help="Numbers of the trainer's GPUs to compare.")] = "1,4,8,16",
    per_host: Annotated[int, typer.Option("--gpus-per-host", min=1, help="Number of GPUs in a host.")] = 8,
    size: Annotated[float, typer.Option("--gpu-memory", min=1, max=MOST_GIB, help="Memory of a GPU in GiB.")] = 80,
) -> None:
    """Print the memory that the trainer needs on each of its GPUs at its peak, and a replica on each of its own, part by part in GiB.

    Nothing is started and no weights are read. The model's config.json is enough, or the name of a model that Headrace knows.
    """
    loaded, plan = load(config, overrides or ()), load_entry_point("headrace.tools", "plan-memory", extra="trainer")
    device = DeviceMemory(f"a GPU of {size:g} GiB", int(size * GIB), int(size * GIB))
    counts = _counts(gpus, per_host, loaded.trainer.shard_within_host)
    found = [plan(loaded, Site(device, device, count, per_host), count) for count in counts]
    console = Console(width=WIDTH)
    table = plain_table("trainer, GiB on each GPU", *(f"{count} GPU{'s' * (count > 1)}" for count in counts))
    peaks = [each.peak for each in found]
    for part in dict.fromkeys(part for _, parts in peaks for part in parts):
        table.add_row(part, *(f"{parts[part] / GIB:.1f}" if part in parts else "-" for _, parts in peaks))
    mine = size * (loaded.trainer.gpu_memory_fraction or 1)
    table.add_row(f"together, of {mine:g}", *(_total(parts, mine) for _, parts in peaks))
    table.add_row("most in the phase", *(phase for phase, _ in peaks))
    console.print(table)
    replica, remarks = found[0].replica, found[0].remarks
    parts = ", ".join(f"{part} {of / GIB:.1f}" for part, of in replica.items())
    say(console, f"a replica, on each of its GPUs: {parts}; together {_total(replica, size)}")
    for remark in remarks:
        say(console, remark)


def _total(parts: Mapping[str, int], size: float) -> str:
    total = sum(parts.values()) / GIB
    return f"{total:.1f}" if total <= size else f"{total:.1f} !"


def _counts(text: str, per_host: int, whole_hosts: bool) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise ConfigError(f"--gpus {text}: give numbers of GPUs, for example 1,4,8,16")
    if whole_hosts and any(count > per_host and count % per_host for count in counts):
        raise ConfigError(
            f"--gpus {text}: trainer.shard_within_host needs whole hosts, of {per_host} GPUs (--gpus-per-host); give multiples of "
            f"{per_host}, or set it to false"
        )
    return counts
