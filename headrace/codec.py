"""The versioned msgpack codec of the records that travel through the buffer.

A record is a msgpack map with `schema` first. Arrays are little-endian bytes. Unknown fields are ignored, so that an older
reader takes a newer writer's record of the same schema; a missing field, a wrong type or arrays of unequal length raise
`CodecError`, so that a malformed record never gets past the port it came in by. Nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from headrace.errors import CodecError

SCHEMA: Final = 1


def pack(fields: Mapping[str, Any]) -> bytes:
    """Raises `CodecError` on a value that msgpack can't carry."""
    try:
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"a record can't be packed: {error}") from error
    return packed


def to_bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    """In the order of its elements, as `dtype`."""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


def array_of(raw: bytes, kind: np.dtype[Any], name: str, what: str = "trajectory") -> Any:
    """What `to_bytes` wrote; it can't be written to. Raises `CodecError` naming the field."""
    if len(raw) % kind.itemsize:
        raise CodecError(f"{what}: field {name!r} has {len(raw)} bytes, not a multiple of {kind.itemsize}")
    return np.frombuffer(raw, dtype=kind)


T = TypeVar("T")


class Reader:
    """Typed access to a decoded map; every refusal names the record, the field and what was found there."""

    def __init__(self, data: bytes | Mapping[str, Any], what: str) -> None:
        self.what = what
        # dict first: the test for any other Mapping takes a microsecond
        if isinstance(data, dict) or (not isinstance(data, bytes) and isinstance(data, Mapping)):
            self.fields: Mapping[str, Any] = data
            return
        try:
            fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise CodecError(f"{what}: not a msgpack record ({error})") from error
        if not isinstance(fields, dict):
            raise CodecError(f"{what}: a {type(fields).__name__}, not a map")
        if type(fields.get("schema")) is not int or fields["schema"] != SCHEMA:
            raise CodecError(f"{what}: schema {fields.get('schema')!r}; this build reads schema {SCHEMA}")
        self.fields = fields

    def _refuse(self, name: str, wanted: str) -> CodecError:
        if name not in self.fields:
            return CodecError(f"{self.what}: field {name!r} is missing")
        return CodecError(f"{self.what}: field {name!r} is {self.fields[name]!r:.80}, not {wanted}")

    def get(self, name: str, kind: type[T]) -> T:
        value = self.fields.get(name)
        # bool is an int to Python, and never what a numeric field means
        if type(value) is not kind and (not isinstance(value, kind) or isinstance(value, bool)):
            raise self._refuse(name, f"a {kind.__name__}")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        return None if self.fields.get(name) is None else self.get(name, kind)

    def natural(self, name: str) -> int:
        value = self.get(name, int)
        if value < 0:
            raise self._refuse(name, "a natural number")
        return value

    def number(self, name: str) -> float:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._refuse(name, "a finite number")
        return float(value)

    def choice(self, name: str, allowed: tuple[str, ...]) -> Any:
        value = self.fields.get(name)
        if value not in allowed:
            raise self._refuse(name, f"one of {', '.join(allowed)}")
        return value

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        values = self.get(name, list)
        if not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
            raise self._refuse(name, f"a list of {kind.__name__}")
        return values

    def array(self, name: str, dtype: str) -> Any:
        return array_of(self.get(name, bytes), np.dtype(dtype), name, self.what)
