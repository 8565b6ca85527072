"""Damaged records: decoding gives a record or a `CodecError`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError
from headrace.records.origin import origin_of
from headrace.records.trajectory import (
    AnyTrajectory,
    Call,
    EpisodeTrajectory,
    Group,
    Sampling,
    Score,
    Span,
    Trajectory,
    decode_trajectory,
)
from headrace.replay.records import unpack
from headrace.run import export
from tests.support.mutation import Mutator, pack

GROUP = Group(
    id="e0-train-0",
    lane="train",
    order=0,
    task_name="addition",
    env_name="math",
    messages=({"role": "user", "content": "0+1"},),
    prompt_token_ids=np.arange(1, 5, dtype=np.int32),
    extra_env_info={"answer": "1", "tags": [1, 2.5, None, {"a": True}]},
    dataset_index=0,
    n=2,
    sampling=Sampling(temperature=1.0, max_new_tokens=16, stop_strings=("\n",)),
)
TRAJECTORY = Trajectory(
    group_id=GROUP.id,
    attempt=1,
    index=0,
    prompt_token_ids=GROUP.prompt_token_ids,
    completion_token_ids=np.arange(8, dtype=np.int32),
    logprobs=np.full(8, -0.5, dtype=np.float32),
    loss_mask=np.ones(8, dtype=np.uint8),
    spans=(Span(0, 0, 5), Span(1, 5, 8)),
    finish_reason="stop",
    text="é7",
    replica="b",
    turns=((0, 8),),
    timings={"generate": 0.5},
    writers=(("a", 0, 5), ("b", 5, 8)),
)
CALL = Call(
    parent=-1,
    context_token_ids=GROUP.prompt_token_ids,
    completion_token_ids=np.arange(4, dtype=np.int32),
    logprobs=np.full(4, -0.5, dtype=np.float32),
    spans=(Span(0, 0, 3), Span(1, 3, 4)),
    finish_reason="length",
    replica="a",
    messages=({"role": "user", "content": "é7", "name": None},),
    answer={"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    timings={"queue": 0.5},
)
EPISODE = EpisodeTrajectory(
    group_id=GROUP.id,
    attempt=1,
    index=0,
    calls=(
        CALL,
        msgspec.structs.replace(CALL, parent=0, trained=False),
        msgspec.structs.replace(CALL, parent=0, replica="b"),
        CALL,
    ),
    truncated=True,
    runner="r",
    timings={"episode": 1.0},
    artifacts={"board": [1, None, {"é": 0.5}], "moves": 3},
)
SCORE = Score("SCORED", 1.0, {"format": 0.5}, {"seen": [1, "a"]}, "fine", "math", "7")
RECORDS: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {
    "group": (GROUP.encode(), Group.decode),
    "trajectory": (TRAJECTORY.encode(), Trajectory.decode),
    "call": (CALL.encode(), Call.decode),
    "episode": (EPISODE.encode(), decode_trajectory),
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
            origin_of(record.flat(), SCORE)
    assert refused
    decode(good)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("trajectory", [TRAJECTORY, EPISODE], ids=["trajectory", "episode"])
def test_damaged_lines(trajectory: AnyTrajectory, messages: int, session_seed: int) -> None:
    mutator = Mutator(Random(session_seed))
    line = export.to_line(export.Exported("ready", GROUP, trajectory, SCORE), origin_of(trajectory, SCORE))
    for _ in range(10 * messages):
        text = mutator.bytes(line.encode()).decode(errors="surrogateescape")
        try:
            export.from_line(text)
        except CodecError:
            continue
    export.from_line(line)
