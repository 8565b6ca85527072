"""The contents of a broadcast of weights: names, types and shapes, and their layout in flat buckets.

The layout is a pure function of the manifest, so trainer and replicas cut the stream at the same places without sending them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.base.errors import CodecError

# The prefix of the names of an adapter's tensors, as in PEFT's files; others are the model's own.
ADAPTER = "base_model.model."
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
class TensorSpec:
    """One tensor: its name in the checkpoint, its dtype by torch's name without `torch.`, and its full shape."""

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
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tensors)


class Manifest(msgspec.Struct, frozen=True):
    """Tensors in the order in which they are sent, as columns, cut into buckets of at most `bucket_bytes`."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bucket_bytes: int

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise CodecError(f"manifest: bucket_bytes is {self.bucket_bytes}; a bucket holds at least one byte")
        if not self.names:
            raise CodecError("manifest: no tensors")
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise CodecError(
                f"manifest: {len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            )
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise CodecError(f"manifest: {twice!r} is named twice")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES:
                raise CodecError(
                    f"manifest: {tensor.name!r} has type {tensor.dtype!r}, not one of {', '.join(ITEM_BYTES)}"
                )
            if any(size < 1 for size in tensor.shape):
                raise CodecError(f"manifest: {tensor.name!r} has shape {tensor.shape}; every size is at least 1")

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str, Sequence[int]]], bucket_bytes: int) -> Manifest:
        """Make a manifest from (name, dtype, shape) triples."""
        rows = [(name, dtype, tuple(shape)) for name, dtype, shape in metadata]
        names, dtypes, shapes = zip(*rows, strict=True) if rows else ((), (), ())
        return cls(names, dtypes, shapes, bucket_bytes)

    @classmethod
    def decode(cls, fields: Any) -> Manifest:
        """Decode the result of `encode`. Raises `CodecError` naming what is wrong."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise CodecError(f"manifest: {error}") from error

    def encode(self) -> dict[str, Any]:
        """Return the manifest as msgpack types."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(map(TensorSpec, self.names, self.dtypes, self.shapes))

    @property
    def nbytes(self) -> int:
        return _nbytes(self.tensors)

    def buckets(self) -> list[Bucket]:
        """Cut the tensors into buckets: in order, one dtype per bucket, between layers. Only a layer larger than `bucket_bytes` is cut too,
        and a tensor larger than that gets its own bucket.

        Order and cuts matter because a replica installs a layer as soon as it has the layer's last tensor, and until then keeps copies of
        those that came in an earlier bucket.
        """
        pieces: list[tuple[TensorSpec, ...]] = []
        for _, run in itertools.groupby(self.tensors, lambda tensor: (tensor.dtype, _layer(tensor.name))):
            layer = tuple(run)
            pieces += [layer] if _nbytes(layer) <= self.bucket_bytes else [(tensor,) for tensor in layer]
        buckets: list[Bucket] = []
        current: list[TensorSpec] = []
        size = 0
        for piece in pieces:
            dtype, nbytes = piece[0].dtype, _nbytes(piece)
            if current and (dtype != current[0].dtype or size + nbytes > self.bucket_bytes):
                buckets.append(Bucket(current[0].dtype, tuple(current)))
                current, size = [], 0
            current += piece
            size += nbytes
        buckets.append(Bucket(current[0].dtype, tuple(current)))
        return buckets


def _layer(name: str) -> str:
    """Return the layer of a tensor, by its name up to the first number; a tensor without a number is its own layer."""
    numbered = re.match(r"(?:.+?\.)?\d+(?=\.)", name)
    return numbered[0] if numbered else name


def _nbytes(tensors: Iterable[TensorSpec]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
