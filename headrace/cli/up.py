"""`headrace up`: the whole pipeline as local processes, until the trainer has finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from headrace.cli import runs
from headrace.cli.config import age_bound
from headrace.cli.options import ConfigArgument, Overrides
from headrace.cli.pipeline import Interrupted, Pipeline
from headrace.cli.rewind import published
from headrace.cli.view import LiveView, PlainView, View, summary
from headrace.config import Config
from headrace.config.load import examine


def up(
    config: ConfigArgument,
    overrides: Overrides = None,
    rollouts: Annotated[
        int | None, typer.Option(min=1, help="Rollout replicas to start; the same as rollout.replicas=N.")
    ] = None,
) -> None:
    """Start every service as a local process, show the run, and stop everything when it ends or on Ctrl-C.

    With run.id=NAME of an earlier run, goes on with it from its last checkpoint.
    """
    given = [*(overrides or ()), *([] if rollouts is None else [f"rollout.replicas={rollouts}"])]
    translation = examine(config, given).nemo_rl
    loaded, changes = runs.prepare(config, given)
    console = Console()
    with runs.locked(loaded):
        loaded = runs.settle_ports(loaded)
        saved = runs.save(loaded)
        _say(console, f"run {loaded.run.id} in {loaded.run_folder} ({age_bound(loaded)})")
        if translation:
            _say(console, f"{translation.summary}; `headrace config check {config}` lists them")
        for change in changes:
            _say(console, f"changed: {change}")
        _run(loaded, saved, console)


def _run(config: Config, saved: Path, console: Console) -> None:
    started = time.monotonic()
    try:
        with _view(console) as view:
            picture = asyncio.run(Pipeline(config, saved, view).run())
    except Interrupted as interrupted:
        _say(console, f"stopped; `run.id={config.run.id}` goes on with this run")
        raise typer.Exit(128 + interrupted.signum) from None
    console.print(summary(picture, time.monotonic() - started))
    curve, page = config.run_folder / "curve.png", config.run_folder / "curves.html"
    policy = newest_policy(config.checkpoint_folder)
    # not in the table: a path that is cut to a column's width can't be copied
    _say(console, f"learning curve: {curve if curve.exists() else 'none was drawn'}")
    if page.exists():
        _say(console, f"all curves:     {page}")
    _say(console, f"checkpoint:     {policy or 'none was written'}")


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _view(console: Console) -> Iterator[View]:
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield LiveView(live)


def newest_policy(checkpoints: Path) -> Path | None:
    """The Hugging Face checkpoint of the highest version that was published."""
    steps = published(checkpoints)
    return steps[max(steps)] / "policy" if steps else None
