"""`headrace status`: the state of a running pipeline, read from its buffer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from headrace.base.errors import ConfigError, ReplayDenied, ReplayUnavailable
from headrace.base.files import is_locked
from headrace.cli.common import WIDTH, Overrides, cell, plain_table, say
from headrace.cli.display import duration, time_left
from headrace.cli.run_list import brief, steps, when
from headrace.config import Config, load
from headrace.launch import device_plan, runs
from headrace.launch.probe import ask_ready, parse_reason
from headrace.net.credentials import buffer_url
from headrace.replay import EnvironmentState, ReplayClient, Replica, Runner, RunState, frequent
from headrace.replay.bias import Distribution, Moment, TrajectoryMeter, beyond, skews
from headrace.run import findings, history, now
from headrace.run.checkpoints import find_published, list_set_aside
from headrace.run.headlines import accuracy_name, alarms, incomplete
from headrace.run.history import RunHistory
from headrace.run.journal import Line
from headrace.run.now import Now
from headrace.run.object_store import list_problems
from headrace.run.sample_files import SampleFiles

# The number of entries of the metric stream to read; in most runs they include the last validation.
NEWEST = 50


def status(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG|RUN]", help="The run's YAML, or its folder or id.")
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="The run's folder, or its id under ./runs, instead of CONFIG."),
    ] = None,
) -> None:
    """Show the run, its steps, and the replicas with their URLs. For a run that has ended, show what its folder records."""
    if (config is None) == (run is None):
        raise ConfigError("give either CONFIG or a run; `headrace runs` lists the runs")
    if config is not None and not config.is_file():
        config, run = None, str(config)
    loaded = load(config, overrides or ()) if config else runs.find(run or "", overrides or ())
    try:
        if run is not None and not runs.may_be_up(loaded):
            raise ReplayUnavailable("no process of the run is alive")
        found = asyncio.run(_read(buffer_url(loaded, "reader"), loaded.run.id))
        state, replicas, runners, meters, newest, environments, reasons = found
    except (ReplayUnavailable, ReplayDenied, ConfigError) as error:
        if waits := _service_waits(loaded):
            raise ReplayUnavailable(f"the run waits for {'; for '.join(waits)}") from error
        if run is None:
            raise
        past = history.read(loaded)
        if not past.is_down:
            raise
        show_past(sys.stdout, past)
        return
    loaded = loaded.change(run={"id": state.run_id})
    lines = [
        *failures(state, reasons, loaded.run_folder),
        *(("waits for", wait) for wait in _service_waits(loaded)),
        *waits_for(environments),
        *progress(newest, loaded.log_folder),
        *_time_left(newest, loaded.max_num_steps - state.next_step),
        *list_findings(newest, loaded, now.read(loaded.run_folder)),
        *(("set aside", line) for line in list_set_aside(loaded.checkpoint_folder)),
        *(("store", line) for line in list_problems(loaded.checkpoint_folder)),
        *device_plan.read_record(loaded.run_folder),
        ("page", f"headrace page {loaded.run_folder}"),
    ]
    show(sys.stdout, state, replicas, runners, meters, loaded.replay.bias_warning, lines)


def show_past(out: TextIO, past: RunHistory) -> None:
    """Print what is known about a run that is down, one line per fact."""
    config = past.config
    versions = find_published(config.checkpoint_folder)
    console = Console(file=out, width=WIDTH)
    for name, value in (
        ("run", config.run_folder.name),
        ("state", past.state + (f" since {when(past.since)}" if past.since is not None else "")),
        *([("reason", brief(past.reason))] if past.reason else []),
        ("started", when(past.started)),
        ("steps", steps(past)),
        *progress(past.lines, config.log_folder),
        *list_findings(past.lines, config),
        *([("", str(past.collapse))] if past.collapse else []),
        ("best", str(past.best() or "-")),
        ("checkpoints", ", ".join(map(str, versions)) or "none"),
        *(("set aside", line) for line in list_set_aside(config.checkpoint_folder)),
        *(("store", line) for line in list_problems(config.checkpoint_folder)),
        ("time", f"{duration(past.seconds)} in steps"),
        ("samples", f"headrace samples {config.run_folder}"),
        *(("", line) for line in _removed_samples(past)),
        ("page", f"headrace page {config.run_folder}"),
        ("continue", runs.resume_hint(config)),
    ):
        say(console, f"{name:14}{value}")


def _removed_samples(past: RunHistory) -> Iterator[str]:
    """Yield by which bound the samples of trained steps were removed, if any were."""
    files = SampleFiles.of(past.config)
    kept = set(files.steps("train"))
    removed = [line.step for line in past.lines if line.kind == "train" and line.step not in kept]
    if kept and removed:
        of = f"those of steps {min(removed)} to {max(removed)}" if len(removed) > 1 else f"those of step {removed[0]}"
        yield f"{of} were {files.say_removed('train')}"


async def _read(
    url: str, run_id: str | None
) -> tuple[
    RunState, list[Replica], list[Runner], dict[Moment, TrajectoryMeter], list[Line], list[EnvironmentState], list[str]
]:
    async with contextlib.aclosing(await ReplayClient.connect(url, run_id, timeout_s=3.0)) as client:
        entries = await client.newest_metrics(NEWEST)
        newest = [Line(kind, step, "", 0.0, metrics) for _, kind, step, metrics in reversed(entries)]  # type: ignore[arg-type]
        environments = await client.environments()
        state, replicas, reasons = await client.state(), await client.replicas(), await client.failures()
        return state, replicas, await client.runners(), await client.bias(), newest, environments, reasons


def _service_waits(config: Config) -> list[str]:
    """Return for what, and why, services wait: what the replay service says of the buffer's server, if it can be asked, and what
    `headrace up` has noted of those that were restarted meanwhile."""
    record = history.read_record(config.run_folder) if is_locked(config.run_folder / history.RUN_LOCK) else None
    noted = [] if record is None else record.waits
    if config.security.credentials is None:
        return noted
    try:
        status, answer = asyncio.run(ask_ready(config, config.replay.host, config.replay.port))
    except ConfigError:  # a file with which to ask can't be read
        return noted
    reason = parse_reason(answer) if status == 503 else ""
    return [*([f"the buffer's server: {reason}"] if reason else []), *noted]


def failures(state: RunState, reasons: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
    """Yield lines about the training prompts that failed: how many, and the most frequent of the newest `reasons`."""
    if failed := state.counts.get("failed", 0):
        yield (
            "failed",
            f"{failed} prompts; `headrace samples {folder} --failed` shows them. Reasons of the newest {len(reasons)}:",
        )
        yield from (("", reason) for reason in frequent(reasons))


def waits_for(environments: Sequence[EnvironmentState]) -> Iterator[tuple[str, str]]:
    """Yield lines about the environments with an open breaker: since when, what waits for each, its message, and the traceback."""
    for each in environments:
        if each.broken:
            waiting = each.waiting + each.taken
            yield (
                "waits for",
                f"environment {each.name}, {each.trouble} for {each.broken_s:.0f} s, {waiting} trajectories: {each.message}",
            )
            yield from (("", line) for line in each.traceback.splitlines())


def progress(lines: Sequence[Line], logs: Path) -> list[tuple[str, str]]:
    """Return what the newest step and validation of a history tell, and alarms. `logs` is the folder of an alarm's picture."""
    told = []
    validation = next((line for line in reversed(lines) if line.kind == "validation"), None)
    if validation is not None and (lacks := incomplete(validation.metrics)):
        told.append(("validation", f"step {validation.step}: {lacks}"))
    for kind, name in (("train", "reward"), ("validation", "accuracy")):
        found = next((line for line in reversed(lines) if line.kind == kind and name in line.metrics), None)
        if found is None:
            continue
        shown = accuracy_name(found.metrics) if kind == "validation" else name
        told.append((kind, f"step {found.step}: {shown} {found.metrics[name]:.3f}"))
        told += [("alarm", alarm) for alarm in alarms(found.step, found.metrics)]
        if found.metrics.get("train_inference_alarm"):
            pictures = sorted(logs.glob("disagreement_step*.png"), key=lambda path: path.stat().st_mtime_ns)
            told += [("", f"see {path}") for path in pictures[-1:]]
    return told


def _time_left(lines: Sequence[Line], left: int) -> list[tuple[str, str]]:
    said = time_left([line.metrics for line in lines if line.kind == "train"], left)
    return [("time", said)] if said else []


def list_findings(lines: Sequence[Line], config: Config, current: Now | None = None) -> list[tuple[str, str]]:
    """Return lines about what the newest steps of a history lost, the gravest first. `lines` are the surviving ones; `current` is the state
    of a run that is up."""
    return [("finding", line) for line in findings.top(findings.find(lines, config, now=current))]


def show(
    out: TextIO,
    state: RunState,
    replicas: list[Replica],
    runners: list[Runner],
    meters: Mapping[Moment, TrajectoryMeter],
    bias_warning: float | None,
    progress: Sequence[tuple[str, str]] = (),
) -> None:
    """Print one line per fact, then the replicas and runners, in a form that suits a pipe."""
    console = Console(file=out, width=WIDTH)
    groups = ", ".join(f"{count} {name}" for name, count in state.counts.items() if count) or "none yet"
    for name, value in (
        ("run", state.run_id),
        ("next step", str(state.next_step)),
        ("checkpoint", str(state.committed) if state.committed >= 0 else "none yet"),
        ("prompts taken", str(state.enqueued + 1)),
        ("groups", groups),
        *([("waits for", f"a runner: {state.episodes} groups of episodes")] if is_without_runner(state) else []),
        *progress,
        *((replica.state.lower(), f"{replica.id}: {replica.reason}") for replica in replicas if replica.reason),
        *(
            ("not reached", f"{replica.id}, by others that pull: {replica.unreached}")
            for replica in replicas
            if replica.unreached
        ),
        *((moment, _describe(meter)) for moment, meter in meters.items() if meter.trajectories),
        *(("bias", str(skew)) for skew in beyond(skews(meters), bias_warning)),
    ):
        say(console, f"{name:14}{value}")
    table = plain_table("replica", "state", "weights", "groups", "error", "seen", "url")
    for replica in replicas:
        version = "none" if replica.version < 0 else str(replica.version)
        seen = f"{replica.seen_s_ago:.0f} s ago"
        error = "" if replica.logprob_error is None else f"{replica.logprob_error:.4g}"
        # no replica does both: one that pulls is never a validator
        does = "validates" if replica.validates else "pulls" if replica.pulls else ""
        life = ", ".join(filter(None, (replica.state, does)))
        row = (replica.id, life, version, str(replica.leases), error, seen, _address(replica))
        table.add_row(*map(cell, row))
    console.print(table if replicas else "no replica has joined")
    if runners:
        table = plain_table("runner", "state", "groups", "seen", "url")
        for runner in runners:
            life, seen = "ALIVE" if runner.alive else "DEAD", f"{runner.seen_s_ago:.0f} s ago"
            table.add_row(*map(cell, (runner.id, life, str(runner.leases), seen, _address(runner))))
        console.print(table)


def is_without_runner(state: RunState) -> bool:
    return state.episodes > 0 and not state.alive_runners


def _address(member: Replica | Runner) -> str:
    if "unreadable" in member.info:
        return f"its description of itself can't be read ({member.info['unreadable']})"
    return str(member.info.get("url", ""))


def _describe(meter: TrajectoryMeter) -> str:
    """Return the number of trajectories, and mean and deviation of each measured quantity."""
    parts = []
    for quantity, unit in (("length", ""), ("reward", ""), ("latency", " s"), ("age", "")):
        distribution: Distribution = getattr(meter, quantity)
        if distribution.count:
            parts.append(f"{quantity} {distribution.mean:.3g} ± {distribution.deviation:.2g}{unit}")
    masked = [f"{meter.tokens} tokens over age"] if meter.tokens else []
    return ", ".join([f"{meter.trajectories} trajectories", *masked, *parts])
