"""What became of every group of a run: finds groups by text, row of a data set, state and more, and tells the story of one.

The trainer writes the events of groups to Parquet files (`headrace.run.group_files`), from which this module keeps an SQLite index, in the
folder of the files, or in the user's cache folder if that can't be written. Every call first reads what was written since the last. Several
processes may use one index. It can be deleted at any time.

Rewards, tokens and versions of a group are those of its newest attempt. A group that was trained, and is trained again after a rewind, is
shown in its newest state; its story has all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, get_args

from headrace.base.errors import CodecError, ConfigError
from headrace.records.trajectory import Lane
from headrace.run.group_files import Cursor, GroupFile, What, import_parquet, list_files, parse_cursor, read_file, rows

if TYPE_CHECKING:
    from headrace.replay.history import HistoryRow

T = TypeVar("T")

INDEX = ".index.sqlite"
# A change makes existing indexes be built anew.
_SCHEMA = 1
# Characters of a prompt that `GroupSummary` has, and that are searched.
SHOWN, SEARCHED = 300, 8192
# Shortest text that the index of substrings finds.
_TRIGRAM = 3
# While another process takes in a large file, the index is its own.
_BUSY_S = 600.0
# With SQLite's 2 MiB, building a large index waits for the disk.
_CACHE_KIB = 65536

State = Literal[
    "queued", "open", "scoring", "ready", "reserved", "trained", "filtered", "failed", "evaluated", "unused"
]
# What `GroupQuery.sort` may be, with `-` before it for descending -> column of the index.
SORTS = {
    "order": '"order"', "reward": "mean", "spread": "spread", "age": "age", "attempts": "attempts", "step": "step",
    "enqueued": "enqueued", "ended": "ended",
}  # fmt: skip
ENDS = ("trained", "filtered", "failed", "evaluated", "unused")


class DataRow(NamedTuple):
    """A row of a data set's file, as error messages count: lines from 1, items of a JSON list and rows of a Parquet file from 0."""

    file: str
    line: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """A group in its newest state. Times are Unix seconds. `rewards` and `tokens` are of the trajectories, by index; `age` is the step less
    the version of the oldest token. Fields that don't apply, or that nobody recorded, are None."""

    id: str
    lane: Lane
    order: int
    epoch: int | None
    task: str
    environment: str
    n: int
    prompt: str  # its first characters
    source: DataRow | None
    state: State
    reason: str
    step: int | None
    timeline: str | None
    attempts: int
    replicas: tuple[str, ...]
    build: str | None
    rewards: tuple[float | None, ...]
    mean: float | None
    spread: float | None
    tokens: tuple[int | None, ...]
    oldest_version: int | None
    newest_version: int | None
    age: int | None
    enqueued: float
    ended: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupEvent:
    """One thing that happened to a group. `version` is of an event of the whole run, to whose groups a rewind or restore happened."""

    time: float
    what: What
    index: int | None = None
    replica: str | None = None
    attempt: int | None = None
    step: int | None = None
    version: int | None = None
    timeline: str | None = None
    reward: float | None = None
    build: str | None = None
    cause: str | None = None
    reason: str | None = None
    tokens: int | None = None
    oldest: int | None = None
    newest: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupStory:
    """A group with its whole prompt and everything that happened to it. `previous` and `next` are its neighbours by order."""

    summary: GroupSummary
    prompt: str
    messages: tuple[Mapping[str, Any], ...] | None  # None: they were too long to be kept whole
    expected: str | None
    events: tuple[GroupEvent, ...]
    previous: str | None
    next: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupQuery:
    """Which groups to find. `text` is a part of the prompt or expected answer (in any case), or a whole id. The file of `row`
    is a path, or the end of one. `reason` is a part of the reason."""

    text: str = ""
    states: Collection[str] = ()
    lane: Lane | None = None
    environment: str | None = None
    task: str | None = None
    step: int | None = None
    reason: str = ""
    replica: str | None = None
    build: str | None = None
    row: DataRow | None = None
    sort: str = "order"
    offset: int = 0
    limit: int = 100


class RecordedTrajectory(NamedTuple):
    tokens: int
    oldest: int
    newest: int
    reward: float | None = None


@dataclasses.dataclass(slots=True)
class Record:
    """A group as its events so far leave it. `first` and `last` are the milliseconds of its events."""

    id: str
    lane: str = "train"
    order: int = -1
    n: int = 0
    environment: str = ""
    state: str = "queued"
    reason: str = ""
    step: int | None = None
    timeline: str | None = None
    attempts: int = 0
    replicas: list[str] = dataclasses.field(default_factory=list)
    build: str | None = None
    trajectories: dict[int, RecordedTrajectory] = dataclasses.field(default_factory=dict)
    enqueued: int | None = None
    ended: int | None = None
    first: int = 0
    last: int = 0

    def apply(self, event: HistoryRow | _FileRow) -> None:
        what, now = event.what, parse_cursor(event.id)[0]
        self.first, self.last = self.first or now, now
        match what:
            case "pushed":
                assert event.index is not None
                self.trajectories[event.index] = RecordedTrajectory(
                    event.tokens or 0, event.oldest or 0, event.newest or 0
                )
            case "scored":
                if event.build != self.build:  # one build scores all trajectories of a group (law 3)
                    self.trajectories = {i: t._replace(reward=None) for i, t in self.trajectories.items()}
                if event.index in self.trajectories:
                    self.trajectories[event.index] = self.trajectories[event.index]._replace(reward=event.reward)
                self.build = event.build
            case "leased":
                self._enter("open")
                self.attempts = event.attempt or 0
                if event.replica is not None and event.replica not in self.replicas:
                    self.replicas.append(event.replica)
            case "enqueued":
                self._start_over()
                self.lane, self.order, self.n = event.lane or "train", event.order or 0, event.n or 0
                self.environment, self.attempts, self.replicas, self.enqueued = event.environment or "", 0, [], now
            case "scoring":
                self._enter("scoring")
            case "dropped" | "began_anew":
                self.trajectories.pop(cast(int, event.index), None)
            case "ready" | "evaluated" | "filtered":
                self._enter(what, now)
                # the others are surplus
                self.trajectories = {i: t for i, t in self.trajectories.items() if t.reward is not None}
            case "reserved" | "trained":
                self._enter(what, now)
                self.step, self.timeline = event.step, event.timeline
            case "failed" | "unused":
                self._enter(what, now)
                self.reason = event.reason or ""
                self.trajectories = {} if what == "unused" else self.trajectories
            case "requeued":
                self._start_over()
                self.reason = event.reason or ""
            case "passed_on":
                self.reason = event.reason or ""
            case "retried":
                self._start_over()
            case "restored" if self.state == "reserved" and (self.step or 0) < (event.version or 0):
                self._enter("trained", now)  # the checkpoint was trained on it; that it was committed is lost
            case "rewound" | "restored" if self.is_undone(event):
                self._start_over()
            case "restored" if self.state not in ENDS:
                self._enter("unused", now)

    def is_undone(self, event: HistoryRow | _FileRow) -> bool:
        """Whether a rewind or restore makes the group wait to be enqueued again: to an older checkpoint, or after lost writes."""
        if self.lane != "train":
            return False
        if self.state == "trained":
            return self.step is not None and self.step >= (event.version or 0)
        return event.what == "restored" and self.state not in ("filtered", "failed")

    def _enter(self, state: str, now: int = 0) -> None:
        self.state, self.ended = state, now if state in ENDS else None
        if state in ("open", "ready"):
            self.step = self.timeline = None

    def _start_over(self) -> None:
        self._enter("queued")
        self.step = self.timeline = self.build = None
        self.reason, self.trajectories = "", {}

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories.values() if t.reward is not None]

    @property
    def mean(self) -> float | None:
        """The mean reward of its trajectories; None if it has none, or one has no reward."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards and len(rewards) == len(self.trajectories) else None

    @property
    def spread(self) -> float | None:
        """The standard deviation of its rewards, like `mean`."""
        mean, rewards = self.mean, self.rewards
        return None if mean is None else math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))

    @property
    def oldest(self) -> int | None:
        return min((t.oldest for t in self.trajectories.values()), default=None)

    @property
    def newest(self) -> int | None:
        return max((t.newest for t in self.trajectories.values()), default=None)

    @property
    def age(self) -> int | None:
        return self.step - self.oldest if self.step is not None and self.oldest is not None else None


def apply_to_run(records: Iterable[Record], event: HistoryRow | _FileRow) -> None:
    """Apply an event of the whole run, or of a group whose id nobody knew any more: that of a failure long ago which is retried."""
    for record in records:
        if event.what != "retried":
            if event.what in ("rewound", "restored"):
                record.apply(event)
        elif (record.lane, record.state, record.order) == ("train", "failed", event.order):
            record.apply(event)


class _FileRow(NamedTuple):
    """The columns of the files that the index is built from."""

    id: str
    part: int
    what: str
    group: str | None
    index: int | None  # type: ignore[assignment]  # a tuple has a method of this name
    replica: str | None
    attempt: int | None
    step: int | None
    version: int | None
    timeline: str | None
    reward: float | None
    build: str | None
    reason: str | None
    tokens: int | None
    oldest: int | None
    newest: int | None
    lost: int | None
    lane: str | None
    order: int | None
    n: int | None
    environment: str | None
    epoch: int | None
    task: str | None
    prompt: str | None
    expected: str | None
    file: str | None
    line: int | None


_RECORDED = (
    "id", "lane", "order", "n", "environment", "state", "reason", "step", "timeline", "attempts", "replicas", "build", "trajectories",
    "enqueued", "ended", "first", "last",
)  # fmt: skip
_DERIVED = ("mean", "spread", "oldest", "newest", "age")
_OF_PROMPT = ("text", "epoch", "task", "file", "line")
_TABLES = f"""
CREATE TABLE about (schema INTEGER, ms INTEGER, number INTEGER, lost INTEGER, lost_last INTEGER, full_text INTEGER);
CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER, first_ms INTEGER, first_number INTEGER, last_ms INTEGER, last_number INTEGER,
  damage TEXT);
CREATE TABLE texts (number INTEGER PRIMARY KEY, digest BLOB UNIQUE, prompt TEXT, expected TEXT);
CREATE TABLE groups (number INTEGER PRIMARY KEY, id TEXT UNIQUE, lane TEXT, "order" INTEGER, n INTEGER, environment TEXT, state TEXT,
  reason TEXT, step INTEGER, timeline TEXT, attempts INTEGER, replicas TEXT, build TEXT, trajectories TEXT, enqueued INTEGER,
  ended INTEGER, first INTEGER, last INTEGER, mean REAL, spread REAL, oldest INTEGER, newest INTEGER, age INTEGER, text INTEGER,
  epoch INTEGER, task TEXT, file TEXT, line INTEGER);
CREATE INDEX by_order ON groups (lane, "order");
CREATE INDEX by_state ON groups (state, lane, "order");
CREATE INDEX by_text ON groups (text);
CREATE INDEX by_row ON groups (line, file);
{"".join(f"CREATE INDEX by_{name} ON groups ({name});" for name in ("mean", "spread", "age", "attempts", "step", "enqueued", "ended"))}
INSERT INTO about VALUES ({_SCHEMA}, 0, 0, 0, 0, 0);
"""
_FULL_TEXT = """
CREATE VIRTUAL TABLE found USING fts5 (prompt, expected, content='texts', content_rowid='number', tokenize='trigram');
CREATE TRIGGER searched AFTER INSERT ON texts
  BEGIN INSERT INTO found (rowid, prompt, expected) VALUES (new.number, new.prompt, new.expected); END;
UPDATE about SET full_text = 1;
"""


class GroupHistory:
    """The groups of the run whose files are in `folder`. Every method raises `ConfigError` without pyarrow, and for an index that can't be
    written anywhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def damaged(self) -> list[str]:
        """What is wrong with each file that can't be read, and the remedy. All else can be read."""
        present = {file.name for file in list_files(self.folder)}
        return self._ask(lambda index: [damage for name, damage in index.damaged() if name in present])

    def find(self, query: GroupQuery) -> tuple[int, list[GroupSummary]]:
        """Return how many groups there are, and those from `offset` on. Raises `ConfigError` for a sort or state that there isn't."""
        return self._ask(lambda index: index.find(query))

    def story(self, group: str) -> GroupStory | None:
        """Return what happened to a group; None if it isn't known."""
        return self._ask(lambda index: index.story(group))

    def states(self, query: GroupQuery | None = None) -> dict[str, int]:
        """Return the number of groups by state, of those that `query` finds whatever its states are."""
        return self._ask(lambda index: index.states(query or GroupQuery()))

    def lost(self) -> int:
        """Return how many events were cut off the buffer's stream before the trainer read them."""
        return self._ask(lambda index: index.lost)

    def _ask(self, question: Callable[[_Index], T]) -> T:
        """Return the answer of the index, which is brought up to date first. One that is damaged, or of another schema, is built anew."""
        import_parquet()
        for path in (self.folder / INDEX, _in_cache(self.folder)):
            for attempt in (1, 2):
                try:
                    with contextlib.closing(_Index(path, self.folder)) as index:
                        index.refresh()
                        return question(index)
                except (sqlite3.OperationalError, OSError) as error:
                    if path.parent == self.folder and _is_refused(error):
                        break  # the cache folder may do
                    raise ConfigError(f"{path}: the index of groups can't be used ({error}); {_REMEDY}") from error
                except sqlite3.DatabaseError as error:
                    if attempt == 2:
                        raise ConfigError(f"{path}: the index of groups can't be used ({error}); {_REMEDY}") from error
                    path.unlink(missing_ok=True)
        raise AssertionError("the cache folder answers or raises")


_REMEDY = "delete it, free space there, or name a folder that you may write to in XDG_CACHE_HOME"


def _is_refused(error: Exception) -> bool:
    """Whether a folder can't be written or doesn't exist."""
    return isinstance(error, OSError) or any(
        words in str(error) for words in ("readonly", "unable to open", "disk I/O error", "locking protocol")
    )


def _in_cache(folder: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache / f"groups-{name}.sqlite"


class _Index:
    """The index, while one call uses it."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._folder = folder
        if path.parent != folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            path = Path(":memory:")  # there are no groups
        self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def _prepare(self) -> None:
        """Create the tables, or drop those of another schema first."""
        if self._schema() == _SCHEMA:
            return
        with self._changing():
            if self._schema() == _SCHEMA:
                return  # another process was quicker
            self._create()

    def _create(self) -> None:
        for kind, name in self._db.execute(
            "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'trigger') "
            "AND name NOT LIKE 'sqlite_%' AND name NOT LIKE 'found_%'"
        ).fetchall():
            self._db.execute(f"DROP {kind} IF EXISTS {name}")
        self._run(_TABLES)
        with contextlib.suppress(sqlite3.OperationalError):  # a library without trigrams: texts are searched one by one
            self._db.execute("SAVEPOINT full_text")
            self._run(_FULL_TEXT)

    def _run(self, script: str) -> None:
        """Run statements in the transaction that is open, which `executescript` would commit."""
        statement = ""
        for part in script.split(";"):
            statement += part + ";"
            if sqlite3.complete_statement(statement):
                self._db.execute(statement)
                statement = ""

    def _schema(self) -> int | None:
        known = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone()
        return self._db.execute("SELECT schema FROM about").fetchone()[0] if known else None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- bringing it up to date

    def refresh(self) -> None:
        """Take in files that are new, in the order of their events."""
        for _ in range(100):  # a file that the trainer has merged meanwhile is in another
            known = self._known()
            new = [file for file in list_files(self._folder) if self._is_new(file, known)]
            if not new:
                return
            for file in new:
                with self._changing(), contextlib.suppress(FileNotFoundError):
                    # another process may have been quicker
                    if self._is_new(file, self._known(file.name)) and not self._take_in(file):
                        break

    def _known(self, name: str | None = None) -> dict[str, tuple[int, bool]]:
        where, values = ("", ()) if name is None else (" WHERE name = ?", (name,))
        found = self._db.execute(f"SELECT name, size, damage IS NOT NULL FROM files{where}", values)
        return {each: (size, bool(damaged)) for each, size, damaged in found}

    @staticmethod
    def _is_new(file: GroupFile, known: Mapping[str, tuple[int, bool]]) -> bool:
        if file.name not in known:
            return True
        size, is_damaged = known[file.name]
        try:
            return is_damaged and file.path.stat().st_size != size
        except FileNotFoundError:
            return False

    def _take_in(self, file: GroupFile) -> bool:
        """Return False if the index has to be built anew instead, and is empty now."""
        size, damage = file.path.stat().st_size, None
        try:
            columns = read_file(file.path, _FileRow._fields).to_pydict()
        except CodecError as error:
            damage = str(error)
        else:
            until = self._until
            if file.first <= until and not self._covers(file.first):
                self._create()  # it comes late: the folder was copied piece by piece, or a damaged file was replaced
                return False
            self._apply(_FileRow(*values) for values in zip(*columns.values(), strict=True))
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.name, size, *file.first, *file.last, damage),
        )
        return True

    @property
    def _until(self) -> Cursor:
        ms, number = self._db.execute("SELECT ms, number FROM about").fetchone()
        return ms, number

    def _covers(self, cursor: Cursor) -> bool:
        """Whether an event with this id would be in a file that was read. Files without a gap between them are written in order."""
        found = self._db.execute(
            "SELECT 1 FROM files WHERE damage IS NULL AND (first_ms, first_number) <= (?, ?) AND (last_ms, last_number) >= (?, ?)",
            (*cursor, *cursor),
        )
        return found.fetchone() is not None

    def _apply(self, events: Iterator[_FileRow]) -> None:
        until = newest = self._until
        groups: dict[str, Record] = {}
        prompts: dict[str, _FileRow] = {}
        for entry, parts in itertools.groupby(events, key=lambda row: row.id):
            cursor = parse_cursor(entry)
            if cursor <= until:
                continue  # it was read from another file
            newest = max(newest, cursor)
            for event in parts:
                if event.group is None:
                    self._save(groups, prompts)
                    groups, prompts = {}, {}
                    self._apply_to_run(event)
                    continue
                record = groups.get(event.group)
                if record is None:
                    record = groups[event.group] = self._load(event.group)
                record.apply(event)
                if event.prompt is not None:
                    prompts[event.group] = event
        self._save(groups, prompts)
        self._db.execute("UPDATE about SET ms = ?, number = ?", newest)

    def _apply_to_run(self, event: _FileRow) -> None:
        if event.what == "lost":
            lost = event.lost or 0
            # a total that has become lower is that of another server
            self._db.execute(
                "UPDATE about SET lost = lost + CASE WHEN ? >= lost_last THEN ? - lost_last ELSE ? END, lost_last = ?",
                (lost, lost, lost, lost),
            )
            return
        where = {
            "rewound": "state = 'trained' AND step >= :version",
            "restored": "state NOT IN ('filtered', 'failed', 'evaluated') AND (state != 'trained' OR step >= :version)",
            "retried": "state = 'failed' AND lane = 'train' AND \"order\" = :order",
        }.get(event.what)
        if where is not None:
            bound = {"version": event.version, "order": event.order}
            found = self._db.execute(f"SELECT {_quoted(_RECORDED)} FROM groups WHERE {where}", bound).fetchall()
            records = [_record(values) for values in found]
            apply_to_run(records, event)
            self._save({record.id: record for record in records}, {})

    def _load(self, group: str) -> Record:
        found = self._db.execute(f"SELECT {_quoted(_RECORDED)} FROM groups WHERE id = ?", (group,)).fetchone()
        return _record(found) if found else Record(group)

    def _save(self, groups: Mapping[str, Record], prompts: Mapping[str, _FileRow]) -> None:
        names = (*_RECORDED, *_DERIVED)
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names[1:])
        self._db.executemany(
            f"INSERT INTO groups ({_quoted(names)}) VALUES ({', '.join('?' * len(names))}) ON CONFLICT (id) DO UPDATE SET {changes}",
            (_values(record) for record in groups.values()),
        )
        for group, row in prompts.items():
            prompt, expected = (_searchable(text or "")[:SEARCHED] for text in (row.prompt, row.expected))
            digest = hashlib.sha256(f"{prompt}\0{expected}".encode("utf-8", "replace")).digest()[:16]
            self._db.execute(
                "INSERT OR IGNORE INTO texts (digest, prompt, expected) VALUES (?, ?, ?)", (digest, prompt, expected)
            )
            self._db.execute(
                "UPDATE groups SET text = (SELECT number FROM texts WHERE digest = ?), epoch = ?, task = ?, file = ?, line = ? "
                "WHERE id = ?",
                (digest, row.epoch, row.task, row.file, row.line, group),
            )

    # -- answers

    @property
    def lost(self) -> int:
        return int(self._db.execute("SELECT lost FROM about").fetchone()[0])

    def damaged(self) -> list[tuple[str, str]]:
        return self._db.execute("SELECT name, damage FROM files WHERE damage IS NOT NULL ORDER BY name").fetchall()

    def find(self, query: GroupQuery) -> tuple[int, list[GroupSummary]]:
        where, values = self._where(query)
        column, descends = SORTS.get(query.sort.removeprefix("-")), query.sort.startswith("-")
        if column is None:
            raise ConfigError(f"sort {query.sort!r}: it is one of {', '.join(SORTS)}, or one of these after a -")
        direction = "DESC" if descends else "ASC"
        lane = f"lane {direction}, " if column == SORTS["order"] else ""
        total = self._db.execute(f"SELECT COUNT(*) FROM groups WHERE {where}", values).fetchone()[0]
        found = self._db.execute(
            f"SELECT {_SUMMARY} WHERE {where} ORDER BY {lane}{column} {direction} NULLS LAST, groups.number {direction} LIMIT ? OFFSET ?",
            (*values, query.limit, query.offset),
        )
        return total, [_summary(values) for values in found]

    def states(self, query: GroupQuery) -> dict[str, int]:
        where, values = self._where(dataclasses.replace(query, states=()))
        return dict(self._db.execute(f"SELECT state, COUNT(*) FROM groups WHERE {where} GROUP BY state", values))

    def story(self, group: str) -> GroupStory | None:
        found = self._db.execute(f"SELECT {_SUMMARY} WHERE groups.id = ?", (group,)).fetchone()
        if found is None:
            return None
        first, last, lane, order = self._db.execute(
            'SELECT first, last, lane, "order" FROM groups WHERE id = ?', (group,)
        ).fetchone()
        events, told = self._events(group, first, last)
        messages = told.get("messages")
        return GroupStory(
            summary=_summary(found),
            prompt=told.get("prompt", ""),
            messages=None if messages is None else tuple(json.loads(messages)),
            expected=told.get("expected"),
            events=tuple(events),
            previous=self._neighbour("DESC", "<", lane, order, group),
            next=self._neighbour("ASC", ">", lane, order, group),
        )

    def _events(self, group: str, first: int, last: int) -> tuple[list[GroupEvent], dict[str, Any]]:
        """Return the events of a group, with the rewinds and restores meanwhile, and the newest row that has its prompt."""
        found: dict[tuple[Cursor, int], dict[str, Any]] = {}
        for file in list_files(self._folder):
            if file.first[0] <= last and file.last[0] >= first:
                with contextlib.suppress(FileNotFoundError, CodecError):  # `damaged` says what is missing
                    for row in rows(read_file(file.path, group=group)):
                        cursor = parse_cursor(row["id"])
                        if first <= cursor[0] <= last:
                            found[cursor, row["part"]] = row
        ordered = [row for _, row in sorted(found.items(), key=lambda item: item[0])]
        told = [row for row in ordered if "prompt" in row]
        return [_event(row) for row in ordered], told[-1] if told else {}

    def _neighbour(self, direction: str, beyond: str, lane: str, order: int, group: str) -> str | None:
        found = self._db.execute(
            f'SELECT id FROM groups WHERE lane = ? AND ("order", number) {beyond} (?, (SELECT number FROM groups WHERE id = ?)) '
            f'ORDER BY "order" {direction}, number {direction} LIMIT 1',
            (lane, order, group),
        ).fetchone()
        return found[0] if found else None

    def _where(self, query: GroupQuery) -> tuple[str, list[Any]]:
        if unknown := set(query.states) - set(get_args(State)):
            raise ConfigError(f"state {sorted(unknown)[0]!r}: it is one of {', '.join(get_args(State))}")
        parts: list[str] = ["1"]
        values: list[Any] = []

        def also(part: str, *with_values: Any) -> None:
            parts.append(part)
            values.extend(with_values)

        for name in ("lane", "environment", "task", "step", "build"):
            if (value := getattr(query, name)) is not None:
                also(f"{name} = ?", value)
        if query.states:
            also(f"state IN ({', '.join('?' * len(query.states))})", *query.states)
        if query.reason:
            also("reason LIKE ? ESCAPE '\\'", f"%{_escaped(query.reason)}%")
        if query.replica is not None:
            also("replicas LIKE ? ESCAPE '\\'", f"%{_escaped(json.dumps(query.replica))}%")
        if query.row is not None:
            file, line = query.row
            also("line = ? AND (file = ? OR file LIKE ? ESCAPE '\\')", line, file, f"%/{_escaped(file)}")
        if query.text:
            texts, found = self._texts(query.text)
            also(f"groups.number IN (SELECT number FROM groups WHERE id = ? UNION ALL {texts})", query.text, *found)
        return " AND ".join(parts), values

    def _texts(self, text: str) -> tuple[str, list[Any]]:
        """Return a statement for the numbers of the groups whose prompt or expected answer contains the text."""
        if len(text) >= _TRIGRAM and self._db.execute("SELECT full_text FROM about").fetchone()[0]:
            phrase = '"' + _searchable(text).replace('"', '""') + '"'
            return (
                "SELECT number FROM groups WHERE text IN (SELECT rowid FROM found WHERE found MATCH ?)",
                [phrase],
            )
        pattern = f"%{_escaped(text)}%"
        return (
            "SELECT number FROM groups WHERE text IN "
            "(SELECT number FROM texts WHERE prompt LIKE ? ESCAPE '\\' OR expected LIKE ? ESCAPE '\\')",
            [pattern, pattern],
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _escaped(text: str) -> str:
    return _searchable(text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _searchable(text: str) -> str:
    """Return text without NUL, which would end it in a search."""
    return text.replace("\0", "\ufffd")


def _record(values: Sequence[Any]) -> Record:
    record = Record(*values)
    record.replicas = json.loads(values[10])
    record.trajectories = {index: RecordedTrajectory(*of_it) for index, *of_it in json.loads(values[12])}
    return record


def _values(record: Record) -> list[Any]:
    values = [getattr(record, name) for name in (*_RECORDED, *_DERIVED)]
    values[10] = json.dumps(record.replicas)
    values[12] = json.dumps([(index, *of_it) for index, of_it in sorted(record.trajectories.items())])
    return values


_SHOWN = (
    "id", "lane", "order", "epoch", "task", "environment", "n", "state", "reason", "step", "timeline", "attempts", "build", "mean",
    "spread", "age",
)  # fmt: skip
_SUMMARY = (
    f"{_quoted(_SHOWN)}, oldest, newest, enqueued, ended, file, line, replicas, trajectories, substr(prompt, 1, {SHOWN}) "
    "FROM groups LEFT JOIN texts ON groups.text = texts.number"
)


def _summary(values: Sequence[Any]) -> GroupSummary:
    *_, oldest, newest, enqueued, ended, file, line, replicas, trajectories, prompt = values
    shown = dict(zip(_SHOWN, values, strict=False))
    pieces = [RecordedTrajectory(*of_it) for _, *of_it in json.loads(trajectories)]
    return GroupSummary(
        **shown | {"task": shown["task"] or "", "build": shown["build"] or None},
        prompt=prompt or "",
        source=None if file is None else DataRow(file, line),
        replicas=tuple(json.loads(replicas)),
        rewards=tuple(piece.reward for piece in pieces),
        tokens=tuple(piece.tokens for piece in pieces),
        oldest_version=oldest,
        newest_version=newest,
        enqueued=(enqueued or 0) / 1000,
        ended=None if ended is None else ended / 1000,
    )


_OF_EVENT = [field.name for field in dataclasses.fields(GroupEvent) if field.name != "time"]


def _event(row: Mapping[str, Any]) -> GroupEvent:
    time = parse_cursor(row["id"])[0] / 1000
    return GroupEvent(time=time, **{name: row[name] for name in _OF_EVENT if name in row})


def parse_row(text: str) -> DataRow | None:
    """Return the row that `FILE:LINE` names; None if the text has another form."""
    file, _, line = text.rpartition(":")
    return DataRow(file, int(line)) if file and line.isdecimal() and line.isascii() else None
