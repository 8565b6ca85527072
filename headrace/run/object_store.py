"""Keeps a run's checkpoints in an object store (S3, Google Cloud Storage, Azure, or a folder), from which a machine without the run's files
continues it.

Under `checkpointing.store` each run has a folder with its id:

    adder/manifests/step_40-1f0c.json   the files of a checkpoint, their sizes and digests; written last: without it there is no checkpoint
    adder/step_40-1f0c/checkpoint/…     its files, as in the folder `step_40` beside the run's other checkpoints
    adder/step_40-1f0c/lineage/…        the lineage of the steps before it
    adder/step_40-1f0c/run/…            what a trainer, a command or the page reads of the run's folder: configuration, metrics, groups
    adder/starts/000002.json            the second start of a trainer (`checkpoints.Start`)
    adder/owners/1f0c.json              the sign of life of the trainer on this timeline
    adder/weights/…                     what replicas pull (`headrace.run.weight_store`)

The starts are the chain of `headrace.run.checkpoints`, and decide in the same way which checkpoints are the run's. A start is made by a
conditional put, so of two trainers that begin at once one is refused. A checkpoint that an earlier trainer publishes late is off the chain.
Each trainer looks for a later start before it publishes or removes. A request of one that freezes in between may still arrive late, and its
successor puts that right (`uploads`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import CodecError, ConfigError, MissingPackage, Restartable, ServiceError, Unavailable
from headrace.base.files import UNREADABLE, read_json, write_json
from headrace.config import Config
from headrace.config.services import STORE_URL
from headrace.run.checkpoints import Start, digest_of, on_chain

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int], None]  # is told the bytes that were moved

# Beside the checkpoints: what their newest trainer knows of the store, and of the weights in it that replicas pull.
STATUS, OFFERS = "store.json", "offers.json"
# Bytes of a part of a file, how many parts of a file are sent at a time, and how many files are moved at a time.
_PART, _PARTS, _FILES = 8 << 20, 4, 2
_MOST_PARTS = 9_000  # S3 takes 10,000
_REQUEST_S = 120
# A trainer that looks whether it can use the store does not wait as long as one that sends a checkpoint.
_PATIENCE = {"max_retries": 10, "retry_timeout": timedelta(minutes=3)}
_IMPATIENCE = {"max_retries": 2, "retry_timeout": timedelta(seconds=15)}

_MANIFEST = re.compile(r"step_(0|[1-9][0-9]*)-([A-Za-z0-9_-]+)\.json")


class StoreUnreachable(Restartable, Unavailable):
    """Raised when the store can't be reached, or fails."""


class StoredFile(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint in the store, with what a resume needs beside it. `files` are by name, as in the folder of the checkpoint in the store.
    `metrics` are all that were known of it at `time`, by the names of `checkpointing.metric_name`."""

    run_id: str
    version: int
    timeline: str
    time: float
    files: dict[str, StoredFile]
    metrics: dict[str, float] = {}

    @property
    def folder(self) -> str:
        return f"step_{self.version}-{self.timeline}"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class Owner(msgspec.Struct, frozen=True):
    """The trainer on a timeline: `process` names it. `beat` differs each time that it gives a sign of life. `ended`: it gives no more."""

    process: str
    beat: str
    ended: bool = False


class StoreStatus(msgspec.Struct, frozen=True):
    """What the newest trainer of a run knows of the store at `url`: the newest checkpoint or version of the weights there, and why a later
    one is not."""

    url: str
    version: int | None
    problem: str = ""


def write_status(folder: Path, status: StoreStatus, name: str = STATUS) -> None:
    """Replace a status beside the checkpoints in `folder`. Raises `OSError`."""
    write_json(folder / name, status)


def list_problems(folder: Path) -> list[str]:
    """Return a line if the checkpoints in `folder` do not reach the store, and one if the weights for replicas that pull don't."""
    lines = []
    for file in (folder / STATUS, folder / OFFERS):
        try:
            status = read_json(file, StoreStatus)
            lines.append(status.problem if status else "")
        except CodecError as error:
            lines.append(str(error))
    return [line for line in lines if line]


def check_package(url: str) -> None:
    """Raise `MissingPackage` if the package that reads and writes stores is not installed."""
    try:
        import obstore  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"checkpointing.store {url} needs the package 'obstore': pip install 'headrace[store]'"
        ) from error


class RunStore:
    """The folder of one run in a store, at `url`. All methods raise `ServiceError` for a store that refuses or can't be reached, and
    `CodecError` for what this class did not write there."""

    def __init__(self, url: str, *, patient: bool = True, writes: bool = True) -> None:
        """Open it, without a request. Raises `MissingPackage`, `ConfigError` for an address that is none, and
        `ServiceError` for one that can't be used, such as for a missing file with credentials."""
        check_package(url)
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        if re.match(STORE_URL, url) is None:
            raise ConfigError(
                f"{url} is no address in a store; give s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER"
            )
        self.url = url.rstrip("/")
        if url.startswith("file:"):
            options: dict[str, Any] = {"mkdir": True, "automatic_cleanup": True} if writes else {}
        else:
            plain = any(value.startswith("http://") for name, value in os.environ.items() if name in _ENDPOINTS)
            options = {
                "retry_config": _PATIENCE if patient else _IMPATIENCE,
                "client_options": {"timeout": f"{_REQUEST_S}s", **({"allow_http": True} if plain else {})},
            }
        try:
            self._store: Any = from_url(self.url, **options)
        except (BaseError, OSError, ValueError) as error:
            raise Unavailable(
                f"{url} can't be opened ({_reason(error)}); look at checkpointing.store, and its credentials"
            ) from error

    @classmethod
    def of(cls, config: Config, *, patient: bool = True) -> RunStore | None:
        """Return that of a run; None if its checkpoints stay where they are written."""
        url = config.run_store
        return None if url is None or not config.checkpointing.enabled else cls(url, patient=patient)

    def try_out(self) -> None:
        """Write, read and remove an object, and see that an object can be made only once."""
        name, data = f"trials/{secrets.token_hex(8)}", secrets.token_bytes(16)
        if not self._create(name, data):
            raise ServiceError(f"{self.url}: a new object is said to exist; give checkpointing.store another address")
        try:
            if self._create(name, data[:8]):
                raise ServiceError(
                    f"{self.url} makes an object twice where a conditional put was asked for (If-None-Match), so two trainers could take "
                    "the same run; give checkpointing.store a store that has these"
                )
            if self.read(name) != data:
                raise ServiceError(
                    f"{self.url} does not return what was written there; give another checkpointing.store"
                )
        finally:
            self.remove([name])

    # -- the chain

    def starts(self) -> list[Start]:
        """Return every start so far."""
        names = sorted(self.list_objects("starts"))
        with ThreadPoolExecutor(_FILES * _PARTS, thread_name_prefix="starts") as threads:
            return [
                self._decode(name, data, Start) for name, data in zip(names, threads.map(self.read, names), strict=True)
            ]

    def add_start(self, number: int, start: Start) -> None:
        """Add start `number`, the first of which is 1. Raises `ServiceError` if another trainer has added one of that number."""
        if not self._create(f"starts/{number:06}.json", msgspec.json.encode(start)):
            raise ServiceError(
                f"{self.url}: another trainer has taken over the run at this moment; stop the other, or this one"
            )

    def count_starts(self) -> int:
        return len(self.list_objects("starts"))

    def say_lost(self, what: str) -> str:
        return (
            f"{self.url} has lost {what}, so its chain is not whole. Restore the objects in starts/, and let no rule of the bucket remove "
            "any; or, where the run's folder is, remove this one of the store, and it is sent again"
        )

    # -- who is at work

    def read_owner(self, timeline: str) -> Owner | None:
        """Return the last sign of life of the trainer on `timeline`."""
        name = f"owners/{timeline}.json"
        try:
            return self._decode(name, self.read(name), Owner)
        except FileNotFoundError:
            return None

    def write_owner(self, timeline: str, owner: Owner) -> None:
        self.write(f"owners/{timeline}.json", msgspec.json.encode(owner))

    # -- checkpoints

    def manifests(self, starts: Sequence[Start]) -> dict[int, str]:
        """Return the name of the manifest of each checkpoint on the chain of `starts`, by version, ascending. Raises `CodecError` if that
        lacks the start of a trainer that has published one."""
        found: dict[int, str] = {}
        timelines = {start.timeline for start in starts}
        for name in self.list_objects("manifests"):
            match = _MANIFEST.fullmatch(name.removeprefix("manifests/"))
            if match and match[2] not in timelines:
                timelines.update(start.timeline for start in self.starts())  # of a trainer that has begun since
                if match[2] not in timelines:
                    raise CodecError(self.say_lost(f"the start of {name}"))
            if match and on_chain(starts, {int(match[1]): match[2]}):
                found[int(match[1])] = name
        return dict(sorted(found.items()))

    def read_manifest(self, name: str) -> Manifest:
        """Return the manifest of this name. Raises `FileNotFoundError`, and `CodecError` if `write_manifest` did not write it."""
        manifest = self._decode(name, self.read(name), Manifest)
        if name != f"manifests/{manifest.folder}.json":
            raise CodecError(f"{self.url}/{name} is the manifest of {manifest.folder}; remove it")
        return manifest

    def has_manifest(self, manifest: Manifest) -> bool:
        """Return whether the checkpoint is published, with these metrics."""
        try:
            return self.read_manifest(f"manifests/{manifest.folder}.json") == manifest
        except (CodecError, FileNotFoundError):
            return False

    def write_manifest(self, manifest: Manifest) -> None:
        """Publish the checkpoint, all of whose files are there."""
        self.write(f"manifests/{manifest.folder}.json", msgspec.json.encode(manifest))

    def send(self, manifest: Manifest, paths: Mapping[str, Path], progress: Progress) -> None:
        """Send the files of a checkpoint, at `paths` by name, except those that are there. Raises `OSError` for a file that can't be read,
        and `ServiceError` for one that is not what the manifest says."""
        there = self.list_objects(manifest.folder)

        def send(name: str) -> None:
            file, target = manifest.files[name], f"{manifest.folder}/{name}"
            if there.get(target) == file.size and self._digest(target, file.size) == file.sha256:
                progress(file.size)
                return
            with paths[name].open("rb") as opened:
                reader = _Reader(opened, file, progress)
                part = max(_PART, file.size // _MOST_PARTS)
                options = {"chunk_size": part, "max_concurrency": _PARTS}
                try:
                    try:
                        attributes = {_DIGEST: file.sha256}
                        self._ask(
                            lambda: self._store.put(target, reader, attributes=attributes, **options),
                            NotImplementedError,
                        )
                    except NotImplementedError:  # a folder has no attributes
                        reader.seek(0)
                        self._ask(lambda: self._store.put(target, reader, **options))
                except ServiceError as error:
                    if reader.has_changed:
                        raise ServiceError(
                            f"{name} has changed since it was written, and is not sent; the next start sets the checkpoint aside"
                        ) from error
                    raise

        with ThreadPoolExecutor(_FILES, thread_name_prefix="store") as threads:
            # the largest first, so that one is not left to the end
            names = sorted(manifest.files, key=lambda name: manifest.files[name].size, reverse=True)
            run_all(threads, send, names)

    def remove_checkpoint(self, folder: str) -> None:
        """Remove a checkpoint, or what was sent of one: its manifest first, so that no reader finds half of it."""
        self.remove([f"manifests/{folder}.json"])
        self.remove([*self.list_objects(folder)])

    def list_remains(self, removed: Collection[str]) -> list[str]:
        """Return the folders of checkpoints without a manifest, and those whose manifest is there again though they were `removed`."""
        found = self._ask(lambda: self._store.list_with_delimiter(None))
        published = {name.removeprefix("manifests/").removesuffix(".json") for name in self.list_objects("manifests")}
        folders = [name for name in found["common_prefixes"] if name.startswith("step_") and name not in published]
        return [*folders, *sorted(published.intersection(removed))]

    def find_lost(self, manifest: Manifest) -> str | None:
        """Return what is wrong with the first file of a checkpoint that is missing or cut off in the store; None if there is none."""
        there = self.list_objects(manifest.folder)
        for name, file in sorted(manifest.files.items()):
            if (size := there.get(f"{manifest.folder}/{name}")) != file.size:
                what = "is missing" if size is None else f"has {size} bytes, and {file.size} were sent"
                return f"{self.url}/{manifest.folder}/{name} {what}"
        return None

    def fetch(self, manifest: Manifest, folder: Path, progress: Progress) -> str | None:
        """Write the files of a checkpoint into `folder`, by their names, except those that are there. Return what is wrong with the first
        that is not what was sent; None if there is none, and then they survive a power cut. Raises `OSError`."""
        for name in manifest.files:
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                return f"{self.url}/{manifest.folder}: {name} leads out of the folder of the checkpoint"
        if (lost := self.find_lost(manifest)) is not None:
            return lost
        problems: list[str] = []
        ended = threading.Event()

        def fetch(name: str) -> None:
            file, source = manifest.files[name], f"{manifest.folder}/{name}"
            path = folder / name
            if path.is_file() and path.stat().st_size == file.size and digest_of(path) == file.sha256:
                progress(file.size)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256()
            try:
                with path.open("wb") as target:
                    for part in self._parts(source, file.size):
                        if ended.is_set():
                            return
                        digest.update(part)
                        target.write(part)
                        progress(len(part))
                    target.flush()
                    os.fsync(target.fileno())
            except FileNotFoundError:
                problems.append(f"{self.url}/{source} is missing")
                return
            if digest.hexdigest() != file.sha256:
                problems.append(
                    f"{self.url}/{source} is not what was sent: its SHA-256 differs from that in its manifest"
                )

        with ThreadPoolExecutor(_FILES * _PARTS, thread_name_prefix="store") as threads:
            try:
                run_all(threads, fetch, manifest.files)
            finally:
                ended.set()
        return min(problems, default=None)

    # -- objects

    def list_objects(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects in a folder, by name."""
        found = self._ask(lambda: [each for chunk in self._store.list(folder) for each in chunk])
        return {each["path"]: each["size"] for each in found}

    def _create(self, name: str, data: bytes) -> bool:
        """Make an object. Returns False if another has made it."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self._ask(lambda: self._store.put(name, data, mode="create"), AlreadyExistsError)
        except AlreadyExistsError:
            with contextlib.suppress(FileNotFoundError):  # another is making it now
                return self.read(name) == data  # it was this one: the answer was lost, and the library asked again
            return False
        return True

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raises `FileNotFoundError`."""
        return bytes(self._ask(lambda: self._store.get(name).bytes(), FileNotFoundError))

    def _parts(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the content of an object, each part by a request of its own: the time that one may take does not bound the size."""
        for begin in range(0, size, _PART):
            part = functools.partial(self._store.get_range, name, start=begin, length=min(_PART, size - begin))
            yield bytes(self._ask(part, FileNotFoundError))

    def _digest(self, name: str, size: int) -> str:
        """Return the SHA-256 of an object: that with which it was sent, or where there is none, of what it has."""
        attributes = self._ask(lambda: self._store.get(name, options={"head": True}), FileNotFoundError).attributes
        if _DIGEST in attributes:
            return str(attributes[_DIGEST])
        digest = hashlib.sha256()
        for part in self._parts(name, size):
            digest.update(part)
        return digest.hexdigest()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Make an object or replace it: a reader finds all of it, or what was there before."""
        self._ask(lambda: self._store.put(name, data))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects. None of them needs to be there."""
        with contextlib.suppress(FileNotFoundError):
            if names:
                self._ask(lambda: self._store.delete([*names]), FileNotFoundError)

    def _decode(self, name: str, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except UNREADABLE as error:
            raise CodecError(f"{self.url}/{name} is not what was written there ({error}); remove it") from error

    def _ask(self, request: Callable[[], T], *expected: type[Exception]) -> T:
        """Return the answer. Raises what is `expected`; for all else that a store says `Unavailable`, `StoreUnreachable` if it may say
        otherwise soon, or `ServiceError` for a name that it can't have."""
        from obstore.exceptions import BaseError

        try:
            return request()
        except expected:
            raise
        except ValueError as error:
            raise ServiceError(f"{self.url}: {_reason(error)}; rename that file") from error
        except FileNotFoundError as error:
            raise Unavailable(
                f"{self.url}: there is no such bucket; make it, or correct checkpointing.store"
            ) from error
        except (BaseError, OSError) as error:
            reason = _reason(error)
            if _DENIED.search(str(error)):
                raise Unavailable(
                    f"{self.url} refuses ({reason:.400}); give its credentials in the environment, with the right to read, write, list and "
                    "delete (docs/operations.md, Checkpoints in an object store)"
                ) from error
            raise StoreUnreachable(
                f"{self.url} can't be reached, or fails ({reason:.400}); look at the store, and at checkpointing.store"
            ) from error


def _reason(error: Exception) -> str:
    """Return why the store refused, without the address (it may hold a signature), and without what developers of the library need."""
    # "Error performing PUT http://… in 3.2s, after 10 retries, … - Server returned …"
    reason = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return reason.rpartition(" retry_timeout: ")[2].partition(" - ")[2] or reason


_DENIED = re.compile(
    r"(code: 40[13]|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|Unauthorized|credential)", re.IGNORECASE
)
_DIGEST = "sha256"
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AZURE_ENDPOINT", "GOOGLE_BASE_URL")


class _Reader:
    """A file that is sent, for `obstore.put`. What is sent must be what the manifest says: the end of another content is an error, and
    nothing is stored."""

    def __init__(self, file: Any, expected: StoredFile, progress: Progress) -> None:
        self._file, self._expected, self._progress = file, expected, progress
        self._digest, self._read = hashlib.sha256(), 0
        self.has_changed = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END and offset == 0:
            return self._expected.size
        self._digest, self._read = hashlib.sha256(), 0
        return int(self._file.seek(offset, whence))

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        self._digest.update(data)
        self._read += len(data)
        if len(data) < size or self._read >= self._expected.size:
            found = StoredFile(self._read, self._digest.hexdigest())
            self.has_changed = found != self._expected
        if self.has_changed:
            raise OSError("the file has changed")
        self._progress(len(data))
        return data


def run_all(threads: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return the result of the work for each item. After the first error the rest is left out, and the error is raised."""
    futures = [threads.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
