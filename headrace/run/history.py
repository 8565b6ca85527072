"""The history of a run from its folder: its state, its steps, and its best value.

`run.json` has the run's state and since when it is in it. `headrace up` writes it, or a trainer that runs without it. A run whose record
says running while no process holds its locks was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.base.errors import CodecError
from headrace.base.files import cannot_write, is_locked, read_json, write_json
from headrace.config import Config
from headrace.run import checkpoints
from headrace.run.checkpoints import LOCK
from headrace.run.collapse import Collapse, CollapseDetector
from headrace.run.journal import JOURNAL, Line, read_journal, surviving

RECORD = "run.json"
CURVES = "curves.html"
_REWARD = "train:reward"
RUN_LOCK = ".lock"  # `headrace up` holds it, in the run's folder

State = Literal["running", "finished", "stopped", "failed", "killed", "unknown"]
Metric = tuple[Literal["train", "validation"], str]
STEP_TIME: Metric = ("train", "timing/train/total_step_time")


class RunRecord(msgspec.Struct, frozen=True):
    """The record of a run, `run.json`. Times are Unix seconds; `reason` is why it failed, `waits` what it waits for while it is up, as
    far as only `headrace up` knows that."""

    started: float
    state: Literal["running", "finished", "stopped", "failed"]
    since: float
    reason: str = ""
    waits: list[str] = []


@dataclasses.dataclass(frozen=True)
class Best:
    """The best value of a metric (`val:accuracy`), and its step: the version that was evaluated, or the step that trained."""

    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        initial = ", the initial model" if self.metric.startswith("val:") and self.step == 0 else ""
        return f"{self.metric} {self.value:.4g} at step {self.step}{initial}"


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """A run as its folder records it. `lines` are the surviving history of its weights. `started` is its first start and `since` the begin
    of its `state`, in Unix seconds; None if unknown."""

    config: Config
    state: State
    lines: Sequence[Line]
    started: float | None = None
    since: float | None = None
    reason: str = ""

    @property
    def is_down(self) -> bool:
        """Whether no process is at work on it. One whose buffer is on another machine may be up there, and its locks can't be seen here."""
        elsewhere = self.config.replay.redis_url is not None and self.state in ("killed", "unknown")
        return self.state != "running" and not elsewhere

    @property
    def last_step(self) -> int | None:
        return max((line.step for line in self.lines if line.kind == "train"), default=None)

    @property
    def seconds(self) -> float:
        """The total time of its steps."""
        return sum(values(self.lines, STEP_TIME).values())

    @property
    def collapse(self) -> Collapse | None:
        """The collapse that lasts at its newest step."""
        return CollapseDetector(self.lines).found

    def best(self) -> Best | None:
        """Return the best value of the metric that chooses checkpoints, or of the reward if that metric has no values."""
        found = (find_best(self.lines, *by) for by in [*_best_by(self.config), (_REWARD, True)])
        return next(filter(None, found), None)


# -- metrics of a history


def parse_metric(name: str, lines: Sequence[Line]) -> Metric:
    """Parse `val:…` or `train:…`. A name without a prefix means whichever of the two the history has."""
    prefix, _, rest = name.partition(":")
    if rest and prefix in ("val", "train"):
        return ("validation" if prefix == "val" else "train"), rest
    trained = any(line.kind == "train" and name in line.metrics for line in lines)
    evaluated = any(line.kind == "validation" and name in line.metrics for line in lines)
    return ("validation" if evaluated and not trained else "train"), name


def values(lines: Sequence[Line], metric: Metric) -> dict[int, float]:
    """Return the values of a metric by step; those of a validation by the version that was evaluated."""
    kind, name = metric
    return {line.step: line.metrics[name] for line in lines if line.kind == kind and name in line.metrics}


def find_best(lines: Sequence[Line], name: str, higher_is_better: bool) -> Best | None:
    """Return the best value of a metric, the newest of equal ones; None if it has no values."""
    found = values(lines, parse_metric(name, lines))
    sign = 1 if higher_is_better else -1
    step = max(
        (step for step in found if found[step] == found[step]),
        key=lambda step: (sign * found[step], step),
        default=None,
    )
    return None if step is None else Best(name, step, found[step])


def _best_by(config: Config) -> list[tuple[str, bool]]:
    """Return what the best is the best of, and whether higher is better: the metric that chooses checkpoints. Where none does, the first of
    these that has values."""
    settings = config.checkpointing
    if settings.metric_name is None:
        return [("val:accuracy", True), (_REWARD, True)]  # `higher_is_better` is of the metric that is not there
    return [(settings.metric_name, settings.higher_is_better)]


def best_weights(config: Config) -> tuple[int, str, float] | None:
    """Return the version with the best value of `checkpointing.metric_name`, that metric and the value; None if no checkpoint has a value.
    Where it is null, the metric is the accuracy, or without validations the reward. The version is that of a checkpoint, or 0 if the
    validation of the initial model was better than that of every checkpoint. Raises `ServiceError` for a journal or metrics that can't be
    read."""
    for metric, higher_is_better in _best_by(config):
        found = _best_weights(config, metric, higher_is_better=higher_is_better)
        if found is not None:
            return found[0], metric, found[1]
    return None


def _best_weights(config: Config, metric: str, *, higher_is_better: bool) -> tuple[int, float] | None:
    saved = checkpoints.best(config.checkpoint_folder, metric, higher_is_better=higher_is_better)
    if saved is None:
        return None
    lines = surviving(read_journal(config.run_folder / JOURNAL))
    initial = find_best([line for line in lines if line.kind == "validation" and line.step == 0], metric, True)
    sign = 1 if higher_is_better else -1
    return saved if initial is None or sign * initial.value <= sign * saved[1] else (0, initial.value)


# -- the folder


def read(config: Config) -> RunHistory:
    """Return the history of the run in `config.run_folder`. Raises `ServiceError` for a journal, and `CodecError` for a `run.json`, that
    can't be read."""
    lines = read_journal(config.run_folder / JOURNAL)
    times = (lines[0].time, lines[-1].time) if lines else None
    return judge(config, surviving(lines), times)


def judge(config: Config, kept: Sequence[Line], times: tuple[float, float] | None) -> RunHistory:
    """Return the history of the run with these surviving lines, and its state now; `times` are those of the first and the last line of its
    journal. Raises `CodecError` for a `run.json` that can't be read."""
    record = read_record(config.run_folder)
    if record is None:  # an older build ran it
        state: State = "running" if _is_held(config) else "unknown"
        return RunHistory(config, state, kept, times[0] if times else None)
    state = record.state
    if state == "running" and not _is_held(config):
        state = "killed"
        return RunHistory(config, state, kept, record.started, times[1] if times else record.since)
    return RunHistory(config, state, kept, record.started, record.since, record.reason)


@contextlib.contextmanager
def recorded(folder: Path, stopped: type[BaseException], clock: Callable[[], float] = time.time) -> Iterator[None]:
    """Record in `run.json` that the run is running, and how it ended; `stopped` is raised when it was stopped. Raises `ServiceError` if the
    folder can't be written."""
    started = now = clock()
    with contextlib.suppress(CodecError):  # it is overwritten
        earlier = read_record(folder)
        started = earlier.started if earlier else now
    try:
        _write(folder, RunRecord(started, "running", now))
    except OSError as error:
        raise cannot_write(folder / RECORD, error) from error

    def end(state: Literal["finished", "stopped", "failed"], reason: str = "") -> None:
        with contextlib.suppress(OSError):  # the error that ended the run matters more
            _write(folder, RunRecord(started, state, clock(), reason))

    try:
        yield
    except (stopped, KeyboardInterrupt):
        end("stopped")
        raise
    except BaseException as error:
        end("failed", str(error) or repr(error))
        raise
    end("finished")


def note_waits(folder: Path, waits: list[str]) -> None:
    """Note what a run that is up waits for."""
    with contextlib.suppress(CodecError, OSError):  # the run goes on without it
        if record := read_record(folder):  # an evaluation has none
            _write(folder, msgspec.structs.replace(record, waits=waits))


def are_curves_old(folder: Path) -> bool:
    """Whether the page of curves lacks newest lines of the journal, because the trainer that wrote them was killed before it drew them."""
    try:
        written = (folder / JOURNAL).stat().st_mtime_ns
    except OSError:  # nothing to draw
        return False
    page = folder / CURVES
    return not page.exists() or page.stat().st_mtime_ns < written


def _is_held(config: Config) -> bool:
    """Whether `headrace up` or a trainer is running the run."""
    return is_locked(config.run_folder / RUN_LOCK) or is_locked(config.checkpoint_folder / LOCK)


def _write(folder: Path, record: RunRecord) -> None:
    write_json(folder / RECORD, record)


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of the run in `folder`; None without one. Raises `CodecError`."""
    return read_json(folder / RECORD, RunRecord)
