"""`headrace groups find|show|list|export|retry`: groups and the lineage of their trajectories, whether the run is up or down."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args

import msgspec
import typer
from rich.console import Console

from headrace.base.errors import ConfigError, HeadraceError, ReplayUnavailable
from headrace.base.printable import printable
from headrace.cli.common import WIDTH, App, RunOption, cell, plain_table
from headrace.cli.samples import draw_group
from headrace.config import Config
from headrace.launch import runs
from headrace.launch.buffer import open_buffer
from headrace.records.group_event import GroupEvent, GroupState
from headrace.records.origin import GroupLineage, Origin, TokenRange
from headrace.replay import HeldGroup, ReplayClient
from headrace.run import export as jsonl
from headrace.run import group_files
from headrace.run.group_history import GroupHistory
from headrace.run.group_query import SORTS, GroupQuery, GroupStory, GroupSummary, parse_row
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.sample_files import SampleFiles
from headrace.run.samples import SampleGroup, by_group, failed_groups, make_group, make_sample

app = App(help="Look at groups: each is one prompt and its trajectories.", no_args_is_help=True)

StateOption = Annotated[list[str] | None, typer.Option("--state", help="Only groups in this state; may be repeated.")]


@app.command()
def find(
    run: RunOption,
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT|FILE:LINE|ID",
            help="Part of the prompt or of the expected answer; a row of a data set; or the group's id.",
        ),
    ] = None,
    state: StateOption = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Only groups whose reason contains this text.")] = "",
    step: Annotated[int | None, typer.Option(help="Only groups of this step.")] = None,
    environment: Annotated[str | None, typer.Option("--env", help="Only of this environment.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only groups that this replica had.")] = None,
    sort: Annotated[str, typer.Option(help=f"One of {', '.join(SORTS)}; after a - the highest first.")] = "order",
    number: Annotated[int, typer.Option("-n", help="How many groups to show.")] = 20,
) -> None:
    """Find what became of a prompt, among all groups of the run: those that wait, and those that were trained, filtered, evaluated, that
    failed or were left over. `headrace groups show ID` shows one of them."""
    history = GroupHistory(runs.find(run).run_folder / group_files.FOLDER)
    query = GroupQuery(
        states=_states(state) if state else (),
        reason=reason,
        step=step,
        environment=environment,
        replica=replica,
        sort=sort,
        limit=number,
    )
    row = parse_row(wanted) if wanted else None
    total, found = history.find(dataclasses.replace(query, row=row)) if row else (0, [])
    if not found:  # a text may look like a row
        total, found = history.find(dataclasses.replace(query, text=wanted or ""))
    table = plain_table("group", "state", "step", "attempts", "mean reward", "tokens", "row", "prompt", "reason")
    for group in found:
        table.add_row(*map(cell, _line(group)))
    if found:
        Console(width=WIDTH).print(table)
    more = f"; the first {len(found)} are shown, -n shows more" if len(found) < total else ""
    typer.echo(f"{total} of {sum(history.states().values())} groups{more}")
    if lost := history.lost():
        typer.echo(f"{lost} events were lost: the trainer was away, and the buffer keeps the newest only")
    for damage in history.damaged:
        typer.echo(f"warning: {printable(damage)}", err=True)


def _line(group: GroupSummary) -> Iterator[str]:
    yield group.id
    yield group.state
    yield "-" if group.step is None else str(group.step)
    yield str(group.attempts)
    yield "-" if group.mean is None else f"{group.mean:.4g}"
    yield ", ".join(map(str, group.tokens)) if group.tokens else "-"
    yield f"{Path(group.source.file).name}:{group.source.line}" if group.source else "-"
    yield " ".join(group.prompt.split())[:80]
    yield " ".join(group.reason.split())[:120]


@app.command()
def show(
    group: Annotated[str, typer.Argument(metavar="ID", help="The group's id.")],
    run: RunOption,
    text: Annotated[bool, typer.Option("--text", help="Show the prompt and the completions too.")] = False,
    story: Annotated[bool, typer.Option("--story", help="Show everything that happened to it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show which replica and weights wrote which tokens of each trajectory, which environment scored it, and which step trained on it. For
    a failed group, also show the completion that it failed with. Of a group that is neither trained nor held by the buffer any more, only
    what happened to it is known."""
    config = runs.find(run)
    if story:
        _show_story(_story(config, group), as_json)
        return
    try:
        found, held = _find(config, group)
    except HeadraceError as error:
        _show_story(_story(config, group, error), as_json)
        return
    text = text or found.state == "failed"
    if as_json:
        shown = dataclasses.asdict(found) | ({"text": msgspec.to_builtins(_texts(config, found, held))} if text else {})
        typer.echo(json.dumps(shown, indent=2))
        return
    for line in describe(found):
        typer.echo(printable(line))
    if text:
        console = Console()
        console.print(draw_group(_texts(config, found, held), found.state, console.width))


def _story(config: Config, group: str, otherwise: HeadraceError | None = None) -> GroupStory:
    """Return what happened to a group. Raises `otherwise` if there is no record of it."""
    history = GroupHistory(config.run_folder / group_files.FOLDER)
    if otherwise is not None and not history.folder.is_dir():
        raise otherwise
    found = history.story(group)
    if found is None:
        raise otherwise or HeadraceError(
            f"no group {group!r} in {history.folder}; `headrace groups find --run {config.run_folder}` finds the groups there are"
        )
    return found


def _show_story(story: GroupStory, as_json: bool) -> None:
    if as_json:
        shown = dataclasses.asdict(story) | {"events": [event.describe() for event in story.events]}
        typer.echo(json.dumps(shown, indent=2))
        return
    group = story.summary
    typer.echo(printable(f"group       {group.id} ({group.state})"))
    row = f", row {group.source.line} of {group.source.file}" if group.source else ""
    typer.echo(
        printable(
            f"prompt      {group.order} of the run's order, task {group.task}, environment {group.environment}{row}"
        )
    )
    if group.reason:
        typer.echo(printable(f"reason      {group.reason}"))
    table = plain_table("time", "event", "details")
    for event in story.events:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        table.add_row(cell(moment), cell(event.what), cell(", ".join(_details(event))))
    Console(width=WIDTH).print(table)
    typer.echo(printable(story.prompt, keep="\n"))


def _details(event: GroupEvent) -> Iterator[str]:
    for name, value in event.describe().items():
        if name not in ("time", "what") and value is not None:
            yield f"{name} {_number(value) if isinstance(value, float) else value}"


@app.command("list")
def list_groups(run: RunOption, state: StateOption = None) -> None:
    """Print id and state of every group that the buffer holds."""

    async def work() -> None:
        async with open_buffer(runs.find(run)) as replay:
            async for group_id, name in replay.groups(_states(state)):
                typer.echo(f"{name:10}{printable(group_id)}")

    asyncio.run(work())


@app.command()
def export(
    run: RunOption,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="JSON lines.")],
    state: StateOption = None,
) -> None:
    """Write every trajectory in the buffer, waiting or retained (replay.retain_steps), one per line. `headrace.run.export` reads them."""
    written = asyncio.run(_export(runs.find(run), output, _states(state)))
    typer.echo(f"{written} trajectories in {output}")


@app.command()
def retry(
    run: RunOption,
    groups: Annotated[list[str] | None, typer.Argument(metavar="[ID]…", help="Groups that failed.")] = None,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="All groups whose reason contains this text.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All groups that failed.")] = False,
) -> None:
    """Have failed training groups generated again, chosen by id, by reason, or all. The trainer queues them when it is up."""
    if (groups is not None) + (reason is not None) + every != 1:
        raise ConfigError("give exactly one of group ids, --reason TEXT and --all")
    again = asyncio.run(_retry(runs.find(run), groups, reason))
    typer.echo(f"{again} groups will be generated again")


async def _retry(config: Config, groups: Sequence[str] | None, reason: str | None) -> int:
    async with open_buffer(config, "operator") as replay:
        # before the groups are read, so that only failures that were read are retried
        ended = await replay.read_ended()
        orders = set(ended.failed_orders())
        if groups is not None:
            orders &= {await _find_order(replay, group) for group in groups}
        elif reason is not None:
            letters = [await replay.group(group_id) async for group_id, _ in replay.groups(["failed"])]
            found = [
                letter for letter in letters if letter and letter["lane"] == "train" and reason in letter["reason"]
            ]
            orders &= {letter["order"] for letter in found}
        return await replay.retry({order: ended.retries.get(order, 0) for order in orders})


async def _find_order(replay: ReplayClient, group: str) -> int:
    """Return the place of a failed training group in the run's order. Raises `HeadraceError` if it is not one."""
    found = await replay.group(group)
    if found is None or found["lane"] != "train" or found["state"] != "failed":
        state = (
            "not held by the buffer; --all also retries groups that failed long ago"
            if found is None
            else found["state"]
        )
        raise HeadraceError(f"group {group!r} is not a failed training group: it is {state}")
    return int(found["order"])


def _states(names: Sequence[str] | None) -> Collection[str]:
    known = get_args(GroupState)
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--state {name} is not a state; use one of {', '.join(known)}")
    return names or known


async def _export(config: Config, output: Path, states: Collection[str]) -> int:
    written = 0
    unfinished = output.with_name(f".{output.name}.unfinished")
    async with open_buffer(config) as replay:
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                async for line in jsonl.lines(replay, states):
                    file.write(line + "\n")
                    written += 1
            unfinished.replace(output)
        except OSError as error:
            raise ConfigError(f"--output {output}: can't be written ({error.strerror})") from error
        finally:
            unfinished.unlink(missing_ok=True)
    return written


def _find(config: Config, group: str) -> tuple[GroupLineage, HeldGroup | None]:
    """Return the group's lineage, and, unless the group was trained, the buffer's record of it."""
    files = LineageFiles(config.checkpoint_folder / FOLDER)
    trained = files.find(group)
    if trained is not None:
        return trained, None

    async def ask() -> tuple[GroupLineage | None, HeldGroup | None]:
        async with open_buffer(config) as replay:
            held = await replay.read_held(group)
            return None if held is None else await replay.trace_lineage(held), held

    try:
        waiting, held = asyncio.run(ask())
    except ReplayUnavailable as error:
        raise ReplayUnavailable(
            f"group {group!r} is not among those trained ({files.folder}), and waiting groups can't be read: {error}"
        ) from error
    if waiting is None:
        raise HeadraceError(
            f"no group {group!r}: it was not trained ({files.folder}), and the buffer does not hold it; it may have been "
            f"filtered, or have failed long ago. `headrace groups list --run {config.run_folder}` lists the groups"
        )
    return waiting, held


def _texts(config: Config, found: GroupLineage, held: HeldGroup | None) -> SampleGroup:
    """Return the prompt and completions of a group. A trained group's are from the samples of its step, a waiting group's from the buffer;
    of a failed group those that were kept. Raises `HeadraceError` if the samples of its step are no longer kept."""
    files = SampleFiles.of(config)
    if held is not None:
        samples = [make_sample(held.group, *pair) for pair in held.trajectories]
        if held.state == "failed":
            kept = [group for group in failed_groups(files.read_failed()) if group.id == found.group]
            samples = [sample for group in kept if group.reason == held.reason for sample in group.samples]
        return make_group(held.group, samples)
    assert found.step is not None  # it was trained
    trained = [sample for sample in files.samples("train", found.step) if sample.group == found.group]
    if not trained:
        raise HeadraceError(
            f"the text of group {found.group!r} is no longer kept, because {files.path('train', found.step)} isn't: "
            f"{files.say_removed('train')}"
        )
    return by_group(trained)[0]


def describe(found: GroupLineage) -> Iterator[str]:
    """Yield the lines of a text about the group, then a table of its trajectories with a line for each range of tokens."""
    yield f"group       {found.group} ({found.state})"
    yield f"prompt      {found.order} of the run's order, task {found.task}, environment {found.env}"
    if found.step is not None:
        verb = "trained at" if found.state == "trained" else "reserved for"
        yield f"{verb:12}step {found.step}, timeline {found.timeline or 'unknown'}"
    if found.reason:
        yield f"reason      {found.reason}"
    if not found.trajectories:
        if found.state != "failed":
            yield "no trajectory has arrived yet"
        return
    rows = [("index", "attempt", "reward", "advantage", "scored by", "tokens", "weights", "replica")]
    for origin in found.trajectories:
        first = (
            str(origin.index),
            str(origin.attempt),
            _number(origin.reward),
            _number(origin.advantage),
            _scorer(origin),
        )
        for place, span in enumerate(origin.ranges):
            rows.append(
                (*(first if place == 0 else ("",) * 5), f"{span.start}-{span.end}", _weights(span), span.replica)
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _weights(span: TokenRange) -> str:
    made = "the initial model" if span.version == 0 else span.timeline or "timeline unknown"
    return f"{span.version} ({made})"


def _scorer(origin: Origin) -> str:
    if origin.reward is None:
        return "-"
    return f"{origin.environment or 'unnamed'} build {origin.build or 'unnamed'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
