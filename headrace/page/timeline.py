"""Who did what when: the trainer's steps from the journal; generation by replica and scoring by environment from the events of groups.

A lane has at most `MOST_BARS` bars. Of more, the longest half stays, and the others are merged with their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CodecError, HeadraceError
from headrace.page.run_files import RunFiles
from headrace.run import group_files
from headrace.run.findings import PARTS, REST, TOTAL

# Bars of one lane, and of all lanes together.
MOST_BARS, MOST_OF_ALL = 2000, 100_000
# Events that one answer reads at most, the newest ones.
MOST_EVENTS = 500_000
# Events before the window that may begin a bar in it.
_BEFORE_S = 900.0
# The parts of a step in the order in which the loop takes them.
_ORDER = (
    "waiting for generation",
    "waiting for scores",
    "log-probabilities",
    "value training",
    "policy training",
    REST,
    "refit",
    "validation",
    "checkpoint",
)
_TRAINER = "trainer"

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bar = dict[str, Any]
Lane = tuple[str, str, list[Bar]]  # its name, its kind, and its bars


def describe(run: RunFiles, first: float | None = None, last: float | None = None) -> dict[str, Any]:
    """Return the lanes between two times, by default those of the whole run, from its first bar on. Raises as `RunFiles.history` does. What
    can't be read is in `problems`."""
    journal, problems = run.journal, list[str]()
    files = group_files.list_files(run.folder / group_files.FOLDER)
    if last is None:
        ends = [journal.times[1]] if journal.times else []
        last = max([*ends, *(file.last[0] / 1000 for file in files[-1:])], default=first or 0.0)
    begin = -math.inf if first is None else first
    lanes: list[Lane] = [(_TRAINER, "trainer", _steps(run, begin, last))]
    try:
        lanes += _of_events(run, files, begin, last, problems)
    except HeadraceError as error:
        problems.append(str(error))
    if not files and journal.lines:
        problems.append(
            "the build that ran it wrote no history of groups, so what replicas and environments did is unknown"
        )
    if first is None:
        first = min((bar["start"] for _, _, bars in lanes for bar in bars), default=last)
    most = max(1, min(MOST_BARS, MOST_OF_ALL // len(lanes)))
    shown = [_lane(*lane, first, last, most) for lane in lanes]
    return {"first": first, "last": last, "lanes": shown, "problems": problems}


def _lane(name: str, kind: str, bars: list[Bar], first: float, last: float, most: int) -> dict[str, Any]:
    merged = len(bars) > most
    return {"name": name, "kind": kind, "bars": merge(bars, first, last, most) if merged else bars, "merged": merged}


def merge(bars: list[Bar], first: float, last: float, most: int = MOST_BARS) -> list[Bar]:
    """Return at most `most` bars: the longest half of them as they are, and the others merged by what they are and where they are."""
    by_length = sorted(range(len(bars)), key=lambda place: bars[place]["start"] - bars[place]["end"])
    kept = [bars[place] for place in by_length[: most // 2]]
    slots = most - len(kept)
    width = max(last - first, 1e-9) / slots
    merged: dict[int, list[Bar]] = {}
    for place in by_length[most // 2 :]:
        bar = bars[place]
        slot = int(((bar["start"] + bar["end"]) / 2 - first) / width)
        merged.setdefault(min(max(slot, 0), slots - 1), []).append(bar)
    for together in merged.values():
        start, end = min(bar["start"] for bar in together), max(bar["end"] for bar in together)
        kinds = list(dict.fromkeys(bar["what"] for bar in together))
        one = together[0]
        shared = {key: one[key] if all(bar[key] == one[key] for bar in together) else None for key in _SHARED}
        text = one["text"] if len(together) == 1 else f"{len(together)} of {', '.join(kinds)}"
        what = kinds[0] if len(kinds) == 1 else "several"
        kept.append({"start": start, "end": end, "what": what, **shared, "text": text, "count": len(together)})
    return sorted(kept, key=lambda bar: (bar["start"], bar["end"]))


_SHARED = ("version", "step", "group", "index")


def _bar(start: float, end: float, what: str, text: str, **known: Any) -> Bar:
    return {"start": start, "end": end, "what": what, **dict.fromkeys(_SHARED), **known, "text": text}


# -- the trainer


def _steps(run: RunFiles, first: float, last: float) -> list[Bar]:
    """Return the parts of the steps, the validations and the writing of checkpoints. How long each part took is measured; their order in a
    step is that in which the loop takes them."""
    bars: list[Bar] = []
    metrics = {part.name: part.metric for part in PARTS}
    columns = run.journal.columns["train"]
    times = np.array([line.time for line in run.journal.lines if line.kind == "train"])
    total, _ = columns.values(TOTAL)
    shown = np.flatnonzero((times >= first) & (times - total <= last)) if len(times) else np.array([], dtype=np.int64)
    of_part = {name: np.nan_to_num(columns.values(metric)[0]) for name, metric in metrics.items()}
    writes, written = columns.values("timing/train/checkpoint_write")
    for place in shown.tolist():
        step, end = int(columns.steps[place]), float(times[place])
        start = end - float(total[place])
        seconds = {name: float(values[place]) for name, values in of_part.items()}
        seconds[REST] = max(0.0, float(total[place]) - sum(seconds.values()))
        for name in _ORDER:
            if seconds[name] > 0:
                text = f"step {step}: {name}, {seconds[name]:.3g} s"
                bars.append(_bar(start, start + seconds[name], name, text, step=step, version=step))
                start += seconds[name]
        if written[place]:
            text = f"a checkpoint was written, {writes[place]:.3g} s"
            bars.append(_bar(end - float(writes[place]), end, "checkpoint written", text, step=step))
    for line in run.journal.lines:
        took = line.metrics.get("timing/validation/total_validation_time") if line.kind == "validation" else None
        if took is not None and line.time >= first and line.time - took <= last:
            text = f"validation of version {line.step}, {took:.3g} s"
            bars.append(_bar(line.time - took, line.time, "validation run", text, version=line.step))
    return bars


# -- replicas and environments


class _Events:
    """The events of groups in a range of time, column by column, in the order of their times."""

    def __init__(self, files: Sequence[group_files.GroupFile], first: float, last: float, problems: list[str]) -> None:
        import pyarrow
        import pyarrow.compute

        columns = ("time", "group", "what", "index", "replica", "newest", "build", "reward", "environment")
        inside = [file for file in files if file.last[0] / 1000 >= first - _BEFORE_S and file.first[0] / 1000 <= last]
        tables, count = [], 0
        for file in reversed(inside):
            if count >= MOST_EVENTS:
                problems.append(
                    f"the range has too many events; only its newest {count} are shown: choose a shorter one"
                )
                break
            try:
                tables.append(group_files.read_file(file.path, columns))
                count += tables[-1].num_rows
            except FileNotFoundError:
                continue  # it was merged with others meanwhile, whose events the next answer has
            except CodecError as error:
                problems.append(str(error))
        self.time: Floats = np.array([])
        if not count:
            return
        table = pyarrow.concat_tables(tables[::-1])
        table = table.filter(pyarrow.compute.is_valid(table["group"])).sort_by("time")
        self.time = table["time"].cast("int64").to_numpy() / 1000
        self.index: Ints = table["index"].fill_null(-1).to_numpy().astype(np.int64)
        self.newest: Ints = table["newest"].fill_null(-1).to_numpy().astype(np.int64)
        self.reward: Floats = table["reward"].to_numpy()
        self.groups, self.group = _codes(table["group"])
        self.replicas, self.replica = _codes(table["replica"].fill_null(""))
        self.environments, self.environment = _codes(table["environment"].fill_null(""))
        self._whats, self._what = _codes(table["what"])

    def where(self, what: str) -> Ints:
        return np.flatnonzero(self._what == self._whats.index(what)) if what in self._whats else np.array([], np.int64)


def _codes(column: Any) -> tuple[list[str], Ints]:
    encoded = column.combine_chunks().dictionary_encode()
    if hasattr(encoded, "combine_chunks"):
        encoded = encoded.combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _of_events(
    run: RunFiles, files: Sequence[group_files.GroupFile], first: float, last: float, problems: list[str]
) -> list[Lane]:
    if not files:
        return []
    group_files.import_parquet()
    events = _Events(files, first, last, problems)
    if not len(events.time):
        return []
    return [*_replicas(events, first, last), *_environments(run, events, first, last)]


def _latest(keys: Ints, times: Floats, of: Ints, at: Floats) -> Ints:
    """Return, for each pair of `of` and `at`, the place of the newest of `keys` and `times` with the same key, at that time or before; -1
    if there is none."""
    if not len(keys):
        return np.full(len(of), -1, dtype=np.int64)
    order = np.lexsort((times, keys))
    sorted_keys, sorted_times = keys[order], times[order]
    # milliseconds, so that a key and a time make one number
    start = min(float(times.min()), float(at.min())) if len(at) else 0.0
    span = int((max(float(times.max()), float(at.max()) if len(at) else 0.0) - start) * 1000) + 2
    combined = sorted_keys * span + np.rint((sorted_times - start) * 1000).astype(np.int64)
    wanted = of * span + np.rint((at - start) * 1000).astype(np.int64)
    found = np.searchsorted(combined, wanted, side="right") - 1
    valid = (found >= 0) & (sorted_keys[np.maximum(found, 0)] == of)
    return np.where(valid, order[np.maximum(found, 0)], -1)


def _replicas(events: _Events, first: float, last: float) -> list[Lane]:
    """A trajectory's bar begins with the lease of its group and ends with its push: the replica generates all of a group together."""
    leased, pushed = events.where("leased"), events.where("pushed")
    begin = _latest(events.group[leased], events.time[leased], events.group[pushed], events.time[pushed])
    of_lane: dict[str, list[Bar]] = {}
    for place, lease in zip(pushed.tolist(), begin.tolist(), strict=True):
        end, who = float(events.time[place]), int(events.replica[place])
        start, leaseholder = (
            (float(events.time[leased[lease]]), int(events.replica[leased[lease]])) if lease >= 0 else (end, who)
        )
        if end >= first and start <= last:
            group, index, version = (
                events.groups[events.group[place]],
                int(events.index[place]),
                int(events.newest[place]),
            )
            known = {"group": group, "index": index, "version": version if version >= 0 else None}
            bar = _bar(start, end, "generation", f"group {group}, trajectory {index}", **known)
            # a push is of the replica that has the lease, and need not say so
            name = events.replicas[who] or events.replicas[leaseholder] or "unknown replica"
            of_lane.setdefault(name, []).append(bar)
    return [(name, "replica", bars) for name, bars in sorted(of_lane.items())]


def _environments(run: RunFiles, events: _Events, first: float, last: float) -> list[Lane]:
    """A trajectory's bar begins with its push and ends with its score."""
    pushed, scored = events.where("pushed"), events.where("scored")
    most = int(events.index.max(initial=0)) + 2
    keys = events.group * most + events.index
    begin = _latest(keys[pushed], events.time[pushed], keys[scored], events.time[scored])
    enqueued = events.where("enqueued")
    environment_of = dict(zip(events.group[enqueued].tolist(), events.environment[enqueued].tolist(), strict=True))
    only = next(iter(run.config.env)) if len(run.config.env) == 1 else "unknown environment"
    of_lane: dict[str, list[Bar]] = {}
    for place, push in zip(scored.tolist(), begin.tolist(), strict=True):
        start, end = (
            float(events.time[pushed[push]]) if push >= 0 else float(events.time[place]),
            float(events.time[place]),
        )
        if end >= first and start <= last:
            code = environment_of.get(int(events.group[place]))
            name = (events.environments[code] if code is not None else "") or only
            group, index, reward = (
                events.groups[events.group[place]],
                int(events.index[place]),
                float(events.reward[place]),
            )
            text = f"group {group}, trajectory {index}: reward {reward:.4g}"
            of_lane.setdefault(name, []).append(_bar(start, end, "scoring", text, group=group, index=index))
    return [(name, "environment", bars) for name, bars in sorted(of_lane.items())]
