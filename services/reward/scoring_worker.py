"""The worker process of built-in environments, one trajectory at a time: `python -m headrace_services.reward.scoring_worker`.

A process can be killed when a scorer hangs or crashes, and then costs only its own trajectory. A frame on standard input or
output is a 4-byte big-endian length and that many bytes. The first frame in holds the environments as JSON (`{name: env
section}`); the answer is an empty frame, or the reason why they can't be created. After that every frame in is a
`headrace.v1.Trajectory` and every frame out its `headrace.v1.Result`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from typing import BinaryIO

from headrace.config.data import EnvConfig
from headrace.environment import Environment, checked, failed
from headrace.service import die_with_parent
from headrace.trajectory import Score
from headrace.v1 import trajectory_pb2 as pb
from headrace.wire import sample_from_wire, score_to_wire
from headrace_services.reward.environments import make

LENGTH = struct.Struct(">I")
# A completion may ask for a number with more digits than fit in memory: only this process may fail then.
_MEMORY_LIMIT_BYTES = 4 * 1024**3


def main() -> None:
    die_with_parent(signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole terminal, and the hub stops its workers itself
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between frames
    specification = _read(requests)
    if specification is None:
        return
    try:
        environments = {
            name: make(name, EnvConfig.model_validate(env)) for name, env in json.loads(specification).items()
        }
    except ImportError as error:
        _write(replies, f"{error}; pip install 'headrace[reward]'".encode())
        return
    _write(replies, b"")
    while (request := _read(requests)) is not None:
        trajectory = pb.Trajectory.FromString(request)
        score = score_one(environments[trajectory.environment], trajectory)
        _write(replies, score_to_wire(score).SerializeToString())


def score_one(environment: Environment, trajectory: pb.Trajectory) -> Score:
    try:
        return checked(environment, environment.score(sample_from_wire(trajectory)))
    except Exception as error:  # noqa: BLE001  # whatever a scorer raised reaches the caller as FAILED
        return failed(environment, error)


def _read(stream: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the stream."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(LENGTH.pack(len(frame)) + frame)
    stream.flush()


if __name__ == "__main__":
    main()
