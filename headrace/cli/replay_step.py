"""`headrace replay-step`: recompute a step."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from headrace.cli.common import RunOption
from headrace.launch import runs
from headrace.launch.buffer import open_buffer
from headrace.launch.entry_points import load_entry_point


def replay_step(
    step: Annotated[int, typer.Argument(metavar="N", min=0, help="The step.")],
    run: RunOption,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, help="Largest allowed difference, relative to the logged value or to 0.01, whichever is larger."
        ),
    ] = 1e-3,
) -> None:
    """Recompute loss, gradient norm and reward of a step that the buffer retained (replay.retain_steps), from its checkpoint.

    Exits with 1 if one of them differs from the logged value by more than the tolerance.
    """
    config = runs.find(run)
    recompute = load_entry_point("headrace.tools", "replay-step", extra="trainer")

    async def work() -> Any:
        async with open_buffer(config) as replay:
            return await recompute(config, replay, step)

    result = asyncio.run(work())
    typer.echo(f"step {step}: {result.trajectories} trajectories of {result.groups} groups, weights {result.weights}")
    typer.echo(f"{'':10}{'logged':>16}{'recomputed':>16}{'difference':>14}")
    for name, logged, now in result.values:
        typer.echo(f"{name:10}{logged:16.9g}{now:16.9g}{now - logged:14.3g}")
    differing = result.differing(tolerance)
    if differing:
        typer.echo(
            f"{', '.join(differing)}: differs from the logged value by more than the tolerance {tolerance:g}", err=True
        )
        raise typer.Exit(1)
    typer.echo(f"all within the tolerance {tolerance:g}")
