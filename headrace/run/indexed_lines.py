"""Lines in a gzip file of which a reader finds one without decompressing the others.

The file is a series of gzip members, as RFC 1952 allows, so that `zcat` and every library read it as one text. A member has lines of about
`BLOCK_BYTES`, and its header says in an extra field how long the member is and which lines it has. A reader goes from header to header, as
in BGZF, the format of samtools.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO

import msgspec

BLOCK_BYTES = 1 << 18
# An extra field has at most 65,535 bytes.
_KEY_BYTES = 1 << 15
_MAGIC = b"\x1f\x8b\x08\x04"  # gzip, deflate, with an extra field
_FIELD = b"HR"
_HEADER = struct.Struct("<4sIBBH")  # magic, time, flags, system, bytes of the extra field
_EXTRA = struct.Struct("<2sHQ")  # the field's name, its bytes, bytes of the member without its header; then the keys

# Bytes of a member that are read before `shorten` is asked, and then as many again.
_PART_BYTES = 1 << 16

Key = tuple[str, int | None]
Shorten = Callable[[bytes], bytes | None]


def write_lines(file: IO[bytes], lines: Iterable[tuple[Key, bytes]]) -> None:
    """Write lines, each with the key by which it is found."""
    keys: list[Key] = []
    block = bytearray()
    key_bytes = 0
    for key, line in lines:
        keys.append(key)
        key_bytes += len(msgspec.json.encode(key)) + 1
        block += line
        if len(block) >= BLOCK_BYTES or key_bytes >= _KEY_BYTES:
            file.write(_member(keys, block))
            keys, block, key_bytes = [], bytearray(), 0
    if keys or file.tell() == 0:
        file.write(_member(keys, block))


def find_lines(file: IO[bytes], key: Key | str, shorten: Shorten | None = None) -> Iterator[bytes]:
    """Yield the lines of the members that have one with this key, or with this first part of a key. Of a member with a single line,
    `shorten` is given the beginning, more of it each time, until it returns what is yielded in place of the line; the rest is not
    decompressed. Raises `OSError`, `EOFError` or `zlib.error` for a damaged file."""
    whole = file.seek(0, os.SEEK_END)
    file.seek(0)
    while head := file.read(_HEADER.size + _EXTRA.size):
        if len(head) < _HEADER.size + _EXTRA.size:
            raise EOFError("the file ends in the header of a member")
        magic, _, _, _, extra_bytes = _HEADER.unpack_from(head)
        name, _, member_bytes = _EXTRA.unpack_from(head, _HEADER.size)
        if (magic, name) != (_MAGIC, _FIELD):
            raise OSError("a member has no index")
        listed = file.read(extra_bytes - _EXTRA.size)
        keys, begin = msgspec.json.decode(listed, type=list[Key]), file.tell()
        if begin + member_bytes > whole:
            raise EOFError("the file ends in a member")
        if any(key in (each, each[0]) for each in keys):
            short = _read_short(file, member_bytes, shorten) if shorten is not None and len(keys) == 1 else None
            if short is None:
                file.seek(begin)
                yield from gzip.decompress(head + listed + file.read(member_bytes)).splitlines(keepends=True)
            else:
                yield short
        file.seek(begin + member_bytes)


def _read_short(file: IO[bytes], member_bytes: int, shorten: Shorten) -> bytes | None:
    """Return what `shorten` makes of the line of a member, from whose header's end the file is read; None for nothing."""
    unpacker, begun, part = zlib.decompressobj(wbits=-zlib.MAX_WBITS), b"", _PART_BYTES
    while member_bytes > 0:
        begun += unpacker.decompress(file.read(min(part, member_bytes)))
        if (short := shorten(begun)) is not None:
            return short
        member_bytes, part = member_bytes - part, 2 * part
    return None


def _member(keys: list[Key], block: bytearray) -> bytes:
    packer = zlib.compressobj(level=1, wbits=-zlib.MAX_WBITS)
    body = packer.compress(block) + packer.flush() + struct.pack("<II", zlib.crc32(block), len(block) % 2**32)
    listed = msgspec.json.encode(keys)
    extra = _EXTRA.pack(_FIELD, _EXTRA.size - 4 + len(listed), len(body)) + listed
    return _HEADER.pack(_MAGIC, 0, 0, 255, len(extra)) + extra + body
