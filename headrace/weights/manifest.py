"""The contents of a broadcast of weights: names, types and shapes, and their layout in flat buckets.

The layout is a pure function of the manifest, so trainer and replicas cut the stream at the same places without sending them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.errors import CodecError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its name in the checkpoint, its dtype as torch names it without `torch.`, and its full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Consecutive tensors of one dtype, concatenated into one flat tensor."""

    dtype: str
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Tensors in the order they are sent, cut into buckets of at most `bucket_bytes`."""

    entries: tuple[Entry, ...]
    bucket_bytes: int

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise CodecError(f"manifest: bucket_bytes is {self.bucket_bytes}; a bucket holds at least one byte")
        if not self.entries:
            raise CodecError("manifest: no tensors")
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise CodecError(f"manifest: {entry.name!r} is named twice")
            seen.add(entry.name)
            if entry.dtype not in ITEM_BYTES:
                raise CodecError(
                    f"manifest: {entry.name!r} has type {entry.dtype!r}, not one of {', '.join(ITEM_BYTES)}"
                )
            if any(size < 1 for size in entry.shape):
                raise CodecError(f"manifest: {entry.name!r} has shape {entry.shape}; every size is at least 1")

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Manifest:
        """From (name, type, shape) triples."""
        return cls(tuple(Entry(name, dtype, tuple(shape)) for name, dtype, shape in metadata), bucket_bytes)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def buckets(self) -> list[Bucket]:
        """Cut the entries into buckets: in order, one dtype a bucket; a tensor larger than `bucket_bytes` gets its own.

        The order matters because a replica installs a layer as soon as it has the layer's last tensor, and buffers the others.
        """
        plan: list[Bucket] = []
        run: list[Entry] = []
        size = 0
        for entry in self.entries:
            if run and (entry.dtype != run[0].dtype or size + entry.nbytes > self.bucket_bytes):
                plan.append(Bucket(run[0].dtype, tuple(run)))
                run, size = [], 0
            run.append(entry)
            size += entry.nbytes
        plan.append(Bucket(run[0].dtype, tuple(run)))
        return plan

    def encode(self) -> dict[str, Any]:
        """The manifest as msgpack types."""
        return {
            "names": [entry.name for entry in self.entries],
            "dtypes": [entry.dtype for entry in self.entries],
            "shapes": [list(entry.shape) for entry in self.entries],
            "bucket_bytes": self.bucket_bytes,
        }

    @classmethod
    def decode(cls, fields: Any) -> Manifest:
        """Raises `CodecError` naming what is wrong."""
        if not isinstance(fields, Mapping):
            raise CodecError(f"manifest: a {type(fields).__name__}, not a map")
        names, dtypes, shapes = _list(fields, "names", str), _list(fields, "dtypes", str), _list(fields, "shapes", list)
        bucket_bytes = fields.get("bucket_bytes")
        if not len(names) == len(dtypes) == len(shapes):
            raise CodecError(f"manifest: {len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes")
        if not all(type(size) is int for shape in shapes for size in shape) or type(bucket_bytes) is not int:
            raise CodecError("manifest: sizes in shapes and bucket_bytes are whole numbers")
        return cls.of(zip(names, dtypes, shapes, strict=True), bucket_bytes)


def _list(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CodecError(f"manifest: {key} is {values!r:.80}, not a list of {kind.__name__}")
    return values
