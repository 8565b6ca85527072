"""Frames between two processes: a 4-byte big-endian length, and that many bytes. And how the hub and a child process of it begin.

The first frame to a child is its specification as JSON, and the first from it is `Started` as JSON. What follows is the child's own.
"""

from __future__ import annotations

import os
import signal
import struct
from typing import IO, TypeVar

import msgspec

from headrace.base.parent import die_with_parent

from .sandbox import Level

LENGTH = struct.Struct(">I")

T = TypeVar("T")


class Started(msgspec.Struct):
    """The builds of the environments by name, and the level of the child's sandbox; or `problem`, why it can't score. `denials` list what
    the machine denied to the sandbox."""

    problem: str = ""
    level: Level = Level.NONE
    denials: list[str] = []
    builds: dict[str, str] = {}


class HubPipes:
    """A child's side of the pipes. Requests are not buffered, so that `poll` shows whether there is another."""

    def __init__(self) -> None:
        """Begin a child process, which ends with the hub. Prints, of libraries too, go to standard error, so that they don't end up between
        frames."""
        die_with_parent(signal.SIGKILL)
        # Ctrl-C reaches every process of the terminal, but the hub ends its children itself
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.requests = os.fdopen(0, "rb", buffering=0)
        self.replies = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def specification(self, kind: type[T]) -> T:
        """Return the child's specification. Ends the process if the hub is gone."""
        if (first := read_frame(self.requests)) is None:
            raise SystemExit
        return msgspec.json.decode(first, type=kind)

    def say(self, started: Started) -> None:
        write_frame(self.replies, msgspec.json.encode(started))


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
