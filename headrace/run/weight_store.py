"""Versions of a run's weights in its object store, for replicas that no broadcast reaches.

    adder/weights/1f0c/offers/12.json   version 12 of timeline 1f0c: which blocks it has, in their order; written last
    adder/weights/1f0c/blocks/9ab3…     a block, under the SHA-256 of its bytes
    adder/weights/1f0c/patches/9ab3…-…  what turns the block that the version before has in its place into it, if that is much less

A block that several versions have in common is sent and fetched once, and whoever has the version before fetches patches. Whoever fetches a
version knows the digest of its list from the buffer, so nothing in the store has to be trusted, and what isn't whole is never taken for
weights. For the same reason replicas can fetch from each other. A trainer writes only under its own timeline. What others left there it
removes once the buffer has taken its first offer, and only what was there before: one that wakes up late can't harm its successor's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from headrace.base.deferred import np
from headrace.base.errors import CodecError, ServiceError
from headrace.run.object_store import RunStore, run_all

if TYPE_CHECKING:
    from numpy.typing import NDArray

Buffer = bytes | memoryview

FOLDER = "weights"
# Bytes of a block, but for the last of each part of the weights.
BLOCK_BYTES = 4 << 20
# A patch is used if it has at most this share of the block's bytes.
_PATCH_SHARE = 0.5
_THREADS = 8


class StoredWeights(msgspec.Struct, frozen=True):
    """The list of a version: `blocks` are the digests of the weights' bytes, cut by `cut` from parts of these `sizes`, and `bases` those of
    the blocks that a patch turns into them; '' where there is none. `layout` says what is where in them
    (`headrace_services.refit.manifest`), and `checksums` are of its tensors."""

    version: int
    timeline: str
    layout: dict[str, Any]
    checksums: tuple[int, ...]
    sizes: tuple[int, ...]
    block_bytes: int
    blocks: tuple[str, ...]
    bases: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or any(size < 1 for size in self.sizes):
            raise ValueError("every part and block has at least one byte")
        if len(self.blocks) != sum(-(-size // self.block_bytes) for size in self.sizes):
            raise ValueError(f"{len(self.blocks)} blocks of {self.block_bytes} bytes are not parts of {self.sizes}")
        if len(self.bases) != len(self.blocks):
            raise ValueError(f"{len(self.bases)} bases of {len(self.blocks)} blocks")

    def iter_blocks(self) -> Iterator[Block]:
        offset = 0
        for size, digest, base in zip(cut(self.sizes, self.block_bytes), self.blocks, self.bases, strict=True):
            yield Block(offset, size, digest, base)
            offset += size

    @property
    def objects(self) -> set[str]:
        """The names of the blocks and patches."""
        blocks = list(self.iter_blocks())
        return {block.name for block in blocks} | {block.patch_name for block in blocks if block.base}


class Block(NamedTuple):
    """A block: where it is in the weights, its digest, and that of the block that its patch is for, if it has one."""

    offset: int
    size: int
    digest: str
    base: str

    @property
    def name(self) -> str:
        return f"blocks/{self.digest}"

    @property
    def patch_name(self) -> str:
        return f"patches/{self.digest}-{self.base}"


def cut(sizes: Iterable[int], block_bytes: int) -> list[int]:
    """Return the sizes of the blocks of parts of these sizes: no block reaches into two parts."""
    return [min(block_bytes, size - begin) for size in sizes for begin in range(0, size, block_bytes)]


def select_superseded(versions: Iterable[int], reach: int) -> list[int]:
    """Return the versions that no replica may begin work with, once the newest of them is trained: those more than `reach` behind it."""
    known = sorted(versions)
    return [version for version in known if version < known[-1] - reach]


def select_unused(objects: Collection[str], kept: Iterable[StoredWeights]) -> list[str]:
    """Return which of the blocks and patches none of the versions to be `kept` has."""
    return sorted(set(objects).difference(*(version.objects for version in kept)))


def make_patch(old: Buffer, new: Buffer) -> bytes | None:
    """Return what turns one block into another of the same size: of each item (of two bytes, as in bfloat16) whether it differs, a bit
    each, and then the items that do. None if that is not much less than the block."""
    before, after = _items(old), _items(new)
    changed = before != after
    if np.count_nonzero(changed) * after.itemsize > _PATCH_SHARE * after.nbytes - after.size / 8:
        return None
    return np.packbits(changed).tobytes() + after[changed].tobytes()


def apply_patch(old: Buffer, patch: bytes) -> bytes:
    """Undo `make_patch`. Raises `ValueError` for a patch of another block's size."""
    items = _items(old).copy()
    bits = -(-items.size // 8)
    changed = np.unpackbits(np.frombuffer(patch, np.uint8, bits), count=items.size).astype(bool)
    items[changed] = np.frombuffer(patch, items.dtype, offset=bits)
    return items.tobytes()


def _items(block: Buffer) -> NDArray[Any]:
    return np.frombuffer(block, np.uint8 if len(block) % 2 else np.uint16)


class PublishedWeights:
    """The versions of one timeline, as its trainer sends them to `store`. Calls must not overlap."""

    def __init__(self, store: RunStore, timeline: str, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._store = store
        self._timeline = timeline
        self._block_bytes = block_bytes
        self._versions: dict[int, StoredWeights] = {}
        self._sent: set[str] = set()  # blocks and patches that are in the store
        self._newest: tuple[StoredWeights, list[memoryview]] | None = None  # with its blocks
        self.sent_bytes = 0  # by the last `publish`

    def publish(
        self,
        version: int,
        layout: Mapping[str, Any],
        checksums: Sequence[int],
        parts: Sequence[memoryview],
        stopped: Callable[[], bool] = lambda: False,
    ) -> str:
        """Send a version, but for the blocks that are there, and then its list. Returns the list's digest. Whatever fails, no reader finds
        a part of a version, and the next call sends only what is missing. The `parts` must stay as they are until the next version is
        published. Raises `ServiceError`, also if `stopped`."""
        sizes = tuple(len(part) for part in parts)
        pieces = [
            part[begin : begin + self._block_bytes]
            for part in parts
            for begin in range(0, len(part), self._block_bytes)
        ]
        before: list[tuple[str, memoryview | None]] = [("", None)] * len(pieces)
        if self._newest is not None and self._newest[0].sizes == sizes:
            before = list(zip(self._newest[0].blocks, self._newest[1], strict=True))
        lock, claimed, self.sent_bytes = threading.Lock(), set(self._sent), 0

        def write(name: str, data: bytes | memoryview) -> None:
            with lock:
                if name in claimed:
                    return
                claimed.add(name)
            self._store.write(self._name(name), data)
            with lock:
                self._sent.add(name)
                self.sent_bytes += len(data)

        def send(index: int) -> tuple[str, str]:
            if stopped():
                raise ServiceError(f"version {version} is not sent: the trainer ends")
            piece, (base, old) = pieces[index], before[index]
            block = Block(0, len(piece), hashlib.sha256(piece).hexdigest(), base)
            write(block.name, piece)
            patch = None if old is None or base == block.digest else make_patch(old, piece)
            if patch is None:
                return block.digest, ""
            write(block.patch_name, patch)
            return block.digest, base

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks") as threads:
            found = run_all(threads, send, range(len(pieces)))
        listed = StoredWeights(
            version=version,
            timeline=self._timeline,
            layout=dict(layout),
            checksums=tuple(checksums),
            sizes=sizes,
            block_bytes=self._block_bytes,
            blocks=tuple(digest for digest, _ in found),
            bases=tuple(base for _, base in found),
        )
        data = msgspec.json.encode(listed)
        self._store.write(self._name(f"offers/{version}.json"), data)
        self._versions[version], self._newest = listed, (listed, pieces)
        return hashlib.sha256(data).hexdigest()

    def clean(self, reach: int) -> None:
        """Remove the versions that no replica may begin work with, `reach` being how far behind the newest it may be, and then the blocks
        that no other has. Raises `ServiceError`; the next call goes on."""
        for version in select_superseded(self._versions, reach):
            self._store.remove([self._name(f"offers/{version}.json")])
            del self._versions[version]
        if unused := select_unused(self._sent, self._versions.values()):
            self._sent.difference_update(unused)  # one whose removal fails is sent anew when it is needed
            self._store.remove([self._name(name) for name in unused])

    def list_others(self) -> list[str]:
        """Return the objects that other timelines of this run have in the store. Raises `ServiceError`."""
        own = f"{FOLDER}/{self._timeline}/"
        return [name for name in self._store.list_objects(FOLDER) if not name.startswith(own)]

    def _name(self, name: str) -> str:
        return f"{FOLDER}/{self._timeline}/{name}"


class StillFetching(Exception):
    """Raised for what a replica is still fetching."""


class NotBegun(Exception):
    """Raised for what a replica may fetch, once it begins with that version."""


class Peer(Protocol):
    """Another replica, which may have what is to be fetched."""

    def read(self, timeline: str, version: int, name: str) -> bytes | None:
        """Return what has this name in the version. None if it is to be had elsewhere."""

    def give_up(self, why: str) -> None:
        """Ask it for nothing more."""


class PulledWeights:
    """A file with the newest weights that were fetched from `store`, or what has come of them, and one with the patches that came. Calls
    must not overlap, but those of `serve`.

    Blocks are written into the file in place, so those of an earlier version that the next one has too are not fetched again, and neither
    is what came before an error.
    """

    def __init__(self, store: RunStore, file: Path) -> None:
        self._store = store
        self.file = file
        self._cut: tuple[tuple[int, ...], int] | None = None  # how the weights in the file are cut
        self._held: dict[int, str] = {}  # by offset the digest of each block that is in the file
        self.fetched_bytes = 0  # by the last `fetch`
        self.fetched_from = {"replicas": 0, "store": 0}  # bytes in all
        # what others may have
        self._lock = threading.Lock()
        self._begun: tuple[str, int] | None = None  # timeline and version whose list was asked for last
        self._newest: tuple[str, int] | None = None  # the same of the list that is here
        self._list = b""
        self._blocks: dict[str, Block] = {}  # of its blocks and patches
        self._is_fetching = False
        self._patches = file.with_name(f"{file.name}.patches")
        self._kept: dict[str, tuple[int, int]] = {}  # patches: where each is in that file, and its size
        self._kept_bytes = 0
        self._awaited: dict[str, threading.Event] = {}

    def read_list(self, timeline: str, version: int, digest: str, peers: Sequence[Peer] = ()) -> StoredWeights:
        """Return the list of a version whose digest the buffer knows. Raises `ServiceError` if there is none, and `CodecError` if it is
        another."""
        name = f"offers/{version}.json"
        where = f"{self._store.url}/{FOLDER}/{timeline}/{name}"

        def sound(data: bytes) -> bytes | None:
            return data if hashlib.sha256(data).hexdigest() == digest else None

        with self._lock:
            self._begun = (timeline, version)
        try:
            data = self._read(timeline, version, name, peers, sound)
        except FileNotFoundError as error:
            raise ServiceError(
                f"{where} is not there: version {version} was superseded, or another store is meant"
            ) from error
        if data is None:
            raise CodecError(f"{where} is not the list that the trainer has offered")
        try:
            listed = msgspec.json.decode(data, type=StoredWeights)
        except msgspec.ValidationError as error:
            raise CodecError(f"{where}: {error}; trainer and replica are of different builds") from error
        if (listed.timeline, listed.version) != (timeline, version):
            raise CodecError(f"{where} is of version {listed.version}, timeline {listed.timeline}")
        with self._lock:
            if self._newest != (timeline, version):
                self._newest, self._list, self._kept, self._kept_bytes = (timeline, version), data, {}, 0
                self._blocks = {
                    name: block for block in listed.iter_blocks() for name in (block.name, block.patch_name)
                }
            self._is_fetching = True
            self._wake(self._awaited)
        return listed

    def fetch(
        self, listed: StoredWeights, stopped: Callable[[], bool] = lambda: False, peers: Sequence[Peer] = ()
    ) -> None:
        """Make the file that of this version, whose list was read last: fetch the blocks that it lacks, each from the first of the `peers`
        that has it, or from the store. Raises `ServiceError` if one can't be had, also if `stopped`, `CodecError` for one with other
        bytes, and `OSError` for the file. What had come by then stays."""
        timeline, version, self.fetched_bytes = listed.timeline, listed.version, 0
        if (now := (listed.sizes, listed.block_bytes)) != self._cut:
            self._cut, self._held = now, {}
        missing = [block for block in listed.iter_blocks() if self._held.get(block.offset) != block.digest]

        def is_whole(block: Block, data: bytes) -> bool:
            return len(data) == block.size and hashlib.sha256(data).hexdigest() == block.digest

        def read_patched(block: Block) -> bytes | None:
            """The block, from the one that is in the file; None if there is no patch for that, or no sound one."""
            if not block.base or self._held.get(block.offset) != block.base:
                return None
            old = os.pread(target, block.size, block.offset)

            def patched(patch: bytes) -> bytes | None:
                with contextlib.suppress(ValueError):
                    data = apply_patch(old, patch)
                    if is_whole(block, data):
                        self._keep(block.patch_name, patch)
                        return data
                return None

            with contextlib.suppress(FileNotFoundError):
                return self._read(timeline, version, block.patch_name, peers, patched)
            return None

        def read_whole(block: Block) -> bytes:
            name = f"{self._store.url}/{FOLDER}/{timeline}/{block.name}"
            try:
                data = self._read(
                    timeline, version, block.name, peers, lambda data: data if is_whole(block, data) else None
                )
            except FileNotFoundError as error:
                raise ServiceError(
                    f"{name} is missing: version {version} was superseded meanwhile, or a rule of the bucket removes objects"
                ) from error
            if data is None:
                raise CodecError(f"{name} is not what the trainer has sent: its SHA-256 is another")
            return data

        def fetch(block: Block) -> None:
            if stopped():
                raise ServiceError(f"version {version} is not fetched: the replica ends, or there is a newer one")
            data = read_patched(block) or read_whole(block)
            with self._lock:
                self._held.pop(block.offset, None)
            if (written := os.pwrite(target, data, block.offset)) != block.size:
                raise OSError(f"{self.file}: only {written} of {block.size} bytes were written; the disk is full")
            with self._lock:
                self._held[block.offset] = block.digest
                self._wake((block.name, block.patch_name))

        target = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(target, sum(listed.sizes))
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks") as threads:
                run_all(threads, fetch, missing)
        finally:
            os.close(target)
            with self._lock:
                self._is_fetching = False
                self._wake(self._awaited)

    def _read(
        self, timeline: str, version: int, name: str, peers: Sequence[Peer], sound: Callable[[bytes], bytes | None]
    ) -> bytes | None:
        """Return what `sound` makes of the object, which is None for other bytes: a peer that has these is asked for nothing more. Raises
        `FileNotFoundError` if there is none."""
        for peer in peers:
            if (data := peer.read(timeline, version, name)) is None:
                continue
            if (made := sound(data)) is not None:
                self._count("replicas", len(data))
                return made
            peer.give_up(f"its {name} is not what the trainer has sent")
        data = self._store.read(f"{FOLDER}/{timeline}/{name}")
        self._count("store", len(data))
        return sound(data)

    def _count(self, source: str, size: int) -> None:
        with self._lock:
            self.fetched_bytes += size
            self.fetched_from[source] += size

    # -- for others

    def serve(self, timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        """Return the object of this name, for another replica that fetches the version; None if it will not be here. Raises
        `StillFetching` or `NotBegun` if it may be, but is not after `wait_s`."""
        until = time.monotonic() + wait_s
        while True:
            with self._lock:
                found = self._find((timeline, version), name)
                if isinstance(found, Exception):
                    arrival = self._awaited.setdefault(name, threading.Event())
            if isinstance(found, Exception):
                if not arrival.wait(until - time.monotonic()):
                    with self._lock:
                        self._awaited.pop(name, None)
                    raise found
                continue
            if found is None or isinstance(found, bytes):
                return found
            file, offset, size = found
            try:
                target = os.open(file, os.O_RDONLY)
                try:
                    data = os.pread(target, size, offset)
                finally:
                    os.close(target)
            except OSError:
                return None
            with self._lock:  # it may have been overwritten meanwhile
                return data if len(data) == size and self._find((timeline, version), name) == found else None

    def _find(self, wanted: tuple[str, int], name: str) -> bytes | tuple[Path, int, int] | Exception | None:
        """Return the object, or where it is, or how it stands with it."""
        block = self._blocks.get(name)
        if block is not None:
            is_here = self._held.get(block.offset) == block.digest
            if name in self._kept:
                return (self._patches, *self._kept[name])
            if is_here:
                return (self.file, block.offset, block.size) if name == block.name else None
            if name == block.patch_name and self._held.get(block.offset) != block.base:
                return None  # it fetches the block
            return StillFetching() if self._is_fetching else None
        if wanted == self._newest:
            return self._list if name.startswith("offers/") else None
        if self._newest is not None and self._newest[0] == wanted[0] and self._newest[1] > wanted[1]:
            return None
        return StillFetching() if wanted == self._begun else NotBegun()

    def _keep(self, name: str, patch: bytes) -> None:
        """Keep a patch for others, if there is room."""
        with self._lock:
            begin, self._kept_bytes = self._kept_bytes, self._kept_bytes + len(patch)
        with contextlib.suppress(OSError):
            target = os.open(self._patches, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                written = os.pwrite(target, patch, begin)
            finally:
                os.close(target)
            if written == len(patch):
                with self._lock:
                    self._kept[name] = begin, len(patch)

    def _wake(self, names: Iterable[str]) -> None:
        """Have those look again who wait for one of these; with the lock."""
        for name in list(names):
            if (arrival := self._awaited.pop(name, None)) is not None:
                arrival.set()
