"""The runs of a folder, read from their files: what was read is kept, and what was added since is read alone.

A folder holds what others wrote, so nothing in it is trusted: a link that leads out of it, a pipe, or a file of absurd size is refused by
name, and what can't be read makes its own run unreadable and no other.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import CodecError, HeadraceError
from headrace.base.files import signature
from headrace.config import Config
from headrace.page.indexing import Indexing
from headrace.page.metric_table import MetricRow, MetricTable
from headrace.run import history, start
from headrace.run.collapse import Collapse, CollapseDetector
from headrace.run.folder import SAVED, load_anywhere
from headrace.run.history import RECORD, RunHistory
from headrace.run.journal import JOURNAL, Kind, Line, iter_from, size, surviving
from headrace.run.start import START, StartRecord

# A run's state is looked up anew after this many seconds: the look takes the locks of the run for a moment.
_STATE_S = 1.0
_LARGEST_CONFIG, _LARGEST_RECORD, _LARGEST_START = 4 << 20, 1 << 20, 16 << 20
# Values of all journals that are kept at a time, at nine bytes each.
MOST_CELLS = 12_000_000
_BEGINNING = 200  # bytes of a journal
_KINDS: tuple[Kind, ...] = ("train", "validation")
T = TypeVar("T")


class NotHere(HeadraceError):
    """Raised for something that the folder doesn't have, or no longer has."""


def check_file(path: Path, within: Path, most: int | None = None) -> Path:
    """Return `path`, the path of a file that may be read. Raises `FileNotFoundError`, and `CodecError` for anything but a file in the
    folder `within`, or for one of more than `most` bytes."""
    real = path.resolve()
    if not real.is_relative_to(within.resolve()):
        raise CodecError(f"{path} is a link that leads out of {within}; replace it by what it names")
    status = real.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CodecError(f"{path} is not a file; move it away")
    if most is not None and status.st_size > most:
        raise CodecError(f"{path} has {status.st_size} bytes, and at most {most} are read; move it away")
    return path


def written(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file does; None if it doesn't exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


@dataclasses.dataclass(frozen=True)
class MetricColumns:
    """The surviving lines of one kind, in their order: their steps, and their rows in the table."""

    table: MetricTable
    steps: NDArray[np.int64]
    rows: NDArray[np.int64]

    def values(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the values of a metric by line, and which lines have it."""
        values, present = self.table.column(name)
        return values[self.rows], present[self.rows]

    def metrics(self, place: int) -> MetricRow:
        """Return the metrics of the line at `place`."""
        return MetricRow(self.table, int(self.rows[place]))


class RunJournal:
    """The journal of a run, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._read = 0  # bytes
        self._first = b""  # its beginning
        self._tables = {kind: MetricTable() for kind in _KINDS}
        self._all: list[Line] = []
        self._detector, self._watched = CollapseDetector(), 0
        self.lines: list[Line] = []  # those that survive
        self.rewinds: list[Line] = []
        self.times: tuple[float, float] | None = None  # of the first and the newest line
        self.columns = self._make_columns()

    @property
    def cells(self) -> int:
        return sum(table.cells for table in self._tables.values())

    @property
    def collapse(self) -> Collapse | None:
        return self._detector.found

    def refresh(self) -> bool:
        """Read what was added since. Returns whether anything was. Raises `ServiceError` for a line that no trainer wrote, and then the
        journal is read anew the next time."""
        first, nbytes = self._identify(), size(self._path)
        if first != self._first or nbytes < self._read:
            self._forget()
            self._first = first
        elif nbytes == self._read:
            return False
        before = self._read
        try:
            for line, offset in iter_from(self._path, self._read):
                self._add(line)
                self._read = offset
        except BaseException:
            self._forget()
            raise
        if self._read != before:
            self._settle()
        return self._read != before

    def _identify(self) -> bytes:
        """Return what tells the journal from another one at the same place: how its first line begins, with its time. (A new file may have
        the number of one that was deleted.)"""
        segments = sorted(self._path.parent.glob(f"{self._path.stem}.[0-9]*{self._path.suffix}"))
        try:
            with (segments or [self._path])[0].open("rb") as file:
                return file.read(_BEGINNING)
        except FileNotFoundError:
            return b""

    def _add(self, line: Line) -> None:
        self.times = (self.times[0] if self.times else line.time), line.time
        if line.kind in self._tables:
            try:
                line = dataclasses.replace(line, metrics=self._tables[line.kind].add(line.metrics))
            except (TypeError, AttributeError) as error:
                raise CodecError(f"{self._path}: step {line.step} has a metric that is no number ({error})") from error
        elif line.kind == "rewind":
            self.rewinds.append(line)
        self._all.append(line)

    def _settle(self) -> None:
        before, self.lines = self.lines, surviving(self._all)
        if self.lines[: len(before)] != before:  # a rewind has taken some back
            self._detector, self._watched = CollapseDetector(), 0
        for line in self.lines[self._watched :]:
            self._detector.add(line)
        self._watched = len(self.lines)
        self.columns = self._make_columns()

    def _make_columns(self) -> dict[Kind, MetricColumns]:
        found = {}
        for kind in _KINDS:
            own = [line for line in self.lines if line.kind == kind]
            rows = [line.metrics.row for line in own if isinstance(line.metrics, MetricRow)]
            steps = np.array([line.step for line in own], dtype=np.int64)
            found[kind] = MetricColumns(self._tables[kind], steps, np.array(rows, dtype=np.int64))
        return found


class RunFiles:
    """The files of one run. Callers hold its `lock`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.indexing = Indexing(folder)
        self._journal = RunJournal(folder / JOURNAL)
        self._config: tuple[object, Config | HeadraceError] | None = None
        self._history: tuple[float, RunHistory] | None = None
        self._remembered: dict[str, tuple[RunJournal, int, Any]] = {}
        self._found: tuple[object, Any] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def config(self) -> Config:
        """Its configuration. Raises `ConfigError`, `CodecError`."""
        path = check_file(self.folder / SAVED, self.folder, _LARGEST_CONFIG)
        found_at = signature(path)
        if self._config is None or self._config[0] != found_at:
            try:
                self._config = found_at, load_anywhere(path)
            except HeadraceError as error:
                self._config = found_at, error
            self._history = None
        found = self._config[1]
        if isinstance(found, HeadraceError):
            raise found
        return found

    @property
    def start(self) -> StartRecord | None:
        """How it was last started; None if an older build started it. Raises `CodecError`."""
        path = self.folder / START
        return start.read(check_file(path, self.folder, _LARGEST_START).parent) if path.exists() else None

    @property
    def journal(self) -> RunJournal:
        """Its journal, with all that was written so far. Raises `ServiceError`, `CodecError`."""
        for path in self.folder.glob(f"{Path(JOURNAL).stem}*"):
            check_file(path, self.folder)
        if self._journal.refresh():
            self._history = None
        return self._journal

    @property
    def history(self) -> RunHistory:
        """Its history, with the state that it was in a moment ago. Raises as `config` and `journal` do."""
        config, journal = self.config, self.journal
        now = time.monotonic()
        if self._history is None or now - self._history[0] > _STATE_S:
            if (self.folder / RECORD).exists():
                check_file(self.folder / RECORD, self.folder, _LARGEST_RECORD)
            self._history = now, history.judge(config, journal.lines, journal.times)
        return self._history[1]

    @property
    def cells(self) -> int:
        return self._journal.cells

    def remember(self, name: str, least: int, count: int, compute: Callable[[], T]) -> T:
        """Return what `compute` returned under this name for at least `least` steps of the journal, or else returns now for `count`."""
        known = self._remembered.get(name)
        if known is None or known[0] is not self._journal or not least <= known[1] <= count:
            known = self._remembered[name] = self._journal, count, compute()
        found: T = known[2]
        return found

    def find_once(self, key: object, find: Callable[[], T]) -> T:
        """Return what `find` returned for this key, if it was the last one asked for; or else ask it."""
        if self._found is None or self._found[0] != key:
            self._found = key, find()
        found: T = self._found[1]
        return found

    def forget_found(self) -> None:
        """Let go of what was found once."""
        self._found = None

    def forget(self) -> None:
        """Let go of what was read."""
        self._remembered.clear()
        self.forget_found()
        self._journal = RunJournal(self.folder / JOURNAL)
        self._history = None


class RunFolder:
    """The folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock = threading.Lock()
        self._runs: collections.OrderedDict[str, RunFiles] = collections.OrderedDict()

    def names(self) -> list[str]:
        """Return the names of its runs. Raises `NotHere` for a folder that can't be read."""
        try:
            return sorted(path.parent.name for path in self.folder.glob(f"*/{SAVED}") if _is_name(path.parent.name))
        except OSError as error:
            raise NotHere(f"{self.folder} can't be read ({error.strerror})") from error

    def find(self, name: str) -> RunFiles:
        """Return the files of a run. Raises `NotHere` if there is no such run."""
        path = self.folder / name
        if not _is_name(name) or not path.is_dir():
            self._drop(name)
            raise NotHere(f"{self.folder} has no run {name!r:.100}; /api/runs lists those that it has")
        if path.resolve().parent != self.folder.resolve():
            raise NotHere(f"{path} is a link that leads out of {self.folder}; serve the folder that it leads to")
        if not (path / SAVED).exists():
            self._drop(name)
            raise NotHere(f"{path} is no run: it has no {SAVED}")
        with self._lock:
            found = self._runs.pop(name, None) or RunFiles(path)
            self._runs[name] = found
        return found

    def _drop(self, name: str) -> None:
        with self._lock:
            self._runs.pop(name, None)

    def bound_memory(self, most: int = MOST_CELLS) -> None:
        """Forget the journals that were asked for longest ago, so that those kept have at most `most` values, but for the newest; and what
        was found once in any other run."""
        with self._lock:
            runs: Sequence[RunFiles] = list(self._runs.values())
        kept = 0
        for place, run in enumerate(reversed(runs)):
            kept += run.cells
            if place and run.lock.acquire(blocking=False):
                run.forget_found()
                if kept > most:
                    kept -= run.cells
                    run.forget()
                run.lock.release()


@functools.cache
def _is_name(name: str) -> bool:
    return not name.startswith(".") and not set(name) & {"/", "\0", "\\"} and 0 < len(name) <= 255
