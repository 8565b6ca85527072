"""`headrace status`: the state of a running pipeline, read from its buffer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli import runs
from headrace.cli.common import Overrides
from headrace.config import load
from headrace.credentials import buffer_url
from headrace.errors import ConfigError, ReplayUnavailable
from headrace.printable import printable
from headrace.replay import EnvironmentState, ReplayClient, Replica, RunState
from headrace.replay.bias import Distribution, Moment, TrajectoryMeter, beyond, skews

# Entries of the metric stream to read: in most runs they include the last validation.
NEWEST = 50
# Wider than any table: rich would fit it to a narrow terminal or a pipe and cut off states and URLs.
WIDTH = 1000


def status(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="The run's folder, or its id under ./runs, instead of CONFIG.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the run, its steps, and the replicas with their URLs."""
    if (config is None) == (run is None):
        raise ConfigError("give either CONFIG or --run FOLDER")
    loaded = load(config, overrides or ()) if config else runs.find(run or "", overrides or ())
    try:
        found = asyncio.run(_read(buffer_url(loaded, "reader"), loaded.run.id))
        state, replicas, meters, newest, environments = found
    except ReplayUnavailable as error:
        if run is None or loaded.replay.redis_url is not None:
            raise
        raise ReplayUnavailable(
            f"run {loaded.run.id} does not answer ({error}). If it has ended, what it left is in {loaded.run_folder}, and "
            f"`headrace up {loaded.run_folder / runs.SAVED}` goes on with it"
        ) from error
    loaded = loaded.model_copy(update={"run": loaded.run.model_copy(update={"id": state.run_id})})
    lines = [*waits_for(environments), *progress(newest, loaded.log_folder)]
    show(sys.stdout, state, replicas, meters, loaded.replay.bias_warning, lines)


Newest = list[tuple[str, str, int, dict[str, float]]]


async def _read(
    url: str, run_id: str | None
) -> tuple[RunState, list[Replica], dict[Moment, TrajectoryMeter], Newest, list[EnvironmentState]]:
    client = await ReplayClient.connect(url, run_id, timeout_s=3.0)
    try:
        newest = await client.newest_metrics(NEWEST)
        environments = await client.environments()
        return await client.state(), await client.replicas(), await client.bias(), newest, environments
    finally:
        await client.aclose()


def waits_for(environments: Sequence[EnvironmentState]) -> Iterator[tuple[str, str]]:
    """Lines about the broken environments: since when, what waits for each, what it said, and the traceback."""
    for each in environments:
        if each.broken:
            waiting = each.waiting + each.taken
            yield (
                "waits for",
                f"environment {each.name}, broken for {each.broken_s:.0f} s, {waiting} trajectories: {each.message}",
            )
            yield from (("", line) for line in each.traceback.splitlines())


def progress(newest: Newest, logs: Path) -> list[tuple[str, str]]:
    """Lines about the newest step and validation, and about an alarm if there is one; `logs` is the folder of its picture."""
    lines = []
    for kind, name in (("train", "reward"), ("validation", "accuracy")):
        found = next(((step, metrics) for _, of, step, metrics in newest if of == kind and name in metrics), None)
        if found is None:
            continue
        step, metrics = found
        lines.append((kind, f"step {step}: {name} {metrics[name]:.3f}"))
        if metrics.get("train_inference_alarm"):
            error = metrics.get("token_mult_prob_error", float("nan"))
            pictures = sorted(logs.glob("disagreement_step*.png"), key=lambda path: path.stat().st_mtime_ns)
            where = f"; see {pictures[-1]}" if pictures else ""
            lines.append(("alarm", f"trainer and inference disagree (token_mult_prob_error {error:.4g}){where}"))
    return lines


def show(
    out: TextIO,
    state: RunState,
    replicas: list[Replica],
    meters: Mapping[Moment, TrajectoryMeter],
    bias_warning: float | None,
    progress: Sequence[tuple[str, str]] = (),
) -> None:
    """Print one line per fact, then the replicas; plain enough for a pipe."""
    console = Console(file=out, width=WIDTH)
    groups = ", ".join(f"{count} {name}" for name, count in state.counts.items() if count) or "none yet"
    for name, value in (
        ("run", state.run_id),
        ("next step", str(state.next_step)),
        ("checkpoint", str(state.committed) if state.committed >= 0 else "none yet"),
        ("prompts taken", str(state.enqueued + 1)),
        ("groups", groups),
        *progress,
        *((moment, _described(meter)) for moment, meter in meters.items() if meter.trajectories),
        *(("bias", str(skew)) for skew in beyond(skews(meters), bias_warning)),
    ):
        console.print(f"{name:14}{printable(value)}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("replica", "state", "weights", "groups", "seen", "url"):
        table.add_column(column, no_wrap=True)
    for replica in replicas:
        version = "none" if replica.version < 0 else str(replica.version)
        seen = f"{replica.seen_s_ago:.0f} s ago"
        row = (replica.id, replica.state, version, str(replica.leases), seen, str(replica.info.get("url", "")))
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table if replicas else "no replica has joined")


def _described(meter: TrajectoryMeter) -> str:
    """The number of trajectories, and mean and deviation of each quantity that was measured."""
    parts = []
    for quantity, unit in (("length", ""), ("reward", ""), ("latency", " s"), ("age", "")):
        distribution: Distribution = getattr(meter, quantity)
        if distribution.count:
            parts.append(f"{quantity} {distribution.mean:.3g} ± {distribution.deviation:.2g}{unit}")
    masked = [f"{meter.tokens} tokens over age"] if meter.tokens else []
    return ", ".join([f"{meter.trajectories} trajectories", *masked, *parts])
