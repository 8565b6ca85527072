"""How fast groups flow through a run: how many enter each state a second, over the steps of a window."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from headrace.page.run_files import RunFiles
from headrace.records.group_event import Cursor, GroupState, parse_cursor
from headrace.run import group_files
from headrace.run.findings import TOTAL, Window, in_window, usual
from headrace.run.group_files import GroupFile
from headrace.run.journal import Line

Spans = Sequence[tuple[float, float]]

_FIELDS = ("time", "group", "what", "lane")
# The event of a group that enters a state, where it has another name.
_EVENTS = {"enqueued": "queued", "leased": "open"}
# A group of a validation is enqueued, and says that it is one, at most so long before another of its events.
_BEFORE_S = 900.0


def per_second(run: RunFiles, window: Window) -> dict[str, float]:
    """Return how many training groups enter each state a second, by state, over the steps of the window; and `evaluated`, those of
    validations. `trained` is what the steps trained, because commits come in bunches. The others are counted in the history of groups, and
    absent without one. Empty without a step that was timed. Raises as `RunFiles.history` does, `CodecError` for a damaged file of the
    history, and `ConfigError` without pyarrow."""
    past = run.history
    lines = in_window(past.lines, window)
    spans = _spans(lines)
    seconds = sum(end - start for start, end in spans)
    if seconds <= 0:
        return {}
    timed = sum(map(_is_timed, usual(lines)))
    rates = {"trained": timed * past.config.algorithm.num_prompts_per_step / seconds}
    folder = run.folder / group_files.FOLDER
    files = group_files.list_files(folder)
    # the trainer writes events every few seconds: those after the newest millisecond are not known yet
    newest = max(((file.last[0] + 1) / 1000 for file in files), default=-math.inf)
    known = [(start, min(end, newest)) for start, end in spans if start < newest]
    if not known:
        return rates
    entered, seconds = _count(folder, files, known), sum(end - start for start, end in known)
    return {state: entered[state] / seconds for state in get_args(GroupState)} | rates


def _is_timed(line: Line) -> bool:
    return math.isfinite(line.metrics.get(TOTAL, math.nan))


def _spans(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Return the times in which these steps were trained: a range for steps in a row. The time between two starts is in none."""
    spans: list[tuple[float, float]] = []
    timed = {id(line) for line in usual(lines) if _is_timed(line)}
    for is_timed, steps in itertools.groupby(lines, key=lambda line: id(line) in timed):
        if is_timed:
            row = list(steps)
            spans.append((row[0].time - row[0].metrics[TOTAL], row[-1].time))
    return spans


def _count(folder: Path, files: Sequence[GroupFile], spans: Spans) -> collections.Counter[str]:
    """Return how many training groups entered each state within the spans."""
    entered = collections.Counter[str]()
    first, last = spans[0][0], spans[-1][1]
    evaluating: set[str] = set()
    until: Cursor = (-1, -1)
    for file in files:
        if file.last <= until or file.last[0] / 1000 < first - _BEFORE_S or file.first[0] / 1000 > last:
            continue
        try:
            table = group_files.read_file(file.path, ("id", *_FIELDS) if file.first <= until else _FIELDS)
        except FileNotFoundError:  # it was merged with others meanwhile
            return _count(folder, group_files.list_files(folder), spans)
        if file.first <= until:  # it repeats events of those before it
            table = table.filter([parse_cursor(entry) > until for entry in table["id"].to_pylist()])
        until = file.last
        entered += _count_file(table, spans, evaluating)
    return entered


def _count_file(table: Any, spans: Spans, evaluating: set[str]) -> collections.Counter[str]:
    """Return what `_count` does, of one file. `evaluating` are groups of validations that were enqueued before and have not ended."""
    import pyarrow
    from pyarrow import compute

    def among(names: Sequence[str] | set[str], values: Any) -> Any:
        return compute.is_in(values, value_set=pyarrow.array(sorted(names), pyarrow.string()))

    names = {"enqueued", "leased", *get_args(GroupState)}
    table = table.filter(among(names, table["what"]))
    begun = table.filter(compute.equal(table["lane"], "validation"))["group"].to_pylist()
    is_end = compute.equal(table["what"], "evaluated")
    ended = table.filter(is_end)["group"].to_pylist()
    evaluating.update(begun)
    found = table.filter(compute.or_(is_end, compute.invert(among(evaluating | {*ended}, table["group"]))))
    # groups that ended can't come back
    evaluating.difference_update(ended)
    # at or after an odd number of edges: from a start on, and before its end
    edges = np.array(spans).ravel()
    within = np.searchsorted(edges, found["time"].cast("int64").to_numpy() / 1000, side="right") % 2 == 1
    counted = compute.value_counts(found.filter(pyarrow.array(within))["what"]).to_pylist()
    return collections.Counter({_EVENTS.get(each["values"], each["values"]): each["counts"] for each in counted})
