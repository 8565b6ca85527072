"""The metrics that a run has, and their curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CodecError
from headrace.page.run_files import NotHere, RunFiles, RunJournal
from headrace.run.headlines import build_changes
from headrace.run.journal import Kind
from headrace.run.metric_names import find_metric

_KINDS: dict[str, Kind] = {"train": "train", "validation": "validation", "val": "validation"}
_SHOWN = 20  # keys of a change
_OTHER = "Others"  # the section of metrics that the registry doesn't know: those of an older build

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def list_metrics(run: RunFiles) -> dict[str, Any]:
    """Return the metrics of a run, and what happened to it at which step. Raises as `RunFiles.journal` does."""
    journal = run.journal
    names = []
    for kind, columns in journal.columns.items():
        for name in columns.table.names:
            values, present = columns.values(name)
            if present.any():
                names.append(_describe(kind, name, empty=not np.isfinite(values[present]).any()))
    steps, marks, problems = [line.step for line in journal.lines], _marks(journal), list[str]()
    try:
        marks += _changes(run)
    except CodecError as error:
        problems.append(str(error))
    return {
        "names": names,
        "marks": sorted(marks, key=lambda mark: mark["step"]),
        "steps": [min(steps), max(steps)] if steps else None,
        "problems": problems,
    }


def _describe(kind: Kind, name: str, *, empty: bool) -> dict[str, Any]:
    found = find_metric(kind, name)
    section, unit, meaning = (_OTHER, "", "") if found is None else (found[0].title, found[1].unit, found[1].meaning)
    return {"kind": kind, "name": name, "section": section, "help": meaning, "unit": unit, "empty": empty}


def _marks(journal: RunJournal) -> list[dict[str, Any]]:
    builds = build_changes((line.step, line.builds) for line in journal.lines if line.kind == "train")
    marks = [{"step": step, "kind": "build", "text": text} for step, text in builds]
    marks += [
        {"step": line.step, "kind": "rewind", "text": f"continued from checkpoint {line.step}"}
        for line in journal.rewinds
    ]
    if (collapse := journal.collapse) is not None:
        marks.append({"step": collapse.step, "kind": "collapse", "text": str(collapse)})
    return marks


def _changes(run: RunFiles) -> list[dict[str, Any]]:
    """Return a mark where a start changed the configuration, at the first step that was trained with it. Raises `CodecError` for a record
    of the starts that can't be read."""
    started = run.start
    trained = [line for line in run.journal.lines if line.kind == "train"]
    marks = []
    for changed in () if started is None else started.changes:
        step = next((line.step for line in trained if line.time >= changed.time), None)
        if step is not None:
            marks.append({"step": step, "kind": "configuration", "text": _few(changed.keys)})
    return marks


def _few(keys: Sequence[str]) -> str:
    more = [f"and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return "; ".join([*keys[:_SHOWN], *more])


def read_series(
    run: RunFiles, metrics: Sequence[str], points: int, first: int | None = None, last: int | None = None
) -> dict[str, Any]:
    """Return the curves of metrics (`train:reward`), each with at most `points` points, between two steps. Raises `NotHere` for a name
    without its kind, and as `RunFiles.journal` does."""
    journal = run.journal
    series = []
    for wanted in metrics:
        prefix, _, name = wanted.partition(":")
        if prefix not in _KINDS or not name:
            raise NotHere(f"metric {wanted!r:.100} is not KIND:NAME, as train:reward or validation:accuracy")
        columns = journal.columns[_KINDS[prefix]]
        values, present = columns.values(name)
        if first is not None:
            present = present & (columns.steps >= first)
        if last is not None:
            present = present & (columns.steps <= last)
        steps, means, low, high = thin_out(columns.steps[present], values[present], points)
        missing = int(np.count_nonzero(~np.isfinite(values[present])))
        series.append({"metric": wanted, "steps": steps, "values": means, "low": low, "high": high, "missing": missing})
    return {"series": series}


def thin_out(
    steps: Ints, values: Floats, points: int
) -> tuple[list[int], list[float | None], list[float | None], list[float | None]]:
    """Return at most `points` buckets of neighbouring values: the last step of each, and the mean, the least and the greatest of its finite
    values. None for a bucket without any."""
    count = len(steps)
    if count == 0:
        return [], [], [], []
    starts = np.unique(np.linspace(0, count, min(points, count), endpoint=False).astype(np.int64))
    ends = np.append(starts[1:], count) - 1
    finite = np.isfinite(values)
    number = np.add.reduceat(finite.astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    # relative to the greatest: a sum of values near the largest number is none
    scale = np.maximum(np.abs(np.where(finite, values, 0.0)).max(), 1e-300)
    sums = np.add.reduceat(np.where(finite, values / scale, 0.0), starts)
    with np.errstate(invalid="ignore", over="ignore"):
        means = sums / np.maximum(number, 1) * scale
    return steps[ends].tolist(), *(_known(each, number) for each in (means, low, high))


def _known(values: Floats, number: Ints) -> list[float | None]:
    return [value if count else None for value, count in zip(values.tolist(), number.tolist(), strict=True)]
