"""The index of a run's groups: an SQLite database that is built from the files of their events, and holds what `GroupHistory` asks for."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import CodecError
from headrace.records.group_event import Cursor, GroupEvent, parse_cursor
from headrace.run.group_files import GroupFile, find_events, iterate_events, list_files
from headrace.run.group_query import NO_BOUND, SHOWN, SORTS, DataRow, GroupQuery, GroupStory, GroupSummary
from headrace.run.group_record import GroupRecord, RecordedTrajectory, apply_to_run

# A change makes existing indexes be built anew.
_SCHEMA = 2
# Characters of a prompt that are searched.
SEARCHED = 8192
# Shortest text that the index of substrings finds.
_TRIGRAM = 3
# Groups that are held while a file is taken in.
_AT_ONCE = 10_000
# In the place of the size of a file of which only the beginning was taken in.
_BEGUN = -1
# While another process takes in groups, the index is its own.
_BUSY_S = 600.0
# With SQLite's 2 MiB, building a large index waits for the disk. A question needs less.
_BUILDING_KIB, _ASKING_KIB = 65536, 8192

# The fields of events that the index is built from.
_FIELDS = [name for name in GroupEvent._fields if name not in ("messages", "cause")]
_RECORDED = [field.name for field in dataclasses.fields(GroupRecord)]
_DERIVED = ("mean", "spread", "oldest", "newest", "age")
_TABLES = f"""
CREATE TABLE about (schema INTEGER, ms INTEGER, number INTEGER, lost INTEGER, lost_last INTEGER, full_text INTEGER);
CREATE TABLE files (name TEXT PRIMARY KEY, size INTEGER, first_ms INTEGER, first_number INTEGER, last_ms INTEGER, last_number INTEGER,
  damage TEXT);
CREATE TABLE texts (number INTEGER PRIMARY KEY, digest BLOB UNIQUE, prompt TEXT, expected TEXT);
CREATE TABLE groups (number INTEGER PRIMARY KEY, id TEXT UNIQUE, lane TEXT, "order" INTEGER, n INTEGER, environment TEXT, state TEXT,
  reason TEXT, step INTEGER, timeline TEXT, attempts INTEGER, replicas TEXT, build TEXT, trajectories TEXT, enqueued INTEGER,
  ended INTEGER, first INTEGER, last INTEGER, mean REAL, spread REAL, oldest INTEGER, newest INTEGER, age INTEGER, text INTEGER,
  epoch INTEGER, task TEXT, file TEXT, line INTEGER);
CREATE TABLE counts (lane TEXT, state TEXT, count INTEGER, PRIMARY KEY (lane, state)) WITHOUT ROWID;
CREATE TRIGGER counted AFTER INSERT ON groups BEGIN
  INSERT INTO counts VALUES (new.lane, new.state, 1) ON CONFLICT DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER recounted AFTER UPDATE OF lane, state ON groups WHEN (old.lane, old.state) != (new.lane, new.state) BEGIN
  UPDATE counts SET count = count - 1 WHERE (lane, state) = (old.lane, old.state);
  INSERT INTO counts VALUES (new.lane, new.state, 1) ON CONFLICT DO UPDATE SET count = count + 1;
END;
INSERT INTO about VALUES ({_SCHEMA}, 0, 0, 0, 0, 0);
"""
# They are made once the files of a long run have been taken in: sorting is faster than adding a row at a time.
_INDEXES = """
CREATE INDEX IF NOT EXISTS by_order ON groups (lane, "order");
CREATE INDEX IF NOT EXISTS by_state ON groups (state, lane, "order");
CREATE INDEX IF NOT EXISTS by_text ON groups (text);
CREATE INDEX IF NOT EXISTS by_row ON groups (line, file);
""" + "".join(
    f"CREATE INDEX IF NOT EXISTS by_{name} ON groups ({name});"
    for name in ("mean", "spread", "age", "attempts", "step", "enqueued", "ended")
)
_FULL_TEXT = """
CREATE VIRTUAL TABLE found USING fts5 (prompt, expected, content='texts', content_rowid='number', tokenize='trigram');
CREATE TRIGGER searched AFTER INSERT ON texts
  BEGIN INSERT INTO found (rowid, prompt, expected) VALUES (new.number, new.prompt, new.expected); END;
UPDATE about SET full_text = 1;
"""


class GroupIndex:
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
            self._db.execute(f"PRAGMA cache_size = -{_ASKING_KIB}")
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
                self._finish()
                return
            self._db.execute(f"PRAGMA cache_size = -{_BUILDING_KIB}")
            for file in new:
                with self._changing(), contextlib.suppress(FileNotFoundError):
                    # another process may have been quicker
                    if self._is_new(file, self._known(file.name)) and not self._take_in(file):
                        break

    def _finish(self) -> None:
        """Make what questions need, if it isn't there."""
        found = self._db.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'index' AND name LIKE 'by_%'")
        if found.fetchone()[0] < _INDEXES.count(";"):
            self._run(_INDEXES)  # one after the other: questions are answered in between
        self._db.execute(f"PRAGMA cache_size = -{_ASKING_KIB}")

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
            return size == _BEGUN or (is_damaged and file.path.stat().st_size != size)
        except FileNotFoundError:
            return False

    def _take_in(self, file: GroupFile) -> bool:
        """Return False if files have to be listed anew: the index is empty now, to be built anew, or another process goes on with it."""
        size, damage = file.path.stat().st_size, None
        # what is old was taken in, or comes too late
        events = iterate_events(file.path, _FIELDS, self._until[0] if file.last > self._until else 0)
        self._db.execute("SAVEPOINT of_file")
        try:
            begin = [event for event in (next(events, None),) if event is not None]
            if file.first <= self._until and not self._covers(file):
                self._create()  # it comes late: the folder was copied piece by piece, or a damaged file was replaced
                return False
            # otherwise it was merged from others
            if file.last > self._until and not self._apply(file, itertools.chain(begin, events)):
                return False
        except CodecError as error:
            damage = str(error)
            self._db.execute("ROLLBACK TO of_file")
        self._db.execute("RELEASE of_file")
        self._add_file(file, size, file.last, damage)
        return True

    def missing(self) -> tuple[int, float]:
        """Return the bytes of the files that are not taken in, and which share of all bytes is."""
        known, until, missing, whole = self._known(), self._until[0], 0.0, 0
        for file in list_files(self._folder):
            with contextlib.suppress(FileNotFoundError):
                size = file.path.stat().st_size
                whole += size
                if self._is_new(file, known):
                    done = (until - file.first[0]) / max(1, file.last[0] - file.first[0])
                    missing += size * (1 - min(1.0, max(0.0, done)))
        return round(missing), 1 - missing / whole if whole else 1.0

    @property
    def _until(self) -> Cursor:
        ms, number = self._db.execute("SELECT ms, number FROM about").fetchone()
        return ms, number

    def _covers(self, file: GroupFile) -> bool:
        """Whether the events of a file were read from others, as far as they are old. Files without a gap between them are written in
        order."""
        is_begun, was_damaged = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM files WHERE damage IS NULL AND (first_ms, first_number) <= (?, ?) "
            "AND (last_ms, last_number) >= (?, ?)), EXISTS (SELECT 1 FROM files WHERE damage IS NOT NULL AND name != ? "
            "AND (first_ms, first_number) >= (?, ?) AND (last_ms, last_number) <= (?, ?))",
            (*file.first, *file.first, file.name, *file.first, *file.last),
        ).fetchone()
        return bool(is_begun and not was_damaged)

    def _apply(self, file: GroupFile, events: Iterator[GroupEvent]) -> bool:
        """Take in the events of a file. Returns False if another process has gone on with it."""
        until = newest = self._until
        groups: dict[str, GroupRecord] = {}
        prompts: dict[str, GroupEvent] = {}
        for entry, parts in itertools.groupby(events, key=lambda event: event.id):
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
            if len(groups) >= _AT_ONCE:
                self._save(groups, prompts)
                groups, prompts = {}, {}
                if not self._commit_beginning(file, newest):
                    return False
        self._save(groups, prompts)
        self._db.execute("UPDATE about SET ms = ?, number = ?", newest)
        return True

    def _commit_beginning(self, file: GroupFile, until: Cursor) -> bool:
        """Commit what was taken in of a file, so that questions find it, and a kill loses none of it. Returns False if another process has
        then gone on with it."""
        self._db.execute("UPDATE about SET ms = ?, number = ?", until)
        self._add_file(file, _BEGUN, until, None)
        for statement in ("RELEASE of_file", "COMMIT", "BEGIN IMMEDIATE", "SAVEPOINT of_file"):
            self._db.execute(statement)
        return self._until == until

    def _add_file(self, file: GroupFile, size: int, last: Cursor, damage: str | None) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", (file.name, size, *file.first, *last, damage)
        )

    def _apply_to_run(self, event: GroupEvent) -> None:
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

    def _load(self, group: str) -> GroupRecord:
        found = self._db.execute(f"SELECT {_quoted(_RECORDED)} FROM groups WHERE id = ?", (group,)).fetchone()
        return _record(found) if found else GroupRecord(group)

    def _save(self, groups: Mapping[str, GroupRecord], prompts: Mapping[str, GroupEvent]) -> None:
        names = (*_RECORDED, *_DERIVED)
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names[1:])
        self._db.executemany(
            f"INSERT INTO groups ({_quoted(names)}) VALUES ({', '.join('?' * len(names))}) ON CONFLICT (id) DO UPDATE SET {changes}",
            (_values(record) for record in groups.values()),
        )
        for group, event in prompts.items():
            prompt, expected = (_searchable(text or "")[:SEARCHED] for text in (event.prompt, event.expected))
            digest = hashlib.sha256(f"{prompt}\0{expected}".encode("utf-8", "replace")).digest()[:16]
            self._db.execute(
                "INSERT OR IGNORE INTO texts (digest, prompt, expected) VALUES (?, ?, ?)", (digest, prompt, expected)
            )
            self._db.execute(
                "UPDATE groups SET text = (SELECT number FROM texts WHERE digest = ?), epoch = ?, task = ?, file = ?, line = ? "
                "WHERE id = ?",
                (digest, event.epoch, event.task, event.file, event.line, group),
            )

    # -- answers

    @property
    def lost(self) -> int:
        return int(self._db.execute("SELECT lost FROM about").fetchone()[0])

    def damaged(self) -> list[tuple[str, str]]:
        return self._db.execute("SELECT name, damage FROM files WHERE damage IS NOT NULL ORDER BY name").fetchall()

    def find(self, query: GroupQuery) -> tuple[int, list[GroupSummary]]:
        where, values = self._where(query)
        column, descends = SORTS[query.sort.removeprefix("-")], query.sort.startswith("-")
        direction = "DESC" if descends else "ASC"
        lane = f"lane {direction}, " if column == SORTS["order"] else ""
        counts = self.states(query)
        total = sum(count for state, count in counts.items() if not query.states or state in query.states)
        found = self._db.execute(
            f"SELECT {_SUMMARY} WHERE {where} ORDER BY {lane}{column} {direction} NULLS LAST, groups.number {direction} LIMIT ? OFFSET ?",
            (*values, query.limit, query.offset),
        )
        return total, [_summary(values) for values in found]

    def states(self, query: GroupQuery) -> dict[str, int]:
        where, values = self._where(dataclasses.replace(query, states=()))
        is_counted = query == GroupQuery(
            lane=query.lane, states=query.states, sort=query.sort, offset=query.offset, limit=query.limit
        )
        counts, table = ("SUM(count)", "counts") if is_counted else ("COUNT(*)", "groups")
        found = self._db.execute(f"SELECT state, {counts} FROM {table} WHERE {where} GROUP BY state", values)
        return {state: count for state, count in found if count}

    def story(self, group: str) -> GroupStory | None:
        found = self._db.execute(f"SELECT {_SUMMARY} WHERE groups.id = ?", (group,)).fetchone()
        if found is None:
            return None
        first, last, lane, order = self._db.execute(
            'SELECT first, last, lane, "order" FROM groups WHERE id = ?', (group,)
        ).fetchone()
        events = self._events(group, first, last)
        # a group is enqueued again after a rewind
        told = next((event for event in reversed(events) if event.prompt is not None), None)
        return GroupStory(
            summary=_summary(found),
            prompt=told.prompt or "" if told else "",
            messages=tuple(json.loads(told.messages)) if told and told.messages else None,
            expected=told.expected if told else None,
            events=tuple(events),
            previous=self._neighbour("DESC", "<", lane, order, group),
            next=self._neighbour("ASC", ">", lane, order, group),
        )

    def _events(self, group: str, first: int, last: int) -> list[GroupEvent]:
        """Return the events of a group, with the rewinds and restores meanwhile."""
        found: dict[tuple[Cursor, int], GroupEvent] = {}
        for file in list_files(self._folder):
            if file.first[0] <= last and file.last[0] >= first:
                with contextlib.suppress(FileNotFoundError, CodecError):  # `damaged` says what is missing
                    for event in find_events(file.path, group, (first, last)):
                        found[event.cursor, event.part] = event
        return [found[place] for place in sorted(found)]

    def _neighbour(self, direction: str, beyond: str, lane: str, order: int, group: str) -> str | None:
        found = self._db.execute(
            f'SELECT id FROM groups WHERE lane = ? AND ("order", number) {beyond} (?, (SELECT number FROM groups WHERE id = ?)) '
            f'ORDER BY "order" {direction}, number {direction} LIMIT 1',
            (lane, order, group),
        ).fetchone()
        return found[0] if found else None

    def _where(self, query: GroupQuery) -> tuple[str, list[Any]]:
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
            also(
                "groups.number IN (SELECT number FROM groups WHERE id = ? "
                f"UNION ALL SELECT number FROM groups WHERE text IN ({texts} LIMIT ?))",
                *(query.text, *found, query.most_texts),
            )
        return " AND ".join(parts), values

    def has_more_texts(self, query: GroupQuery) -> bool:
        """Whether more than `most_texts` texts contain the text of a query."""
        if not query.text or query.most_texts == NO_BOUND:
            return False
        texts, found = self._texts(query.text)
        count = self._db.execute(f"SELECT COUNT(*) FROM ({texts} LIMIT ?)", (*found, query.most_texts + 1)).fetchone()
        return bool(count[0] > query.most_texts)

    def _texts(self, text: str) -> tuple[str, list[Any]]:
        """Return a statement for the numbers of the prompts, with their expected answers, that contain the text."""
        if len(text) >= _TRIGRAM and self._db.execute("SELECT full_text FROM about").fetchone()[0]:
            phrase = '"' + _searchable(text).replace('"', '""') + '"'
            return "SELECT rowid FROM found WHERE found MATCH ?", [phrase]
        pattern = f"%{_escaped(text)}%"
        return "SELECT number FROM texts WHERE (prompt LIKE ? ESCAPE '\\' OR expected LIKE ? ESCAPE '\\')", [
            pattern
        ] * 2


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _escaped(text: str) -> str:
    return _searchable(text).replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


def _searchable(text: str) -> str:
    """Return text without NUL, which would end it in a search."""
    return text.replace("\0", "\ufffd")


def _record(values: Sequence[Any]) -> GroupRecord:
    record = GroupRecord(*values)
    record.replicas = json.loads(values[10])
    record.trajectories = {index: RecordedTrajectory(*of_it) for index, *of_it in json.loads(values[12])}
    return record


def _values(record: GroupRecord) -> list[Any]:
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
