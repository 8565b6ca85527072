"""The versioned msgpack codec of the records that travel through the buffer.

A record is a msgpack map. It has `schema` first (the tag of its Struct), then the fields of its Struct in order. Records inside it are maps
of the same kind. Arrays are little-endian bytes. Unknown fields are ignored, so that an older reader accepts a newer writer's record of the
same schema. A field that has a default may be missing, so that a newer reader accepts an older writer's record. Any other missing field, a
wrong type or arrays of unequal length raise `CodecError`, so that a malformed record never gets past the port where it arrived. Nothing is
ever pickled.

So a new field needs a default, and the schema changes only if the meaning of a record does. Every record has schema 1, except an episode of
several calls or with artifacts, which has schema 2; `read_schema` tells them apart.
"""

from __future__ import annotations

import re
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, NewType, TypeVar, get_args

import msgspec

from headrace.base.deferred import np
from headrace.base.errors import CodecError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32 = npt.NDArray[np.int32]
    Float32 = npt.NDArray[np.float32]
    UInt8 = npt.NDArray[np.uint8]
else:  # names alone: the codec knows what stands behind them
    Int32, Float32, UInt8 = (NewType(name, object) for name in ("Int32", "Float32", "UInt8"))

# How the elements of an array field are encoded.
_DTYPES: dict[Any, str] = {Int32: "<i4", Float32: "<f4", UInt8: "|u1"}
_WRITTEN = frozenset(_DTYPES.values())

R = TypeVar("R", bound=msgspec.Struct)


class Codec(Generic[R]):
    """Encodes and decodes the records of one Struct.

    The fields are declared once, in the Struct. Those with an array type travel as bytes, also inside a field `tuple[Record, ...]`.
    """

    def __init__(self, record: type[R]) -> None:
        fields = msgspec.structs.fields(record)
        self._record = record
        self._schema = record.__struct_config__.tag
        self._what = re.sub(r"(?<!^)(?=[A-Z])", " ", record.__name__).lower()
        # (position in the record, name, dtype) of each array field
        self._arrays = [(i, f.name, _DTYPES[f.type]) for i, f in enumerate(fields) if f.type in _DTYPES]
        # (position in the record, name, codec) of each field of records
        self._records: list[tuple[int, str, Codec[Any]]] = [
            (i, f.name, Codec(get_args(f.type)[0])) for i, f in enumerate(fields) if _holds_records(f.type)
        ]
        types: dict[str, Any] = {f.name: bytes if f.type in _DTYPES else f.type for f in fields}
        types |= {name: GenericAlias(tuple, (codec._stored, ...)) for _, name, codec in self._records}
        stored: list[Any] = [(f.name, types[f.name], _default(f)) for f in fields]
        self._stored: Any = msgspec.defstruct(record.__name__, [("schema", Literal[self._schema]), *stored])
        self._decode = msgspec.msgpack.Decoder(self._stored).decode

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of the array fields by name, including those of the records inside."""
        own = {name: dtype for _, name, dtype in self._arrays}
        for _, _, codec in self._records:
            own |= codec.dtypes
        return own

    @property
    def records(self) -> frozenset[str]:
        """The names of the fields of records."""
        return frozenset(name for _, name, _ in self._records)

    @property
    def free(self) -> frozenset[str]:
        """The names of the fields that hold values of others (of any type), including those of the records inside."""
        own = {f.name for f in msgspec.structs.fields(self._record) if f.type not in _DTYPES and _holds_any(f.type)}
        return frozenset(own).union(*(codec.free for _, _, codec in self._records))

    def encode(self, record: R) -> bytes:
        """Encode a record. Raises `CodecError` on a value that msgpack can't carry."""
        return pack(record, f"a {self._what}")

    def decode(self, data: bytes) -> R:
        """Decode a record; its arrays are read-only. Raises `CodecError` naming the field."""
        try:
            stored = self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"{self._what}: {self._schema_problem(data) or error}") from error
        return self._load(stored)

    def _load(self, stored: Any) -> R:
        _, *values = msgspec.structs.astuple(stored)
        for place, name, dtype in self._arrays:
            try:
                values[place] = np.frombuffer(values[place], dtype)
            except ValueError as error:
                raise CodecError(
                    f"{self._what}: field {name!r} has {len(values[place])} bytes, not a multiple of {dtype[2]}"
                ) from error
        for place, _, codec in self._records:
            values[place] = tuple(map(codec._load, values[place]))
        return self._record(*values)

    def _schema_problem(self, data: bytes) -> str | None:
        """Return what is wrong with the schema of an encoded map; None if it is right or missing."""
        schema = read_schema(data)
        if schema is None or schema == self._schema:
            return None
        return f"schema {schema!r:.80}; this build reads schema {self._schema}"


def pack(value: Any, what: str) -> bytes:
    """Pack a value. Raises `CodecError`, with `what` it is, if msgpack can't carry it."""
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"{what} can't be packed: {error}") from error


class _Tagged(msgspec.Struct):
    schema: Any = None


_tagged = msgspec.msgpack.Decoder(_Tagged).decode


def read_schema(data: bytes) -> Any:
    """Return the schema of an encoded record, of whatever type it is; None if the data has none, or is not a record."""
    try:
        return _tagged(data).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field, if it has one."""
    given: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
    return msgspec.field(**given)


def _holds_records(kind: Any) -> bool:
    item = next(iter(get_args(kind)), None)
    return isinstance(item, type) and issubclass(item, msgspec.Struct)


def _holds_any(kind: Any) -> bool:
    return kind is Any or any(map(_holds_any, get_args(kind)))


def _to_array(value: Any) -> Any:
    """Return the elements of an array in order, little-endian."""
    if type(value) is not np.ndarray:
        raise TypeError(f"a {type(value).__name__}, {value!r:.80}")
    if value.dtype.str in _WRITTEN:
        return value.data if value.flags.c_contiguous else value.tobytes()
    dtype = value.dtype.newbyteorder("<")
    if dtype.str not in _WRITTEN:
        raise TypeError(f"an array of {value.dtype}; give int32, float32 or uint8")
    return value.astype(dtype).tobytes()


_encode = msgspec.msgpack.Encoder(enc_hook=_to_array).encode
