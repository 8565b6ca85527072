"""Shows a run to the user: a live table on a terminal, one line per event elsewhere, and a summary at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.printable import printable

SHOWN_STEPS = 10
# The state of a replica during a refit. It occurs every step, so `Display` prints no line for it.
UPDATING = "updating"
_COLOURS = {"ready": "green", "finished": "green", "failed": "red", "restarting": "yellow", "silent": "red"}


@dataclasses.dataclass(frozen=True)
class ServiceLine:
    name: str
    state: str
    restarts: int
    note: str


@dataclasses.dataclass
class RunSummary:
    """What is known of a run. `train` and `validation` hold each step's metrics; a step that is trained again replaces the old one."""

    run_id: str
    max_steps: int
    services: list[ServiceLine] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    train: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    last_entry: str = "0"
    buffer: str = ""  # why the buffer can't be read at the moment
    broken: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # environments that the run waits for, and what is wrong

    def add(self, entry: str, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add an entry of the metric stream. A step before the last one means a rewind: the steps after it are dropped."""
        self.last_entry = entry
        series = self.train if kind == "train" else self.validation
        for later in [known for known in series if known > step]:
            del series[later]
        series[step] = metrics


class Display:
    """Prints one line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._states: dict[str, str] = {}
        self._broken: set[str] = set()

    def print(self, line: str) -> None:
        self.console.print(printable(line, keep="\n"), markup=False, highlight=False, soft_wrap=True)

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if kind == "validation":
            self.print(f"step {step}: validation accuracy {_number(metrics, 'accuracy', '.3f')}")
        else:
            self.print(
                f"step {step}: reward {_number(metrics, 'reward', '.3f')}, age {_number(metrics, 'avg_trajectory_age', '.1f')}, "
                f"{_number(metrics, 'performance/tokens_per_sec', '.0f')} tokens/s, "
                f"{_number(metrics, 'timing/train/total_step_time', '.2f')} s"
            )
            if disagreement := _disagreement(step, metrics):
                self.print(disagreement)

    def update(self, run: RunSummary) -> None:
        for line in run.services:
            if line.state != UPDATING and self._states.get(line.name) != line.state:
                self._states[line.name] = line.state
                self.print(f"{line.name}: {line.state}")
        for name in run.broken.keys() - self._broken:
            self.print(waits_for(name, run.broken[name]))
        for name in self._broken - run.broken.keys():
            self.print(f"environment {name} works again")
        self._broken = set(run.broken)


class LiveDisplay(Display):
    """Redraws a table of services and the last steps, and prints other lines above it."""

    def __init__(self, live: Live) -> None:
        super().__init__(live.console)
        self.live = live

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing: `update` draws them."""

    def update(self, run: RunSummary) -> None:
        self.live.update(draw(run), refresh=True)


def draw(run: RunSummary) -> RenderableType:
    services = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("service", "state", "", "restarts"):
        services.add_column(column)
    for line in run.services:
        state = Text(line.state, style=_COLOURS.get(line.state, "yellow"))
        services.add_row(
            Text(printable(line.name)), state, Text(printable(line.note)), str(line.restarts) if line.restarts else ""
        )
    groups = _counted(run.counts)
    lines: list[RenderableType] = [Text(f"run {run.run_id}", style="bold"), services]
    if groups:
        lines.append(Text(f"groups: {groups}", style="dim"))
    if run.buffer:
        lines.append(Text(f"buffer: {printable(run.buffer)}", style="red"))
    lines += [Text(printable(waits_for(name, message)), style="red") for name, message in run.broken.items()]
    if run.train or run.validation:
        lines.append(_steps(run))
    newest = max(run.train, default=0)
    if disagreement := _disagreement(newest, run.train.get(newest, {})):
        lines.append(Text(disagreement, style="red"))
    return Group(*lines)


def waits_for(name: str, message: str) -> str:
    return f"waits for environment {name}, which is broken: {message}"


def _disagreement(step: int, metrics: Mapping[str, float]) -> str | None:
    """The alarm of a step, or None."""
    if not metrics.get("train_inference_alarm"):
        return None
    error = _number(metrics, "token_mult_prob_error", ".3f")
    return f"step {step}: trainer and inference disagree (token_mult_prob_error {error}); the trainer's log says how"


def _steps(run: RunSummary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("step", "reward", "validation", "age", "tokens/s", "s/step"):
        table.add_column(column, justify="right")
    for step in sorted({*run.train, *run.validation})[-SHOWN_STEPS:]:
        train, validation = run.train.get(step, {}), run.validation.get(step, {})
        table.add_row(
            f"{step}/{run.max_steps}",
            _number(train, "reward", ".3f"),
            _number(validation, "accuracy", ".3f"),
            _number(train, "avg_trajectory_age", ".1f"),
            _number(train, "performance/tokens_per_sec", ".0f"),
            _number(train, "timing/train/total_step_time", ".2f"),
        )
    return table


def closing_table(run: RunSummary, seconds: float) -> Table:
    """The table at the end of a run: the first and the last values."""
    table = Table(title=f"run {run.run_id}", title_justify="left", show_header=True, header_style="bold")
    for column in ("", "start", "end"):
        table.add_column(column)
    for title, series, key in (
        ("validation accuracy", run.validation, "accuracy"),
        ("reward", run.train, "reward"),
    ):
        steps = sorted(series)
        if steps:
            ends = [f"{_number(series[step], key, '.3f')} (step {step})" for step in (steps[0], steps[-1])]
            table.add_row(title, *ends)
    table.add_row("prompts", "", _counted(run.counts) or "-")
    table.add_row("time", "", f"{int(seconds // 60)} min {seconds % 60:.0f} s")
    return table


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def _number(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else "-"
