"""Frames on a pipe between two processes: a 4-byte big-endian length, and that many bytes."""

from __future__ import annotations

import struct
from typing import IO

LENGTH = struct.Struct(">I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end of the stream. Of an unbuffered stream nothing beyond the frame is read, so that `poll`
    shows whether there is another."""
    header = _read(stream, LENGTH.size)
    return _read(stream, LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _read(stream: IO[bytes], size: int) -> bytes:
    found = stream.read(size)
    while len(found) < size and (piece := stream.read(size - len(found))):
        found += piece
    return found


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()
