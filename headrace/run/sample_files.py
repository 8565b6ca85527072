"""Sample files: the trajectories of steps and validations, and the completions that no environment could score, as JSON lines.

`train_data_step12.jsonl.gz` has one line per trajectory that step 12 trained on, `val_data_step12.jsonl.gz` one per trajectory that
evaluated version 12, and `val_failed_data_step12.jsonl.gz` one per prompt that failed there, with the reason; `zcat` reads them.
`failed_data.jsonl` has one line per completion that failed its group, the newest last.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import msgspec

from headrace.base.errors import CodecError, ServiceError
from headrace.base.files import UNREADABLE, atomic_write, cut_torn_line
from headrace.run.indexed_lines import Key, Shorten, find_lines, write_lines
from headrace.run.samples import StoredSample

if TYPE_CHECKING:
    from headrace.config import Config

T = TypeVar("T")

Kind = Literal["train", "val", "val_failed"]

FAILED = "failed_data.jsonl"
# A file of failed completions that has grown to this size is moved to failed_data.1.jsonl, replacing an older one.
FAILED_BYTES = 32 << 20
# Where the lists by token begin in a line: `headrace.run.samples.record` writes them last.
TOKENS = b',"token_ids":['
_STEP = re.compile(r"(train|val|val_failed)_data_step(0|[1-9][0-9]*)\.jsonl\.gz")
_REMEDY = (
    "free space there, set logger.log_dir, lower logger.keep_step_data_bytes, or logger.keep_step_data=0 to write none"
)


class _StepFile(NamedTuple):
    """A file as it is listed: by when it was written, and where times are equal, by step."""

    written: int
    step: int
    kind: str
    size: int
    path: Path


def write_size(count: int) -> str:
    """Return a number of bytes for people, as `10 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


class SampleFiles:
    """The sample files of a run. The newest `keep` of each kind are kept (None: all; 0: none are written), and of all kinds together as
    many as have at most `most_bytes` (None: all).

    Law: once a file is written, the files have at most `most_bytes`, or only the newest of each kind are left, which always stay. So while
    one is written they have at most the bound and one step. What goes first was written first.
    """

    def __init__(self, folder: Path, keep: int | None, most_bytes: int | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.most_bytes = most_bytes
        self._made = False
        self._bounding = threading.Lock()  # steps and validations are written by different threads

    @classmethod
    def of(cls, config: Config) -> SampleFiles:
        """Return the sample files of the run with this configuration."""
        return cls(config.log_folder, config.logger.keep_step_data, config.logger.keep_step_data_bytes)

    def make_folder(self) -> None:
        """Make the folder; its parents only once, so that a run whose folder was deleted does not make it again."""
        self.folder.mkdir(parents=not self._made, exist_ok=True)
        self._made = True

    @property
    def wanted(self) -> bool:
        return self.keep != 0

    def path(self, kind: Kind, step: int) -> Path:
        return self.folder / f"{kind}_data_step{step}.jsonl.gz"

    def steps(self, kind: Kind) -> list[int]:
        """Return the steps that have files. The one written last is the last, because a rewound run repeats steps."""
        return [file.step for file in self._list() if file.kind == kind]

    def say_removed(self, kind: Kind) -> str:
        """Return why a step that was trained, or a version that was evaluated, has no file: which bound removed it, and what is kept."""
        if not self.wanted:
            return "no samples are written (logger.keep_step_data=0)"
        kept = self.steps(kind)
        if not kept:
            return f"{self.folder} has none, though the newest always stay: they were moved, or not copied"
        count = f"{len(kept)} are kept, from {min(kept)} to {max(kept)}" if len(kept) > 1 else f"only {kept[0]} is kept"
        if self.keep is not None and len(kept) >= self.keep:
            return f"removed by the bound logger.keep_step_data={self.keep}; {count}"
        sizes = [file.size for file in self._list()]
        if self.most_bytes is not None and sum(sizes) + max(sizes) > self.most_bytes:
            return f"removed by the bound logger.keep_step_data_bytes={self.most_bytes} ({write_size(self.most_bytes)}); {count}"
        return f"moved, not copied, or removed when samples were larger or the bounds less; {count}"

    def _list(self) -> list[_StepFile]:
        """Return the files, those written first first."""
        found = []
        for path in self.folder.glob("*_data_step*.jsonl.gz"):
            if match := _STEP.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    status = path.stat()
                    found.append(_StepFile(status.st_mtime_ns, int(match[2]), match[1], status.st_size, path))
        return sorted(found)

    def _bound(self) -> None:
        """Remove what is beyond the bounds. Raises `OSError`."""
        with self._bounding:
            kept = self._list()
            newest = {file.kind: file for file in kept}
            of_kind = {kind: [file for file in kept if file.kind == kind] for kind in newest}
            removed = [file for files in of_kind.values() if self.keep is not None for file in files[: -self.keep]]
            kept = [file for file in kept if file not in removed]
            beyond = -math.inf if self.most_bytes is None else sum(file.size for file in kept) - self.most_bytes
            for file in kept:
                if beyond > 0 and file is not newest[file.kind]:
                    removed.append(file)
                    beyond -= file.size
            for file in removed:
                file.path.unlink(missing_ok=True)

    def write(self, kind: Kind, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Write a file atomically. Raises `ServiceError` for a full disk."""
        if not self.wanted:
            return
        path = self.path(kind, step)
        try:
            self.make_folder()
            with atomic_write(path) as unfinished, unfinished.open("wb") as file:
                write_lines(file, ((_key(each), msgspec.json.encode(each) + b"\n") for each in records))
            self._bound()
        except OSError as error:
            raise ServiceError(f"can't write trajectories to {path} ({error}); {_REMEDY}") from error

    def replace(self, kind: Kind, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write like `write`, but without records remove the file, which a step taken before may have left."""
        if records:
            self.write(kind, step, records)
        else:
            self.path(kind, step).unlink(missing_ok=True)

    def read(self, kind: Kind, step: int) -> list[dict[str, Any]]:
        """Return the records of a file; none if the file is gone. Raises `CodecError` for a file that can't be read."""
        return _decode(self.path(kind, step), dict)

    def samples(self, kind: Kind, step: int) -> list[StoredSample]:
        """Return the samples of a file, without the fields that only tools need. Raises as `read` does."""
        return _decode(self.path(kind, step), StoredSample)

    def find(self, kind: Kind | Literal["failed"], step: int, group: str, index: int) -> dict[str, msgspec.Raw] | None:
        """Return the record of one trajectory, with its values as JSON: decoded, a long one takes five times as much. None if it is not
        kept. Of `failed` completions it is the last one, whatever the step. Raises as `read` does."""
        if kind == "failed":
            return next(iter([line for path in self.failed_paths for line in _find(path, group, index)][::-1]), None)
        return next(_find(self.path(kind, step), group, index), None)

    def append_failed(self, records: Sequence[Mapping[str, Any]], segment_bytes: int = FAILED_BYTES) -> None:
        """Add lines to `failed_data.jsonl`, of which at most two files of about `segment_bytes` are kept. Raises `ServiceError` for a full
        disk, or a folder that can't be written."""
        if not self.wanted:
            return
        path = self.folder / FAILED
        try:
            self.make_folder()
            cut_torn_line(path)
            if path.exists() and path.stat().st_size >= segment_bytes:
                path.replace(self._older_failed)
            with path.open("ab") as file:
                for each in records:
                    file.write(msgspec.json.encode(each) + b"\n")
        except OSError as error:
            raise ServiceError(f"can't write failed completions to {path} ({error}); {_REMEDY}") from error

    def read_failed(self) -> list[StoredSample]:
        """Return the completions that failed their groups, the newest last. Raises as `read` does."""
        return [sample for path in self.failed_paths for sample in _decode(path, StoredSample)]

    @property
    def failed_paths(self) -> tuple[Path, Path]:
        """The files of completions that failed their groups, the older one first."""
        return self._older_failed, self.folder / FAILED

    @property
    def _older_failed(self) -> Path:
        return self.folder / FAILED.replace(".", ".1.")


class _Place(msgspec.Struct, frozen=True):
    """What tells the lines of a file apart."""

    group: str
    index: int | None = None


def _key(line: Mapping[str, Any]) -> Key:
    return line.get("group", ""), line.get("index")


def read_heads(path: Path, group: str, form: type[T]) -> Iterator[T]:
    """Yield the lines of a sample file that are about a group, decoded, perhaps without their lists by token; none if the file doesn't
    exist. Neither these lists, which are nearly all of a long line, nor the lines of other groups are unpacked, where the file is
    packed. Raises `CodecError` for a file that can't be read."""
    return _find_lines(path, group, None, form, _shorten)


def _shorten(begun: bytes) -> bytes | None:
    """Return a line that ends before its lists by token, of one that is known so far; None if they don't begin there."""
    place = begun.find(TOKENS)
    while place >= 0:
        short = begun[:place] + b"}\n"
        with contextlib.suppress(msgspec.DecodeError):  # what an environment attaches may have such a list too
            msgspec.json.decode(short, type=dict[str, msgspec.Raw])
            return short
        place = begun.find(TOKENS, place + 1)
    return None


def _find(path: Path, group: str, index: int) -> Iterator[dict[str, msgspec.Raw]]:
    """Yield the lines about a trajectory, likewise."""
    return _find_lines(path, group, index, dict[str, msgspec.Raw])


def _find_lines(
    path: Path, group: str, index: int | None, form: type[T], shorten: Shorten | None = None
) -> Iterator[T]:
    needle = b'"group":' + msgspec.json.encode(group)
    try:
        with path.open("rb") as file:
            # of a file that is packed only a few lines are unpacked, those with this key among them
            key = group if index is None else (group, index)
            for line in find_lines(file, key, shorten) if path.suffix == ".gz" else file:
                if needle not in line or not line.endswith(b"\n"):
                    continue
                place = msgspec.json.decode(line, type=_Place)
                if place.group == group and index in (None, place.index):
                    yield msgspec.json.decode(line, type=form)
    except FileNotFoundError:
        return
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def _decode(path: Path, kind: type[T]) -> list[T]:
    """Return the complete lines of a file, even while it is being written; none if it doesn't exist."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return [msgspec.json.decode(line, type=kind) for line in data.split(b"\n")[:-1]]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> CodecError:
    return CodecError(f"{path}: not a file of samples ({error}); move it away")
