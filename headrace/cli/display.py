"""Shows a run to the user: a live table on a terminal, one line per event elsewhere, and a summary at the end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.base.printable import printable
from headrace.base.repeats import Repeats
from headrace.cli.common import cell, plain_table, say
from headrace.launch.summary import NOT_STARTED, UPDATING, RunSummary, Wait
from headrace.run.findings import long_wait
from headrace.run.headlines import accuracy_name, alarms, incomplete, seconds_left

SHOWN_STEPS = 10
# A step's metric: prompts that failed since the previous step.
FAILED = "failed_prompts"
_COLOURS = {"ready": "green", "finished": "green", "failed": "red", "restarting": "yellow", "silent": "red"}


# Shorter waits get no line in a log. A longer one gets a line a minute.
_WORTH_A_LINE_S, _LINES_EVERY_S = 3.0, 60.0


class RunConsole(Console):
    """A console whose reader may go away (`headrace up … | head`). The run then stops."""

    _is_read = True
    _stop: Callable[[], object] | None = None

    def stop_when_unread(self, stop: Callable[[], object]) -> None:
        """Call `stop` once nobody reads what is printed: now, if nobody does."""
        self._stop = stop
        if not self._is_read:
            stop()

    def on_broken_pipe(self) -> None:
        """Print nothing any more, and stop. There is no handler of SIGPIPE: any peer that closes its connection would raise it too."""
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
            try:
                typer.echo("nobody reads standard output any more; stopping", err=True)
            except BrokenPipeError:  # its reader was the same
                os.dup2(nowhere.fileno(), sys.stderr.fileno())
        self._is_read = False
        if self._stop is not None:
            self._stop()


class LineDisplay:
    """Prints one line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._states: dict[str, str] = {}
        self._waits: dict[str, float] = {}  # by what the run waits for: the seconds that the last line reported
        self._failed = 0
        self._failures = Repeats(_LINES_EVERY_S)
        self._alarms: list[str] = []  # of the last step, without its number
        self._tenths = 0  # of an evaluation, as last reported

    def stop_when_unread(self, stop: Callable[[], object]) -> None:
        if isinstance(self.console, RunConsole):
            self.console.stop_when_unread(stop)

    def print(self, line: str) -> None:
        say(self.console, line, keep="\n")

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if kind == "validation":
            lacks = f", {lacks}" if (lacks := incomplete(metrics)) else ""
            self.print(
                f"step {step}: validation {accuracy_name(metrics)} {_number(metrics, 'accuracy', '.3f')}{_failed(metrics, 'failed')}{lacks}"
            )
        else:
            self.print(
                f"step {step}: reward {_number(metrics, 'reward', '.3f')}, age {_number(metrics, 'avg_trajectory_age', '.1f')}, "
                f"{_number(metrics, 'performance/tokens_per_sec', '.0f')} tokens/s, "
                f"{_number(metrics, 'timing/train/total_step_time', '.2f')} s{_failed(metrics, FAILED)}"
            )
            before, self._alarms = self._alarms, []
            for alarm in alarms(step, metrics):
                self._alarms.append(alarm.partition(": ")[2])
                if self._alarms[-1] not in before:
                    self.print(alarm)

    def update(self, run: RunSummary) -> None:
        for line in run.services:
            if line.state not in (UPDATING, NOT_STARTED) and self._states.get(line.name) != line.state:
                self._states[line.name] = line.state
                where = f" ({line.page})" if line.page and line.state == "ready" else ""
                self.print(f"{line.name}: {line.state}{where}")
        if run.evaluates:
            total = sum(run.counts.values())
            tenths = 10 * run.evaluated // total if total else 0
            if tenths != self._tenths:
                self._tenths = tenths
                self.print(f"{run.evaluated} of {total} prompts have ended ({_format_counts(run.counts)})")
        self._print_waits(run.waits)
        self._failed = min(self._failed, run.failed)  # some may have been retried
        if run.failed > self._failed and self._failures.due("", 1):
            self._failed = run.failed
            self.print(failures(run))

    def _print_waits(self, waits: Sequence[Wait]) -> None:
        for wait in waits:
            reported = self._waits.get(wait.whom)
            if wait.seconds >= (_WORTH_A_LINE_S if reported is None else reported + _LINES_EVERY_S):
                self._waits[wait.whom] = wait.seconds
                self.print(str(wait))
        for whom in self._waits.keys() - {wait.whom for wait in waits}:
            del self._waits[whom]
            self.print(f"no longer waits for {whom}")


class LiveDisplay(LineDisplay):
    """Redraws a table of services and the last steps, and prints other lines above it."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.console)
        self.live = live

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing: `update` draws the metrics."""

    def update(self, run: RunSummary) -> None:
        self.live.update(draw(run), refresh=True)


@contextlib.contextmanager
def open_display(console: Console) -> Iterator[LineDisplay]:
    """Open the display that suits `console`: a live table on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield LineDisplay(console)
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        yield LiveDisplay(live)


def draw(run: RunSummary) -> RenderableType:
    services = plain_table()
    for column in ("service", "state", "", "restarts"):
        services.add_column(column)
    services.add_column("page", no_wrap=False, overflow="fold")  # an address that is cut off is of no use
    for line in run.services:
        state = Text(line.state, style=_COLOURS.get(line.state, "yellow"))
        services.add_row(
            cell(line.name),
            state,
            cell(line.note),
            str(line.restarts) if line.restarts else "",
            cell(line.page, "dim"),
        )
    groups = _format_counts(run.counts)
    steps = sorted(run.train)
    left = time_left([run.train[step] for step in steps], run.max_steps - (steps[-1] + 1 if steps else 0))
    head = Text.assemble((f"run {run.run_id}", "bold"), (f"  {left}" if left else "", "dim"))
    lines: list[RenderableType] = [head, services]
    if groups:
        lines.append(Text(f"groups: {groups}", style="dim"))
    if run.buffer:
        lines.append(Text(f"buffer: {printable(run.buffer)}", style="red"))
    lines += [cell(str(wait), "red") for wait in run.waits]
    if run.failed:
        lines.append(Text(printable(failures(run), keep="\n"), style="red"))
    if run.train or run.validation:
        lines.append(_steps(run))
    newest = max(run.train, default=0)
    lines += [Text(alarm, style="red") for alarm in alarms(newest, run.train.get(newest, {}))]
    if advice := long_wait(run.train.get(newest, {})):
        lines.append(cell(f"step {newest}: {advice}", "dim"))
    return Group(*lines)


def failures(run: RunSummary) -> str:
    """Return the number of prompts that failed, and a line for each of the most frequent reasons."""
    head = f"{run.failed} prompts failed; `headrace samples {run.folder} --failed` shows them"
    return "\n".join([head, *(f"  {reason}" for reason in run.failures)])


def _failed(metrics: Mapping[str, float], key: str) -> str:
    return f", {metrics[key]:.0f} prompts failed" if metrics.get(key) else ""


def _steps(run: RunSummary) -> Table:
    table = plain_table()
    shown = sorted({*run.train, *run.validation})[-SHOWN_STEPS:]
    failing = ["failed"] if any(run.train.get(step, {}).get(FAILED) for step in shown) else []
    for column in ("step", "reward", "validation", "age", "tokens/s", "s/step", *failing):
        table.add_column(column, justify="right")
    for step in shown:
        train, validation = run.train.get(step, {}), run.validation.get(step, {})
        table.add_row(
            f"{step}/{run.max_steps}",
            _number(train, "reward", ".3f"),
            _number(validation, "accuracy", ".3f"),
            _number(train, "avg_trajectory_age", ".1f"),
            _number(train, "performance/tokens_per_sec", ".0f"),
            _number(train, "timing/train/total_step_time", ".2f"),
            *(_number(train, FAILED, ".0f") for _ in failing),
        )
    return table


def closing_table(run: RunSummary, seconds: float) -> Table:
    """Return the table at the end of a run: the first and the last values."""
    table = Table(title=f"run {run.run_id}", title_justify="left", show_header=True, header_style="bold")
    for column in ("", "start", "end"):
        table.add_column(column)
    newest = run.validation[max(run.validation)] if run.validation else {}
    for title, series, key in (
        (f"validation {accuracy_name(newest)}", run.validation, "accuracy"),
        ("reward", run.train, "reward"),
    ):
        steps = sorted(series)
        if steps:
            ends = [f"{_number(series[step], key, '.3f')} (step {step})" for step in (steps[0], steps[-1])]
            table.add_row(title, *ends)
    table.add_row("prompts", "", _format_counts(run.counts) or "-")
    table.add_row("time", "", duration(seconds))
    return table


def duration(seconds: float) -> str:
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def time_left(steps: Sequence[Mapping[str, float]], left: int) -> str:
    """Return how long the last `left` steps take, after `steps`; empty if nobody can know, or none are left."""
    seconds = seconds_left(steps, left)
    if seconds is None:
        return ""
    return f"about {duration(seconds) if seconds < 3600 else f'{seconds / 3600:.1f} h'} left"


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _number(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else "-"
