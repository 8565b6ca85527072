"""A process that runs built-in environments, one trajectory at a time: `python -m services.reward.worker`.

It is a process so that a scorer which hangs or crashes can be killed and costs nothing but its own trajectory. Frames on
standard input and output are a 4-byte big-endian length and that many bytes. The first in is the environments as JSON
(`{name: env section}`), answered by an empty frame, or by the reason why they can't be made. After that every frame in is
a `headrace.v1.Trajectory` and every frame out its `headrace.v1.Result`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import BinaryIO

from headrace.config.data import Env
from headrace.environment import Environment, checked, failed
from headrace.service import die_with_parent
from headrace.trajectory import Score
from headrace.v1 import trajectory_pb2 as pb
from headrace.wire import sample_from_wire, score_to_wire

LENGTH = struct.Struct(">I")
# A completion may ask for a number with more digits than there is memory: that must end this process at most.
_MOST_MEMORY_BYTES = 4 * 1024**3


def main() -> None:
    die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the hub ends its workers itself
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not land between frames
    specification = _read(requests)
    if specification is None:
        return
    try:
        environments = make_environments(json.loads(specification))
    except ImportError as error:
        _write(replies, f"{error}; pip install 'headrace[reward]'".encode())
        return
    _write(replies, b"")
    while (request := _read(requests)) is not None:
        _write(replies, _answer(environments, request).SerializeToString())


def make_environments(specification: Mapping[str, object]) -> dict[str, Environment]:
    from services.reward.environments import make

    return {name: make(name, Env.model_validate(env)) for name, env in specification.items()}


def judge(environment: Environment, trajectory: pb.Trajectory) -> Score:
    try:
        return checked(environment, environment.score(sample_from_wire(trajectory)))
    except Exception as error:  # noqa: BLE001  # whatever a scorer raised is the answer, and reaches the caller as FAILED
        return failed(environment, error)


def _answer(environments: Mapping[str, Environment], request: bytes) -> pb.Result:
    trajectory = pb.Trajectory.FromString(request)
    return score_to_wire(judge(environments[trajectory.environment], trajectory))


def _read(stream: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the stream."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


if __name__ == "__main__":
    main()
