"""`headrace replay-step N`: recompute the loss of a trained step and compare it with what was logged."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from headrace.cli import buffer, plugins, runs
from headrace.cli.groups import RunOption
from headrace.config import Config


def replay_step(
    step: Annotated[int, typer.Argument(metavar="N", min=0, help="The step.", show_default=False)],
    run: RunOption,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Of the logged value, or of 0.01 where that is more: what may differ.")
    ] = 1e-3,
) -> None:
    """Recompute loss, gradient norm and reward of a step that the buffer retained (replay.retain_steps), from its checkpoint.

    Leaves with 1 if one of them differs from what was logged by more than the tolerance.
    """
    config = runs.find(run)
    recompute = plugins.find("headrace.tools", "replay-step", extra="trainer")

    async def work(config: Config) -> Any:
        async with buffer.opened(config) as replay:
            return await recompute(config, replay, step)

    done = asyncio.run(work(config))
    typer.echo(f"step {step}: {done.trajectories} trajectories of {done.groups} groups, weights {done.weights}")
    typer.echo(f"{'':10}{'logged':>16}{'recomputed':>16}{'difference':>14}")
    for name, logged, now in done.values:
        typer.echo(f"{name:10}{logged:16.9g}{now:16.9g}{now - logged:14.3g}")
    differing = done.differing(tolerance)
    if differing:
        typer.echo(f"{', '.join(differing)}: more than the tolerance {tolerance:g} away from what was logged", err=True)
        raise typer.Exit(1)
    typer.echo(f"all within the tolerance {tolerance:g}")
