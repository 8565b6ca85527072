"""Damaged records: decoding gives a record or a `CodecError`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from headrace.base.errors import CodecError
from headrace.records.origin import trace_origin
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Call, EpisodeTrajectory, Group, Trajectory, decode_trajectory
from headrace.replay.records import unpack
from headrace.run import export
from tests.support.mutation import Mutator, pack
from tests.support.records import CALL, EPISODE, GROUP, SCORE, TRAJECTORY

PLAYED = msgspec.structs.replace(
    EPISODE,
    calls=(
        CALL,
        msgspec.structs.replace(CALL, parent=0, trained=False),
        msgspec.structs.replace(CALL, parent=0, replica="b"),
        CALL,
    ),
    artifacts={"board": [1, None, {"é": 0.5}], "moves": 3},
)
RECORDS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "group": (GROUP.encode(), Group.decode),
    "trajectory": (TRAJECTORY.encode(), Trajectory.decode),
    "call": (CALL.encode(), Call.decode),
    "episode": (PLAYED.encode(), decode_trajectory),
    "score": (SCORE.encode(), Score.decode),
    "reply": (msgspec.msgpack.encode({"state": "open", "fields": [1, 2.0, "a", b"b"]}), unpack),
}


@pytest.mark.timeout(0)  # as long as so many records take
@pytest.mark.parametrize("kind", RECORDS)
def test_damaged_records(kind: str, messages: int, session_seed: int) -> None:
    good, decode = RECORDS[kind]
    mutator = Mutator(Random(f"{session_seed} {kind}"))
    fields = msgspec.msgpack.decode(good)
    refused = 0
    for number in range(10 * messages):
        data = pack(mutator.structure(fields)) if number % 2 else mutator.bytes(good)
        try:
            record = decode(data)
        except CodecError:
            refused += 1
            continue
        if kind != "reply":
            record.encode()
        if isinstance(record, Trajectory | EpisodeTrajectory):
            # whoever reads one asks for its rows, its text, and who wrote what
            assert sum(path.length for path in record.paths()) == record.length == record.places.size
            for row in (*record.paths(), record.flat()):
                row.check()
            trace_origin(record.flat(), SCORE)
    assert refused
    decode(good)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("trajectory", [TRAJECTORY, PLAYED], ids=["trajectory", "episode"])
def test_damaged_lines(trajectory: AnyTrajectory, messages: int, session_seed: int) -> None:
    mutator = Mutator(Random(session_seed))
    line = export.to_line(export.Exported("ready", GROUP, trajectory, SCORE), trace_origin(trajectory, SCORE))
    for _ in range(10 * messages):
        text = mutator.bytes(line.encode()).decode(errors="surrogateescape")
        try:
            export.from_line(text)
        except CodecError:
            continue
    export.from_line(line)
