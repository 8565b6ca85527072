"""What a person sees of a run: a live table on a terminal, one line an event elsewhere, and the summary at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

SHOWN_STEPS = 10
# A replica between two versions of the weights: every step, so that a line each would drown the rest.
UPDATING = "updating"
_COLOURS = {"ready": "green", "finished": "green", "failed": "red", "restarting": "yellow", "silent": "red"}


@dataclasses.dataclass(frozen=True)
class ServiceLine:
    name: str
    state: str
    restarts: int
    note: str


@dataclasses.dataclass
class Picture:
    """What is known of the run. `train` and `validation` hold the metrics of each step; a step trained again replaces itself."""

    run_id: str
    max_steps: int
    services: list[ServiceLine] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    train: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    validation: dict[int, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    last_entry: str = "0"
    buffer: str = ""  # why the buffer can't be read at the moment

    def take(self, entry: str, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Note an entry of the metric stream. A step behind the last one means a rewind: what came after it is void."""
        self.last_entry = entry
        series = self.train if kind == "train" else self.validation
        for later in [known for known in series if known > step]:
            del series[later]
        series[step] = metrics


class View(Protocol):
    def tell(self, line: str) -> None: ...
    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None: ...
    def show(self, picture: Picture) -> None: ...


class PlainView:
    """One line an event: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._states: dict[str, str] = {}

    def tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        if kind == "validation":
            self.tell(f"step {step}: validation accuracy {_number(metrics, 'accuracy', '.3f')}")
        else:
            self.tell(
                f"step {step}: reward {_number(metrics, 'reward', '.3f')}, age {_number(metrics, 'avg_trajectory_age', '.1f')}, "
                f"{_number(metrics, 'performance/tokens_per_sec', '.0f')} tokens/s, "
                f"{_number(metrics, 'timing/train/total_step_time', '.2f')} s"
            )
            if disagreement := _disagreement(step, metrics):
                self.tell(disagreement)

    def show(self, picture: Picture) -> None:
        for line in picture.services:
            if line.state != UPDATING and self._states.get(line.name) != line.state:
                self._states[line.name] = line.state
                self.tell(f"{line.name}: {line.state}")


class LiveView:
    """A table that is drawn anew: services beside the last steps."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def tell(self, line: str) -> None:
        self.live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing of its own: `show` draws them."""

    def show(self, picture: Picture) -> None:
        self.live.update(draw(picture), refresh=True)


def draw(picture: Picture) -> RenderableType:
    services = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("service", "state", "", "restarts"):
        services.add_column(column)
    for line in picture.services:
        state = Text(line.state, style=_COLOURS.get(line.state, "yellow"))
        services.add_row(line.name, state, line.note, str(line.restarts) if line.restarts else "")
    groups = ", ".join(f"{count} {state}" for state, count in picture.counts.items() if count)
    lines: list[RenderableType] = [Text(f"run {picture.run_id}", style="bold"), services]
    if groups:
        lines.append(Text(f"groups: {groups}", style="dim"))
    if picture.buffer:
        lines.append(Text(f"buffer: {picture.buffer}", style="red"))
    if picture.train or picture.validation:
        lines.append(_steps(picture))
    newest = max(picture.train, default=0)
    if disagreement := _disagreement(newest, picture.train.get(newest, {})):
        lines.append(Text(disagreement, style="red"))
    return Group(*lines)


def _disagreement(step: int, metrics: Mapping[str, float]) -> str | None:
    """The alarm of a step, if there is one."""
    if not metrics.get("train_inference_alarm"):
        return None
    error = _number(metrics, "token_mult_prob_error", ".3f")
    return f"step {step}: trainer and inference disagree (token_mult_prob_error {error}); the trainer's log says how"


def _steps(picture: Picture) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("step", "reward", "validation", "age", "tokens/s", "s/step"):
        table.add_column(column, justify="right")
    for step in sorted({*picture.train, *picture.validation})[-SHOWN_STEPS:]:
        train, validation = picture.train.get(step, {}), picture.validation.get(step, {})
        table.add_row(
            f"{step}/{picture.max_steps}",
            _number(train, "reward", ".3f"),
            _number(validation, "accuracy", ".3f"),
            _number(train, "avg_trajectory_age", ".1f"),
            _number(train, "performance/tokens_per_sec", ".0f"),
            _number(train, "timing/train/total_step_time", ".2f"),
        )
    return table


def summary(picture: Picture, seconds: float) -> Table:
    """The end of a run: where it started and where it got to."""
    table = Table(title=f"run {picture.run_id}", title_justify="left", show_header=True, header_style="bold")
    for column in ("", "start", "end"):
        table.add_column(column)
    for title, series, key in (
        ("validation accuracy", picture.validation, "accuracy"),
        ("reward", picture.train, "reward"),
    ):
        steps = sorted(series)
        if steps:
            ends = [f"{_number(series[step], key, '.3f')} (step {step})" for step in (steps[0], steps[-1])]
            table.add_row(title, *ends)
    table.add_row("time", "", f"{int(seconds // 60)} min {seconds % 60:.0f} s")
    return table


def _number(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else "-"
