"""The files of what became of every group: one row per event, in Parquet (zstd), in the folder `groups` of a run.

The trainer writes them from the buffer's stream `history`; any tool reads them (`SELECT * FROM 'runs/adder/groups/*.parquet'` in DuckDB). A
file is written completely or not at all, and never changed. Its name has its level, and the first and last of its events:
`0_1764168668123-0_1764168673120-4.parquet`. 64 small files are merged into one of the next level, and then deleted. So an event may stand
in two files for a moment, and forever if a trainer is killed between writing a file and clearing the stream. `id` and `part` identify it.

An event that concerns the whole run (`rewound`, `restored`, `lost`) has no group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headrace.base.deferred import np
from headrace.base.errors import CodecError, ConfigError, ServiceError
from headrace.base.files import atomic_write, fsync
from headrace.records.group_event import Cursor, GroupEvent, parse_cursor

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDER = "groups"
# Files of one level that are merged into one, and the bytes that they may have together.
MERGED = 64
MOST_BYTES = 64 << 20

# Rows that are written, or turned into Python objects, at a time.
_PART, _AT_ONCE = 65_536, 4096
_END_MS = 1 << 62  # after every event

_NAME = re.compile(r"(\d+)_(\d+)-(\d+)_(\d+)-(\d+)\.parquet")

# The fields of a `GroupEvent` and its time, each with its Parquet type. What an event lacks is null.
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
    folder.mkdir(exist_ok=True)  # not its parents, so that a run whose folder was deleted does not make it again
    with atomic_write(path) as unfinished:
        parquet.write_table(_table(columns), unfinished, row_group_size=_PART, compression="zstd")
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
                writer.write_table(read_file(part.path), row_group_size=_PART)
        fsync(unfinished)
    fsync(folder)
    for part in parts:
        part.path.unlink(missing_ok=True)
    return path


def read_file(path: Path, columns: Collection[str] | None = None) -> Any:
    """Return the table of a file. Raises `FileNotFoundError`, and `CodecError` for a damaged file."""
    with _open(path) as file:
        return file.read(columns=None if columns is None else list(columns))


def iterate_events(path: Path, fields: Collection[str], first_ms: int = 0) -> Iterator[GroupEvent]:
    """Yield the events of a file with these fields of them, holding a few thousand at a time, without most of those before a time in
    milliseconds. Raises as `read_file` does."""
    with _open(path) as file:
        parts = _parts(file, (first_ms, _END_MS)) if first_ms else None
        for batch in file.iter_batches(_AT_ONCE, row_groups=parts, columns=list(fields), use_threads=False):
            yield from _events(batch)


def find_events(path: Path, group: str, span: tuple[int, int]) -> Iterator[GroupEvent]:
    """Yield the events of one group in a file, and the rewinds and restores in it, between two times in milliseconds. Raises as `read_file`
    does."""
    from pyarrow import array, compute

    wanted = array(["rewound", "restored"])
    with _open(path) as file:
        for part in _parts(file, span):
            table = file.read_row_group(part, use_threads=False)
            of_run = compute.is_in(table["what"], value_set=wanted)
            found = table.filter(compute.or_kleene(compute.equal(table["group"], group), of_run))
            for batch in found.to_batches():
                yield from (event for event in _events(batch) if span[0] <= event.cursor[0] <= span[1])


def _events(batch: Any) -> Iterator[GroupEvent]:
    """Yield the events of the rows of a table; fields that it lacks are None."""
    present = set(batch.schema.names)
    columns = (batch.column(name).to_pylist() if name in present else repeat(None) for name in GroupEvent._fields)
    return map(GroupEvent._make, zip(*columns))  # noqa: B905  # `repeat` has no end


class EventColumns:
    """Columns of the events in a range of time, as arrays of a few bytes an event, each of which is taken once. -1 (in `floats`
    NaN) stands for null."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = list(names)
        self.count = 0
        self._texts = [name for name in names if COLUMNS[name] == "string"]
        self._parts: dict[str, list[Any]] = {name: [] for name in names}

    def read(self, path: Path, span: tuple[int, int], most: int) -> bool:
        """Add the events of a file between two times in milliseconds, in parts, before those that were added. Returns False once there are
        `most` or more, and some were left out. Raises as `read_file` does."""
        with _open(path, self._texts) as file:
            for part in reversed(_parts(file, span)):
                if self.count >= most:
                    return False
                self._add(file.read_row_group(part, self.names, use_threads=False))
        return True

    def _add(self, table: Any) -> None:
        self.count += len(table)
        for name, parts in self._parts.items():
            column = table[name].combine_chunks()
            if name in self._texts:
                parts.append(column)
            elif COLUMNS[name] == "double":
                parts.append(column.to_numpy(zero_copy_only=False).astype(np.float32))
            elif COLUMNS[name] == "timestamp":
                parts.append(column.cast("int64").fill_null(-1).to_numpy())
            else:
                parts.append(column.fill_null(-1).to_numpy().astype(np.int32))

    def texts(self, name: str) -> tuple[list[str], NDArray[np.int32]]:
        """Return the texts of a column, each once, and the place of each event's among them."""
        import pyarrow

        parts = self._parts.pop(name)[::-1]
        if not parts:
            return [], np.array([], dtype=np.int32)
        whole = pyarrow.chunked_array(parts).unify_dictionaries().combine_chunks()
        return whole.dictionary.to_pylist(), whole.indices.fill_null(-1).to_numpy()

    def numbers(self, name: str) -> NDArray[np.int64]:
        """Return times in milliseconds, or whole numbers (of four bytes)."""
        return self._column(name, np.int64)

    def floats(self, name: str) -> NDArray[np.float32]:
        return self._column(name, np.float32)

    def _column(self, name: str, otherwise: Any) -> NDArray[Any]:
        parts = self._parts.pop(name)
        return np.concatenate(parts[::-1]) if parts else np.array([], dtype=otherwise)


@contextlib.contextmanager
def _open(path: Path, coded: Collection[str] = ()) -> Iterator[Any]:
    parquet = import_parquet()
    with _readable(path) as file:
        yield parquet.ParquetFile(file, read_dictionary=list(coded))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[IO[bytes]]:
    import pyarrow

    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise CodecError(
            f"{path}: not a file of group events ({' '.join(str(error).split()):.200}); move it away"
        ) from error


def _parts(file: Any, span: tuple[int, int]) -> list[int]:
    """Return the parts of a file that have events in a span of milliseconds, or don't say."""
    time = file.schema_arrow.get_field_index("time")
    return [part for part in range(file.num_row_groups) if _overlaps(file.metadata.row_group(part).column(time), span)]


def _overlaps(column: Any, span: tuple[int, int]) -> bool:
    known = column.statistics
    if known is None or not known.has_min_max:
        return True
    least, most = (round(moment.timestamp() * 1000) for moment in (known.min, known.max))
    return most >= span[0] and least <= span[1]


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
