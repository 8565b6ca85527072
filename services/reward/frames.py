"""Frames on a pipe between two processes: a 4-byte big-endian length, and that many bytes."""

from __future__ import annotations

import struct
from typing import IO

LENGTH = struct.Struct(">I")


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end of the stream."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()
