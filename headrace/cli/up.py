"""`headrace up`: run the whole pipeline as local processes, until the trainer has finished."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.base.errors import ConfigError, HeadraceError, Problems
from headrace.cli import common
from headrace.cli.common import ConfigArgument, Overrides
from headrace.cli.config import age_bound
from headrace.cli.display import RunConsole, closing_table, failures, open_display
from headrace.config import Config
from headrace.config.loading import Loaded
from headrace.launch import device_plan, preflight, runs
from headrace.launch.entry_points import load_entry_point
from headrace.launch.pipeline import Pipeline, StoppedBySignal, check, list_pages, settle
from headrace.launch.summary import RunSummary
from headrace.run import checkpoints, findings, history, object_store, start, stored_run
from headrace.run.evaluation import reaches
from headrace.run.history import CURVES, RECORD, recorded
from headrace.run.object_store import RunStore


def up(
    config: ConfigArgument,
    overrides: Overrides = None,
    rollouts: Annotated[
        int | None, typer.Option(min=1, help="Rollout replicas to start; the same as rollout.replicas=N.")
    ] = None,
    elsewhere: Annotated[
        int, typer.Option(min=0, help="How many of these replicas others start, on other machines.")
    ] = 0,
) -> None:
    """Start every service as a local process, show the run, and stop everything when it ends or on Ctrl-C.

    With run.id=NAME of an earlier run, continue it from its last checkpoint.
    """
    given = [*(overrides or ()), *([] if rollouts is None else [f"rollout.replicas={rollouts}"])]
    examined = preflight.examine(config, given)
    common.check_engine("up")
    with contextlib.ExitStack() as folder:
        if examined.config.run.id is None:
            made = runs.new_folder(Path(examined.config.run.dir), config.stem, datetime.datetime.now())
            given.append(f"run.id={folder.enter_context(made)}")
        _up(config, given, examined, elsewhere)


def _up(config: Path, given: Sequence[str], examined: Loaded, elsewhere: int) -> None:
    """Do what `up` does, with what it has examined. `given` has the id of the run."""
    with preflight.hiding(examined.config) as hide:
        fetch_newest(examined.config)
        # before the preflight: a changed key that is fixed is reported itself, not as a problem with the data
        loaded, changes = runs.prepare(config, given)
        here = _without(loaded, elsewhere)
        if line := nothing_left(loaded):
            common.say(RunConsole(), line)
            return
        translation, warnings, problems = examined.nemo_rl, list[str](), Problems()
        with problems.gathered():
            warnings = preflight.look(examined)
        with problems.gathered():
            check(loaded)
        problems.tell()
    plan = device_plan.of(here)
    if plan is not None:
        plan, of_memory = device_plan.fit(here, plan)
        warnings += of_memory
    threads = device_plan.plan_threads(here, plan)
    warnings += device_plan.warn_of_threads(here, plan)
    console = RunConsole()

    def say(line: str) -> None:
        common.say(console, line, keep="\n")

    with runs.lock(loaded), runs.refusable(loaded), settle(loaded) as (loaded, saved, reserved):
        device_plan.record(plan, threads, loaded.run_folder)
        start.record(loaded.run_folder, loaded, examined.origin)
        for warning in warnings:
            say(f"warning: {hide(warning)}")
        say(f"{runs.HEADING.format(loaded.run.id)}{loaded.run_folder} ({age_bound(loaded)})")
        if translation:
            say(f"{translation.summary}; `headrace config check {config}` lists them")
        if line := continues(loaded):
            say(line)
        for change in changes:
            say(f"changed: {change}")
        if why := device_plan.why_on_cpu(loaded):
            say(f"warning: the trainer uses the CPU: {why}")
        for line in device_plan.lines(plan) if plan is not None else ():
            say(line)
        say(f"CPU threads: {threads}")
        if loaded.page.port is not None:
            say(f"page: {runs.page_address(loaded)}")
            if tunnel := runs.tunnel(loaded.page.port):
                say(f"from your own machine: {tunnel}")
        for name, host, port in list_pages(loaded):
            if name == "page":
                continue
            say(f"{name}: {runs.page_url(loaded, host, port)}")
        started = time.monotonic()
        try:
            with (
                curves_drawn(loaded, say),
                recorded(loaded.run_folder, StoppedBySignal),
                open_display(console) as display,
            ):
                run = asyncio.run(Pipeline(_without(loaded, elsewhere), saved, plan, reserved, display).run())
        except StoppedBySignal as interrupted:
            say(f"stopped; `run.id={loaded.run.id}` continues this run from {_resumes_from(loaded)}")
            raise typer.Exit(128 + interrupted.signum) from None
        console.print(closing_table(run, time.monotonic() - started))
        if why := why_it_ended(loaded, run):
            say(why)
        past = history.read(loaded)
        if collapse := past.collapse:
            say(f"{collapse} ({', '.join(collapse.evidence)})")
        if run.failed:
            say(failures(run))
        for line in findings.top(findings.find(past.lines, loaded, "all")):
            say(line)
        # not in the table: a path that is cut off at the column's width can't be copied
        curve, curves = loaded.run_folder / "curve.png", loaded.run_folder / CURVES
        say(f"learning curve: {curve if curve.exists() else 'none was drawn'}")
        if curves.exists():
            say(f"all curves:     {curves}")
        say(f"samples:        headrace samples {loaded.run_folder}")
        say(f"page:           headrace page {loaded.run_folder}")
        folder = loaded.checkpoint_folder
        if (best := history.best_weights(loaded)) is not None:
            say(f"best:           {describe_best(loaded, *best)}")
        versions = checkpoints.find_published(folder)
        newest = checkpoints.policy_of(folder, versions[-1]) if versions else None
        say(f"checkpoint:     {newest or 'none was written'}")
        for line in object_store.list_problems(folder):
            say(f"warning: {line}")


def _without(config: Config, elsewhere: int) -> Config:
    """Return the configuration for what runs on this machine: without the replicas that others start. Raises `ConfigError`."""
    replicas = config.rollout.replicas - elsewhere
    if replicas < 0:
        raise ConfigError(
            f"--elsewhere {elsewhere}: rollout.replicas is {config.rollout.replicas}, those included; raise it"
        )
    return config.change(rollout={"replicas": replicas})


def fetch_newest(config: Config) -> None:
    """Fetch the run from its store, if it was continued on another machine."""
    store = None if config.run.id is None else RunStore.of(config)
    if store is not None:
        with runs.lock(config):
            stored_run.fetch_newest(config, store, lambda line: common.say(RunConsole(), line), started=False)


@contextlib.contextmanager
def curves_drawn(config: Config, say: Callable[[str], None]) -> Iterator[None]:
    """However the context ends, draw the page of curves if the trainer has not: it was killed."""
    try:
        yield
    finally:
        if history.are_curves_old(config.run_folder):
            try:
                write: Any = load_entry_point("headrace.tools", "curves-page", extra="trainer")
                write(config.run_folder, config.run.id)
            except (HeadraceError, OSError) as error:  # what ended the run matters more
                say(f"warning: {config.run_folder / CURVES} lacks the newest steps and can't be drawn: {error}")


def _resumes_from(config: Config) -> str:
    folder = config.checkpoint_folder
    newest, damaged = checkpoints.usable(folder)
    if newest is not None:
        before = "".join(f"; {problem}, so checkpoint {version} is set aside" for version, problem in damaged.items())
        return f"checkpoint {newest} ({checkpoints.path_of(folder, newest)}){before}"
    return "the beginning: it has no checkpoint" + (
        "" if config.checkpointing.enabled else " (checkpointing.enabled is false)"
    )


def nothing_left(config: Config) -> str | None:
    """Return a line for a run that has finished with its last step, which a start would not change; None for any other."""
    if not (config.run_folder / RECORD).exists() or history.judge(config, [], None).state != "finished":
        return None
    newest, _ = checkpoints.usable(config.checkpoint_folder)
    if newest is None or newest < config.max_num_steps:
        return None
    key = f"{config.algorithm.name}.max_num_steps"
    return (
        f"run {config.run.id} has finished with step {newest}, and {key} is {config.max_num_steps}: nothing is left to train. A higher "
        f"{key} continues the run; `headrace status {config.run_folder}` shows it"
    )


def continues(config: Config) -> str | None:
    """Return a line about the checkpoint from which an earlier run continues; None if it has no checkpoint."""
    newest, _ = checkpoints.usable(config.checkpoint_folder)
    if newest is None:
        return None
    key = f"{config.algorithm.name}.max_num_steps"
    if newest >= config.algorithm.max_num_steps:
        return f"checkpoint {newest} is the last step, so nothing is left to train; a higher {key} continues the run"
    return f"continues from {_resumes_from(config)}"


def describe_best(config: Config, version: int, metric: str, value: float) -> str:
    """Return where the best weights are, and how good they are."""
    how = f"{metric} {value:.4g}"
    if version == 0:
        return f"{config.policy.model_name} (the initial model, {how}; no checkpoint has a better value)"
    return f"{checkpoints.policy_of(config.checkpoint_folder, version)} ({how})"


def why_it_ended(config: Config, run: RunSummary) -> str | None:
    """Return what ended a run before `max_num_steps`; None if nothing did."""
    algorithm = config.algorithm
    steps = max(run.train, default=-1) + 1
    if not 0 < steps < algorithm.max_num_steps:
        return None
    metric, threshold = algorithm.stop_at_validation_metric, algorithm.stop_at_validation_threshold
    if metric is not None and threshold is not None:
        values = [metrics.get(metric.removeprefix("val:"), -math.inf) for metrics in run.validation.values()]
        if reaches(max(values, default=-math.inf), threshold):
            return f"ended after {steps} steps: {metric} has reached {algorithm.name}.stop_at_validation_threshold {threshold:g}"
    return (
        f"ended after {steps} of {algorithm.max_num_steps} steps: the prompts were used up {algorithm.max_num_epochs} times "
        f"({algorithm.name}.max_num_epochs); with a higher value, run.id={config.run.id} continues"
    )
