"""`headrace runs [compare|fork|fetch]`: list the runs of a folder, compare two of them, continue from a checkpoint under another name, or
fetch a run from a store."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from headrace.base.errors import ConfigError, HeadraceError
from headrace.base.printable import printable
from headrace.cli import weights
from headrace.cli.common import WIDTH, App, RunArgument, cell, plain_table, say
from headrace.cli.display import duration
from headrace.config.compare import diff, is_own
from headrace.launch import ports, runs
from headrace.launch.entry_points import load_entry_point
from headrace.run import fork as forks
from headrace.run import history, stored_run
from headrace.run.headlines import seconds_per_step
from headrace.run.history import Metric, RunHistory
from headrace.run.object_store import RunStore

# The number of steps in the table of a comparison: the first, the last, and some between them.
SHOWN_STEPS = 11
_COLOURS = {"running": "green", "failed": "red", "killed": "red"}

app = App(
    help="List the runs of a folder, compare two, fork one, or fetch one from a store.", invoke_without_command=True
)


@app.callback()
def list_runs(
    context: typer.Context, folder: Annotated[Path, typer.Option("--dir", help="The folder of runs.")] = Path("runs")
) -> None:
    """List the runs of a folder: each run's state and its reason, when it was started, how many steps it has trained, and its best."""
    if context.invoked_subcommand is not None:
        return
    saved = sorted(folder.glob(f"*/{runs.SAVED}"))
    if not saved:
        raise ConfigError(f"{folder} holds no runs; give another folder of runs with --dir")
    show_runs(sys.stdout, [(path.parent.name, _read(str(path.parent))) for path in saved])
    say(Console(width=WIDTH), f"their page: headrace page {folder}")


@app.command()
def compare(
    first: RunArgument,
    second: RunArgument,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="A metric to show step by step, as train:NAME or val:NAME; may be repeated.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with both runs' curves.")
    ] = None,
) -> None:
    """Show two runs side by side: their states, best values, times, metrics at the same steps, and where their configurations differ."""
    if first == second:
        raise ConfigError(f"{first} and {second} are the same run; give two different ones")
    found = {name: history.read(runs.find(name)) for name in (first, second)}
    lines = [line for each in found.values() for line in each.lines]
    wanted = [history.parse_metric(name, lines) for name in metrics or ()]
    for (kind, metric), name in zip(wanted, metrics or (), strict=True):
        known = {known for line in lines if line.kind == kind for known in line.metrics}
        if metric not in known:
            raise HeadraceError(
                f"--metric {name}: neither run has this metric; known ones are {', '.join(sorted(known)) or 'none yet'}"
            )
    show_comparison(sys.stdout, found, wanted or [("train", "reward"), ("validation", "accuracy")])
    if page is not None:
        write: Any = load_entry_point("headrace.tools", "comparison-page", extra="trainer")
        try:
            write({name: each.lines for name, each in found.items()}, wanted, page)
        except OSError as error:
            raise ConfigError(f"--html {page}: can't be written ({error.strerror})") from error
        typer.echo(f"curves: {page}")


@app.command()
def fork(
    source: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="A run, and one of its checkpoints; by default the newest.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new run's id, or its folder.")],
) -> None:
    """Make a new run that continues from a checkpoint of another one: with its configuration, order of prompts, optimizer, metrics and
    lineage so far, and a buffer of its own. The other run is not changed, and may be up."""
    found = weights.find(source)
    if found.run is None or found.run.step == 0:
        raise ConfigError(f"{source} names no checkpoint; give RUN@STEP")
    config = found.run.config
    folder = Path(new) if len(Path(new).parts) > 1 else config.run_folder.parent / new
    forks.fork(config, found.run.step, folder, ports.list_unshared(config))
    typer.echo(
        f"run {folder.name} in {folder} continues from {found.name}: headrace up {folder / runs.SAVED} KEY=VALUE…"
    )


@app.command()
def fetch(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL[@STEP]",
            help="A run in a store, as checkpointing.store and the run's id, and one of its checkpoints; by default the newest.",
        ),
    ],
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="Where to; by default runs/RUN.")] = None,
) -> None:
    """Fetch a run from an object store: a checkpoint, its metrics, lineage, and what became of every prompt. Its samples are not there."""
    place, at, step = url.rpartition("@")
    if not (at and step.isdecimal()):
        place, step = url, ""
    store = RunStore(place)
    folder = folder or Path("runs") / store.url.rpartition("/")[2]
    version = stored_run.fetch(store, int(step) if step else None, folder, lambda line: say(Console(width=WIDTH), line))
    typer.echo(f"run {folder} with checkpoint {version}: headrace status {folder}")


def _read(run: str) -> RunHistory | HeadraceError:
    """Return the run's history. An error is returned too, so that one unreadable run doesn't hide the others."""
    try:
        return history.read(runs.find(run))
    except HeadraceError as error:
        return error


def show_runs(out: TextIO, found: Sequence[tuple[str, RunHistory | HeadraceError]]) -> None:
    table, reasons = plain_table("run", "state", "started", "steps", "best"), {}
    for name, each in found:
        if isinstance(each, HeadraceError):
            table.add_row(cell(name), Text("unreadable", "red"), "", "", "")
            reasons[name] = str(each)
            continue
        state = Text(each.state, _COLOURS.get(each.state, ""))
        table.add_row(cell(name), state, when(each.started), steps(each), str(each.best() or "-"))
        reasons[name] = each.reason or str(each.collapse or "")
    console = Console(file=out, width=WIDTH)
    console.print(table)
    for name, reason in reasons.items():
        if reason:
            say(console, f"{name}: {brief(reason)}")


def _step_time(run: RunHistory) -> str:
    seconds = seconds_per_step(line.metrics for line in run.lines if line.kind == "train")
    return "-" if seconds is None else f"{seconds:.2f} s"


def show_comparison(out: TextIO, found: Mapping[str, RunHistory], metrics: Sequence[Metric]) -> None:
    console = Console(file=out, width=WIDTH)
    facts = plain_table("", *map(printable, found))
    for name, fact in (
        ("state", lambda each: each.state),
        ("started", lambda each: when(each.started)),
        ("steps", steps),
        ("best", lambda each: str(each.best() or "-")),
        ("time of the steps", lambda each: duration(each.seconds)),
        ("a step (median)", _step_time),
    ):
        facts.add_row(name, *map(fact, found.values()))
    console.print(facts)
    of_runs = [[history.values(each.lines, metric) for each in found.values()] for metric in metrics]
    common = sorted(set.union(*(set.intersection(*map(set, of_metric)) for of_metric in of_runs)))
    header = [f"{_PREFIX[kind]}:{printable(name)} {printable(run)}" for kind, name in metrics for run in found]
    table = plain_table("step", *header)
    for step in _some(common):
        cells = [f"{of_run[step]:.4g}" if step in of_run else "-" for of_metric in of_runs for of_run in of_metric]
        table.add_row(str(step), *cells)
    console.print(table if common else Text("the two runs have no step in common"), Text(), sep="\n")
    differing = list(differences(*(each.config for each in found.values())))
    console.print(f"{len(differing)} keys differ" + (":" if differing else " (ports and addresses of the run aside)"))
    for change in differing:
        say(console, f"  {change}")


_PREFIX = {"train": "train", "validation": "val"}


def differences(first: Any, second: Any) -> Iterator[str]:
    """Yield the keys in which two runs differ, each with both values. Names, folders and ports are left out, because they differ between
    any two runs."""
    yield from (str(change) for change in diff(first, second) if not is_own(change.key))


def _some(steps: Sequence[int]) -> list[int]:
    """Return at most `SHOWN_STEPS` of the steps, including the first and the last."""
    if len(steps) <= SHOWN_STEPS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (SHOWN_STEPS - 1))] for place in range(SHOWN_STEPS)]


# -- parts that `headrace status` shows too


def when(moment: float | None) -> str:
    return "-" if moment is None else f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"


def steps(each: RunHistory) -> str:
    """Return the number of steps trained, and the number planned."""
    if each.last_step is None:
        return "-"
    done, planned = each.last_step + 1, each.config.algorithm.max_num_steps
    return (
        f"{done} of {planned}"
        if done <= planned
        else f"{done} ({each.config.algorithm.name}.max_num_steps is {planned} now)"
    )


def brief(reason: str) -> str:
    """Return a reason in one line: the first and the last of its lines."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return " … ".join([lines[0], lines[-1]] if len(lines) > 1 else lines)
