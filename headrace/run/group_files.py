"""The files of what became of every group: one row per event, in Parquet (zstd), in the folder `groups` of a run.

The trainer writes them from the buffer's stream `history`; any tool reads them (`SELECT * FROM 'runs/adder/groups/*.parquet'` in DuckDB). A
file is written completely or not at all, and never changed. Its name has its level, and the first and last of its events:
`0_1764168668123-0_1764168673120-4.parquet`. 64 small files are merged into one of the next level, and then deleted. So an event may stand
in two files for a moment, and forever if a trainer is killed between writing a file and clearing the stream. `id` and `part` identify it.

An event that concerns the whole run (`rewound`, `restored`, `lost`) has no group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headrace.base.errors import CodecError, ConfigError, ServiceError
from headrace.base.files import atomic_write, fsync

FOLDER = "groups"
# Files of one level that are merged into one, and the bytes that they may have together.
MERGED = 64
MOST_BYTES = 64 << 20

Cursor = tuple[int, int]
_NAME = re.compile(r"(\d+)_(\d+)-(\d+)_(\d+)-(\d+)\.parquet")

What = Literal[
    "enqueued", "leased", "pushed", "dropped", "began_anew", "scoring", "scored", "ready", "reserved", "rejected", "requeued", "passed_on",
    "trained", "filtered", "failed", "evaluated", "unused", "retried", "rewound", "restored", "lost",
]  # fmt: skip

# name: Parquet type. `part` counts the rows of one event, and `time` is the server's clock. What an event lacks is null.
COLUMNS: Mapping[str, str] = {
    "id": "string",
    "part": "int32",
    "time": "timestamp",
    "group": "string",
    "what": "string",
    "index": "int32",  # of the trajectory
    "replica": "string",
    "attempt": "int32",
    "step": "int64",
    "version": "int64",
    "timeline": "string",
    "reward": "double",
    "build": "string",
    "cause": "string",
    "reason": "string",
    "tokens": "int64",  # of a trajectory that was pushed, with its oldest and newest version
    "oldest": "int64",
    "newest": "int64",
    "lost": "int64",  # events that were cut off the stream since the run began, unread
    # of a group that was enqueued
    "lane": "string",
    "order": "int64",
    "epoch": "int32",
    "n": "int32",
    "environment": "string",
    "task": "string",
    "prompt": "string",
    "messages": "string",  # JSON
    "expected": "string",
    "file": "string",
    "line": "int64",
}
# Characters of a prompt, its messages and its expected answer that are kept.
PROMPT_CHARACTERS = 32_768


@dataclasses.dataclass(frozen=True, order=True)
class GroupFile:
    first: Cursor
    last: Cursor
    level: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def parse_cursor(text: str) -> Cursor:
    """Return the milliseconds and number of an event's id."""
    milliseconds, _, number = text.partition("-")
    return int(milliseconds), int(number)


def list_files(folder: Path) -> list[GroupFile]:
    """Return the files of a folder by the order of their events; none without the folder."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in paths)
    return sorted(
        GroupFile((int(m[2]), int(m[3])), (int(m[4]), int(m[5])), int(m[1]), path) for m, path in matches if m
    )


def write_file(folder: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    """Write events, in order, to a new file; once this returns, they survive a power cut. `columns` are those of `COLUMNS` that they have.
    Raises `OSError`."""
    parquet = import_parquet()
    ids = columns["id"]
    path = folder / _name(0, parse_cursor(ids[0]), parse_cursor(ids[-1]))
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        parquet.write_table(_table(columns), unfinished, compression="zstd")
        fsync(unfinished)
    fsync(folder)
    return path


def merge_files(folder: Path) -> Path | None:
    """Merge the oldest `MERGED` neighbours of one level, if there are as many, and return the new file. A kill at any moment leaves every
    event in a file. Raises `OSError`, and `CodecError` for a damaged file."""
    parquet = import_parquet()
    parts = _find_neighbours(list_files(folder))
    if not parts:
        return None
    path = folder / _name(parts[0].level + 1, parts[0].first, max(part.last for part in parts))
    with atomic_write(path) as unfinished:
        with parquet.ParquetWriter(unfinished, _schema(), compression="zstd") as writer:
            for part in parts:
                writer.write_table(read_file(part.path))
        fsync(unfinished)
    fsync(folder)
    for part in parts:
        part.path.unlink(missing_ok=True)
    return path


def read_file(path: Path, columns: Collection[str] | None = None, group: str | None = None) -> Any:
    """Return the table of a file, or only the rows of one group, with those of rewinds and restores. Raises `FileNotFoundError`, and
    `CodecError` for a damaged file."""
    parquet = import_parquet()
    import pyarrow

    # rows for which either is true
    filters = None if group is None else [[("group", "==", group)], [("what", "in", ["rewound", "restored"])]]
    names = None if columns is None else list(columns)
    try:
        with path.open("rb") as file:
            return parquet.read_table(file, columns=names, filters=filters)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise CodecError(
            f"{path}: not a file of group events ({' '.join(str(error).split()):.200}); move it away"
        ) from error


def import_parquet() -> Any:
    """Return pyarrow.parquet. Raises `ConfigError` if it isn't installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "the history of groups is in Parquet files, which need the package pyarrow; pip install 'headrace[page]'"
        ) from error
    return parquet


def cannot_write(folder: Path, error: OSError) -> ServiceError:
    return ServiceError(f"can't write the history of groups to {folder} ({error}); free space there, or set run.dir")


def rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table, in batches, without what they lack."""
    for batch in table.to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            yield {name: value for name, value in row.items() if value is not None}


def _find_neighbours(files: Sequence[GroupFile]) -> Sequence[GroupFile]:
    """Return the first `MERGED` files in a row of one level that are small enough together."""
    start = 0
    for end in range(len(files)):
        if files[end].level != files[start].level:
            start = end
        if end - start + 1 == MERGED:
            found = files[start : end + 1]
            if sum(file.path.stat().st_size for file in found) <= MOST_BYTES:
                return found
            start += 1
    return []


def _name(level: int, first: Cursor, last: Cursor) -> str:
    return f"{level}_{first[0]}-{first[1]}_{last[0]}-{last[1]}.parquet"


def _schema(columns: Collection[str] | None = None) -> Any:
    import pyarrow

    types = {
        "string": pyarrow.string(),
        "int32": pyarrow.int32(),
        "int64": pyarrow.int64(),
        "double": pyarrow.float64(),
        "timestamp": pyarrow.timestamp("ms", tz="UTC"),
    }
    return pyarrow.schema([(name, types[COLUMNS[name]]) for name in columns or COLUMNS])


def _table(columns: Mapping[str, Sequence[Any]]) -> Any:
    import pyarrow

    schema = _schema()
    count = len(columns["id"])
    return pyarrow.table(
        [
            pyarrow.array(columns[field.name], type=field.type)
            if field.name in columns
            else pyarrow.nulls(count, field.type)
            for field in schema
        ],
        schema=schema,
    )
