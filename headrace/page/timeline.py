"""Who did what when: the trainer's steps from the journal; generation by replica and scoring by environment from the events of groups.

A lane has at most `MOST_BARS` bars. Of more, those that can be told apart in a drawing stay, and the others are merged with their
neighbours. Until then bars are columns: a long run has hundreds of thousands, and only those that are shown become objects.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CodecError, HeadraceError
from headrace.page.answers import encode
from headrace.page.run_files import RunFiles, written
from headrace.run import group_files
from headrace.run.findings import PARTS, REST, TOTAL

# Bars of one lane, and of all lanes together.
MOST_BARS, MOST_OF_ALL = 2000, 100_000
# Events that one answer reads at most, the newest ones: about 50 bytes each for a moment.
MOST_EVENTS = 2_000_000
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
_NONE = -1  # in a column of codes or numbers

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bars as columns, in any order. `what` has places of `kinds`, `group` places of `groups`; -1 stands for what a bar doesn't have. `say`
    returns the text of the bar at a place."""

    start: Floats
    end: Floats
    what: Ints
    kinds: Sequence[str]
    say: Callable[[int], str]
    version: Ints
    step: Ints
    group: Ints
    index: Ints
    groups: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.start)

    def show(self, places: Ints, cuts: Ints) -> Iterator[dict[str, Any]]:
        """Yield a bar, as it is sent, for those at the places from each cut to the next: where they are together, what most of their time
        is, and what else they share."""
        sizes = np.diff(cuts, append=len(places))
        starts = np.minimum.reduceat(self.start[places], cuts).tolist()
        ends = np.maximum.reduceat(self.end[places], cuts).tolist()
        columns = [self._shared(column[places], cuts) for column in (self.version, self.step, self.index, self.group)]
        for number, (cut, size, kinds, version, step, index, group) in enumerate(
            zip(cuts.tolist(), sizes.tolist(), self._kinds(places, sizes), *columns, strict=True)
        ):
            bar = {
                "start": starts[number],
                "end": ends[number],
                "what": kinds[0],
                "version": version,
                "step": step,
                "group": None if group is None else self.groups[group],
                "index": index,
            }
            if size == 1:
                yield bar | {"text": self.say(int(places[cut]))}
            else:
                yield bar | {"text": f"{size} of {', '.join(kinds)}", "count": size}

    @staticmethod
    def _shared(values: Ints, cuts: Ints) -> list[int | None]:
        """Return the value that those from each cut to the next have, None if they differ or have none."""
        low, high = np.minimum.reduceat(values, cuts), np.maximum.reduceat(values, cuts)
        shared = low.astype(object)
        shared[(low != high) | (low == _NONE)] = None
        found: list[int | None] = shared.tolist()
        return found

    def _kinds(self, places: Ints, sizes: Ints) -> Iterator[list[str]]:
        """Yield the kinds of so many bars at the places, that with the most time first."""
        if len(self.kinds) == 1:
            yield from itertools.repeat([self.kinds[0]], len(sizes))
            return
        kind = np.repeat(np.arange(len(sizes)), sizes) * len(self.kinds) + self.what[places]
        shape = len(sizes), len(self.kinds)
        times = np.bincount(kind, self.end[places] - self.start[places], math.prod(shape)).reshape(shape)
        counts = np.bincount(kind, minlength=math.prod(shape)).reshape(shape)
        for of_kinds, order in zip(counts.tolist(), np.argsort(-times, axis=1, kind="stable").tolist(), strict=True):
            yield [self.kinds[code] for code in order if of_kinds[code]]


@dataclasses.dataclass(frozen=True)
class Lane:
    name: str
    kind: Literal["trainer", "replica", "environment"]
    bars: Bars


def describe(run: RunFiles, first: float | None = None, last: float | None = None) -> Mapping[str, Any] | msgspec.Raw:
    """Return the lanes between two times, by default those of the whole run, from its first bar on. Raises as `RunFiles.history` does. What
    can't be read is in `problems`."""
    if first is not None or last is not None:
        return _describe(run, first, last)
    # every look at a run begins with its whole timeline
    files = group_files.list_files(run.folder / group_files.FOLDER)
    read = [(file.name, written(file.path)) for file in files], run.journal.times, len(run.journal.lines)
    return run.find_once((__name__, read, run.history.state), lambda: msgspec.Raw(encode(_describe(run))))


def _describe(run: RunFiles, first: float | None = None, last: float | None = None) -> dict[str, Any]:
    journal, problems = run.journal, list[str]()
    files = group_files.list_files(run.folder / group_files.FOLDER)
    if last is None:
        ends = [journal.times[1]] if journal.times else []
        last = max([*ends, *(file.last[0] / 1000 for file in files[-1:])], default=first or 0.0)
    begin = -math.inf if first is None else first
    lanes = [Lane(_TRAINER, "trainer", _steps(run, begin, last))]
    try:
        lanes += _of_events(run, files, begin, last, problems)
    except HeadraceError as error:
        problems.append(str(error))
    if not files and journal.lines:
        problems.append(
            "the build that ran it wrote no history of groups, so what replicas and environments did is unknown"
        )
    if first is None:
        first = min((float(lane.bars.start.min()) for lane in lanes if len(lane.bars)), default=last)
    most = max(1, min(MOST_BARS, MOST_OF_ALL // len(lanes)))
    shown = [
        {
            "name": lane.name,
            "kind": lane.kind,
            "bars": show(lane.bars, first, last, most),
            "merged": len(lane.bars) > most,
        }
        for lane in lanes
    ]
    running = run.history.state == "running"
    return {"first": first, "last": last, "running": running, "lanes": shown, "problems": problems}


def show(bars: Bars, first: float, last: float, most: int = MOST_BARS) -> list[dict[str, Any]]:
    """Return at most `most` bars, in the order of their starts. Of more, those that are longer than a place in the drawing are as they are,
    at most half of `most`, and the others are merged by their places."""
    if len(bars) <= most:
        kept, others, slot = np.arange(len(bars)), np.array([], np.int64), np.array([], np.int64)
    else:
        slots = most - most // 2
        # a lane of instants has no width
        width = max(last - first, 1e-9) / slots
        by_length = np.argsort(bars.start - bars.end, kind="stable")
        long = min(most // 2, np.count_nonzero(bars.end - bars.start > width))
        kept, others = by_length[:long], by_length[long:]
        middle = (bars.start[others] + bars.end[others]) / 2
        slot = np.clip((middle - first) / width, 0, slots - 1).astype(np.int64)
        order = np.argsort(slot, kind="stable")
        others, slot = others[order], slot[order]
    cuts = np.concatenate([np.arange(len(kept)), len(kept) + np.flatnonzero(np.diff(slot, prepend=_NONE))])
    shown = bars.show(np.concatenate([kept, others]), cuts) if len(bars) else ()
    return sorted(shown, key=lambda bar: (bar["start"], bar["end"]))


# -- the trainer


def _steps(run: RunFiles, first: float, last: float) -> Bars:
    """Return the parts of the steps, the validations and the writing of checkpoints. How long each part took is measured; their order in a
    step is that in which the loop takes them."""
    metrics = {part.name: part.metric for part in PARTS}
    columns = run.journal.columns["train"]
    times = np.array([line.time for line in run.journal.lines if line.kind == "train"])
    total, _ = columns.values(TOTAL)
    rows = np.flatnonzero((times >= first) & (times - total <= last)) if len(times) else np.array([], dtype=np.int64)
    times, total, steps = times[rows], total[rows], columns.steps[rows]
    took = {name: np.nan_to_num(columns.values(metric)[0][rows]) for name, metric in metrics.items()}
    took[REST] = np.maximum(0.0, total - sum(took.values()))
    # one row a step, one column a part
    lengths = np.stack([took[name] for name in _ORDER], axis=1)
    ends = (times - total)[:, None] + np.cumsum(lengths, axis=1)
    which, part = np.nonzero(lengths > 0)
    writes, written = (column[rows] for column in columns.values("timing/train/checkpoint_write"))
    wrote = np.flatnonzero(written)
    checked = np.array(list(_validations(run, first, last))).reshape(-1, 3)
    kinds = (*_ORDER, "checkpoint written", "validation run")
    start = np.concatenate([(ends - lengths)[which, part], (times - writes)[wrote], checked[:, 0]])
    end = np.concatenate([ends[which, part], times[wrote], checked[:, 1]])
    what = np.concatenate([part, np.full(len(wrote), len(_ORDER)), np.full(len(checked), len(_ORDER) + 1)])
    step = np.concatenate([steps[which], steps[wrote], np.full(len(checked), _NONE)])
    version = np.concatenate([steps[which], np.full(len(wrote), _NONE), checked[:, 2].astype(np.int64)])

    def say(place: int) -> str:
        kind, seconds = kinds[what[place]], f"{end[place] - start[place]:.3g} s"
        match kind:
            case "checkpoint written":
                return f"a checkpoint was written, {seconds}"
            case "validation run":
                return f"validation of version {version[place]}, {seconds}"
        return f"step {step[place]}: {kind}, {seconds}"

    none = np.full(len(start), _NONE)
    return Bars(start, end, what, kinds, say, version, step, none, none)


def _validations(run: RunFiles, first: float, last: float) -> Iterator[tuple[float, float, int]]:
    """Yield when validations began and ended, and of which version they were."""
    for line in run.journal.lines:
        took = line.metrics.get("timing/validation/total_validation_time") if line.kind == "validation" else None
        if took is not None and line.time >= first and line.time - took <= last:
            yield line.time - took, line.time, line.step


# -- replicas and environments


class _Events:
    """The events of groups in a range of time, column by column, in the order in which they were written."""

    def __init__(self, files: Sequence[group_files.GroupFile], first: float, last: float, problems: list[str]) -> None:
        span = max(0, math.floor((first - _BEFORE_S) * 1000)) if math.isfinite(first) else 0, math.ceil(last * 1000)
        inside = [file for file in files if file.last[0] >= span[0] and file.first[0] <= span[1]]
        columns = group_files.EventColumns(
            ("time", "group", "what", "index", "replica", "newest", "reward", "environment")
        )
        for file in reversed(inside):
            try:
                if not columns.read(file.path, span, MOST_EVENTS):
                    problems.append(
                        f"the range has too many events; only its newest {columns.count} are shown: choose a shorter one"
                    )
                    break
            except FileNotFoundError:
                continue  # it was merged with others meanwhile, whose events the next answer has
            except CodecError as error:
                problems.append(str(error))
        self.count = columns.count
        self.time: Floats = columns.numbers("time") / 1000
        self.index, self.newest = columns.numbers("index"), columns.numbers("newest")
        self.reward = columns.floats("reward")
        self.groups, self.group = columns.texts("group")
        self.replicas, self.replica = columns.texts("replica")
        self.environments, self.environment = columns.texts("environment")
        self._whats, self._what = columns.texts("what")
        # events of the whole run concern nobody's lane
        self._is_shown = self.group != _NONE
        self._is_shown &= ~_find_repeated(inside, [self.index, self._what, self.group, self.time])

    def where(self, what: str) -> Ints:
        """Return the places of the events of groups of this kind."""
        if what not in self._whats:
            return np.array([], np.int64)
        return np.flatnonzero((self._what == self._whats.index(what)) & self._is_shown)


def _find_repeated(files: Sequence[group_files.GroupFile], columns: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Return which rows stand in another file too, and after it."""
    repeated = np.zeros(len(columns[0]), dtype=bool)
    if any(after.first <= before.last for before, after in itertools.pairwise(files)):
        order = np.lexsort(columns)
        repeated[order[1:]] = np.logical_and.reduce([np.diff(column[order]) == 0 for column in columns])
    return repeated


def _of_events(
    run: RunFiles, files: Sequence[group_files.GroupFile], first: float, last: float, problems: list[str]
) -> list[Lane]:
    if not files:
        return []
    group_files.import_parquet()
    events = _Events(files, first, last, problems)
    return [*_replicas(events, first, last), *_environments(run, events, first, last)] if events.count else []


def _latest(keys: Ints, times: Floats, of: Ints, at: Floats) -> Ints:
    """Return, for each pair of `of` and `at`, the place of the newest of `keys` and `times` with the same key, at that time or before; -1
    if there is none."""
    if not len(keys) or not len(of):
        return np.full(len(of), _NONE, dtype=np.int64)
    keys, of = keys.astype(np.int64), of.astype(np.int64)
    # milliseconds, so that a key and a time make one number
    start = min(float(times.min()), float(at.min()))
    span = int((max(float(times.max()), float(at.max())) - start) * 1000) + 2
    combined = keys * span + np.rint((times - start) * 1000).astype(np.int64)
    wanted = of * span + np.rint((at - start) * 1000).astype(np.int64)
    order = np.argsort(combined, kind="stable")
    found = np.searchsorted(combined[order], wanted, side="right") - 1
    newest = order[np.maximum(found, 0)]
    return np.where((found >= 0) & (keys[newest] == of), newest, _NONE)


def _by_name(names: Sequence[str], lane: Ints) -> Iterator[tuple[str, Ints]]:
    """Yield each name that has bars, in the order of names, with the places of its bars."""
    order = np.argsort(lane, kind="stable")
    cuts = np.flatnonzero(np.diff(lane[order], prepend=_NONE - 1))
    found = [(names[lane[places[0]]], places) for places in np.split(order, cuts[1:]) if len(places)]
    yield from sorted(found, key=lambda pair: pair[0])


def _replicas(events: _Events, first: float, last: float) -> Iterator[Lane]:
    """A trajectory's bar begins with the lease of its group and ends with its push: the replica generates all of a group together."""
    leased, pushed = events.where("leased"), events.where("pushed")
    lease = _latest(events.group[leased], events.time[leased], events.group[pushed], events.time[pushed])
    start = np.where(lease >= 0, _take(events.time[leased], lease), events.time[pushed])
    holder = np.where(lease >= 0, _take(events.replica[leased], lease), _NONE)
    shown = (events.time[pushed] >= first) & (start <= last)
    pushed, start, holder = pushed[shown], start[shown], holder[shown]
    # a push is of the replica that has the lease, and need not say so
    who = np.where(events.replica[pushed] != _NONE, events.replica[pushed], holder)
    for name, places in _by_name([*events.replicas, "unknown replica"], who):
        yield Lane(name, "replica", _of_trajectories(events, "generation", start[places], pushed[places]))


def _environments(run: RunFiles, events: _Events, first: float, last: float) -> Iterator[Lane]:
    """A trajectory's bar begins with its push and ends with its score."""
    pushed, scored = events.where("pushed"), events.where("scored")
    most = int(events.index.max(initial=0)) + 2
    of_pushed, of_scored = (
        events.group[places].astype(np.int64) * most + events.index[places] for places in (pushed, scored)
    )
    push = _latest(of_pushed, events.time[pushed], of_scored, events.time[scored])
    start = np.where(push >= 0, _take(events.time[pushed], push), events.time[scored])
    shown = (events.time[scored] >= first) & (start <= last)
    scored, start = scored[shown], start[shown]
    enqueued = events.where("enqueued")
    environment_of = np.full(len(events.groups), _NONE)
    environment_of[events.group[enqueued]] = events.environment[enqueued]
    only = next(iter(run.config.env)) if len(run.config.env) == 1 else "unknown environment"
    # that of a group which was enqueued before the range is not known, unless there is only one
    names = [*events.environments, only]
    first_of = {name: place for place, name in reversed(list(enumerate(names)))}
    codes = np.array([first_of[name] for name in names])[environment_of]
    for name, places in _by_name(names, codes[events.group[scored]]):
        yield Lane(name, "environment", _of_trajectories(events, "scoring", start[places], scored[places]))


def _take(values: NDArray[Any], places: Ints) -> NDArray[Any]:
    """Return the values at these places, and any value at -1."""
    return values[places] if len(values) else np.zeros(len(places), values.dtype)


def _of_trajectories(events: _Events, what: Literal["generation", "scoring"], start: Floats, ends: Ints) -> Bars:
    """Return the bars that end with these events, each of which is of a trajectory."""
    group, index, reward = events.group[ends], events.index[ends], events.reward[ends]

    def say(place: int) -> str:
        text = f"group {events.groups[group[place]]}, trajectory {index[place]}"
        return text if what == "generation" else f"{text}: reward {reward[place]:.4g}"

    none, zeros = np.full(len(ends), _NONE), np.zeros(len(ends), dtype=np.int64)
    version = events.newest[ends] if what == "generation" else none
    return Bars(start, events.time[ends], zeros, (what,), say, version, none, group, index, events.groups)
