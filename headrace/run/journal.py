"""The journal `metrics.jsonl`: the metrics of a run, from which curves and trackers are fed.

It has one JSON object per line: `kind` (`train`, `validation`, `rewind`, or `retry`), `step`, `timeline`, `time` (Unix seconds) and
`metrics`. `step` of a `train` line is the step t that turned version t into t + 1; of a `validation` line the version that was evaluated;
of a `rewind` line the checkpoint from which the trainer resumed, which supersedes the lines of later weights above it (`surviving`). A
`train` line names the `builds` that scored the step's groups, by environment. A `retry` line names the `orders` of prompts whose groups had
failed and were queued again, at the step that was next then.

The newest lines are in `metrics.jsonl` itself. Once it has `SEGMENT_BYTES` it is renamed to `metrics.000001.jsonl` and so on, and a new
file is started. `read_journal` and `read_bytes` read all of them as one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from headrace.base.errors import ServiceError
from headrace.base.files import cannot_write, cut_torn_line

JOURNAL = "metrics.jsonl"  # in the run's folder
SEGMENT_BYTES = 64 << 20

Kind = Literal["train", "validation", "rewind", "retry"]


@dataclasses.dataclass(frozen=True)
class Line:
    kind: Kind
    step: int
    timeline: str
    time: float
    metrics: Mapping[str, float]
    orders: list[int] = dataclasses.field(default_factory=list)
    builds: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def surviving(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that belong to the history of the newest weights: those of steps and validations.

    A rewind to version c abandons the steps that made later versions (`train` lines with step >= c) and the validations of those versions
    (`validation` lines with step > c). The weights of version c are unchanged, so its own validation survives. Lines that a trainer adds on
    its own timeline after its successor's `rewind` are abandoned too.
    """
    kept: list[Line] = []
    timeline: str | None = None
    for line in lines:
        if line.kind == "rewind":
            timeline = line.timeline
            kept = [k for k in kept if k.step < line.step or (k.kind == "validation" and k.step == line.step)]
        elif line.kind != "retry" and timeline in (None, line.timeline):
            kept.append(line)
    return kept


def list_retries(lines: Iterable[Line]) -> list[list[int]]:
    """Return the orders of each retry so far, regardless of rewinds: a retry belongs to the run, not to its weights."""
    return [line.orders for line in lines if line.kind == "retry"]


class Journal:
    """The file `metrics.jsonl`, appended to line by line."""

    def __init__(self, path: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.path = path
        self._segment_bytes = segment_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)

    def append(
        self,
        kind: Kind,
        step: int,
        timeline: str,
        metrics: Mapping[str, float],
        orders: Sequence[int] = (),
        builds: Mapping[str, list[str]] | None = None,
    ) -> None:
        """Add a line. Raises `ServiceError` if it can't be written: the folder is gone, the disk is full."""
        line = write_line(Line(kind, step, timeline, time.time(), dict(metrics), list(orders), dict(builds or {})))
        try:
            if self.path.exists() and self.path.stat().st_size >= self._segment_bytes:
                number = max((int(older.suffixes[0][1:]) for older in _older(self.path)), default=0) + 1
                self.path.rename(self.path.with_name(f"{self.path.stem}.{number:06}{self.path.suffix}"))
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def read(self) -> list[Line]:
        """Return all lines. Raises `ServiceError` naming the first line that `append` did not write."""
        return read_journal(self.path)


def write_line(line: Line) -> str:
    """Return the line as the file has it."""
    fields = {name: value for name, value in vars(line).items() if value or name not in ("orders", "builds")}
    return json.dumps(fields) + "\n"


def read_journal(path: Path) -> list[Line]:
    """Return the lines so far, even while the trainer writes; none if the file doesn't exist. Raises as `Journal.read` does."""
    return list(iter_journal(path))


def iter_journal(path: Path) -> Iterator[Line]:
    """Yield what `read_journal` returns, holding one line at a time."""
    return (line for line, _ in iter_from(path, 0))


def iter_from(path: Path, offset: int) -> Iterator[tuple[Line, int]]:
    """Yield the complete lines from the byte `offset` on, as `read_bytes` counts it, each with the offset of what follows it. Raises as
    `Journal.read` does."""
    with contextlib.ExitStack() as stack:
        before = 0
        for file in _open(path, stack):
            size = os.fstat(file.fileno()).st_size
            start = min(max(offset - before, 0), size)
            file.seek(start)
            where = before + start
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):  # a writer may be writing the last line
                    where += len(line)
                    lines = f"{file.name}:{number}" if start == 0 else f"{file.name}, {number} lines after byte {start}"
                    yield _parse(line, lines), where
            before += size


def read_bytes(path: Path, offset: int = 0) -> bytes:
    """Return the complete lines of all segments as one, from the byte `offset` on; none if the file doesn't exist."""
    with contextlib.ExitStack() as stack:
        data = bytearray()
        for file in _open(path, stack):
            size = os.fstat(file.fileno()).st_size
            file.seek(min(offset, size))
            offset -= min(offset, size)
            data += file.read()
    return bytes(data[: data.rfind(b"\n") + 1])  # a writer may be writing the last line


def _open(path: Path, stack: contextlib.ExitStack) -> list[BinaryIO]:
    """Return all segments, oldest first."""
    parts: list[BinaryIO] = []
    # the newest is opened first: if it is renamed meanwhile, it is found again, and the next read returns what followed
    newest = None
    with contextlib.suppress(FileNotFoundError):
        newest = stack.enter_context(path.open("rb"))
    for older in _older(path):
        if newest is None or not os.path.samestat(older.stat(), os.fstat(newest.fileno())):
            parts.append(stack.enter_context(older.open("rb")))
    return [*parts, *([newest] if newest else [])]


def size(path: Path) -> int:
    """Return the bytes of all segments."""
    return sum(part.stat().st_size for part in list_files(path) if part.exists())


def list_files(path: Path) -> list[Path]:
    """Return the files of a journal, oldest first, the one that is written to last; there may be none."""
    return [*_older(path), *([path] if path.exists() else [])]


def _older(path: Path) -> list[Path]:
    """Return the full segments, oldest first."""
    return sorted(path.parent.glob(f"{path.stem}.[0-9][0-9][0-9][0-9][0-9][0-9]{path.suffix}"))


def parse_lines(data: bytes, where: str) -> Iterator[Line]:
    """Yield the lines of `data`. Raises `ServiceError` naming `where` and the first line that `Journal.append` did not write."""
    for number, line in enumerate(data.splitlines(), start=1):
        yield _parse(line, f"{where}:{number}")


def _parse(line: bytes, where: str) -> Line:
    try:
        try:
            fields: dict[str, Any] = msgspec.json.decode(line)  # several times as fast as `json`
        except msgspec.MsgspecError:
            fields = json.loads(line)  # it reads NaN and Infinity too
        return Line(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ServiceError(f"{where}: not a line of metrics ({error}); remove it or move the file away") from error
