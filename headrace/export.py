"""Converts trajectories to JSON lines and back: one object per line, with its group, its score and its lineage.

`group`, `trajectory` and `score` have the fields of the records of `headrace.trajectory` (`score` is null before there is one), with arrays
as lists; the round trip is exact. `state` is the group's. `lineage` is a `headrace.lineage.Origin`, for readers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.errors import CodecError
from headrace.lineage import Origin, origin_of, with_timelines
from headrace.replay import ReplayClient
from headrace.trajectory import ARRAYS, Group, Score, Trajectory


@dataclasses.dataclass(frozen=True)
class Exported:
    state: str
    group: Group
    trajectory: Trajectory
    score: Score | None


def to_line(exported: Exported, origin: Origin) -> str:
    """The JSON line, without the newline. Raises `CodecError` for a value of an environment that JSON can't carry (bytes)."""
    line = {
        "state": exported.state,
        "group": _plain(exported.group),
        "trajectory": _plain(exported.trajectory),
        "score": None if exported.score is None else _plain(exported.score),
        "lineage": dataclasses.asdict(origin),
    }
    try:
        return json.dumps(line)
    except TypeError as error:
        trajectory = exported.trajectory
        raise CodecError(
            f"trajectory {trajectory.index} of group {trajectory.group_id!r} can't be written as JSON ({error})"
        ) from error


def from_line(text: str) -> Exported:
    """The trajectory in a line of `to_line`. Raises `CodecError` for anything else."""
    try:
        line: dict[str, Any] = json.loads(text)
        score = line["score"]
        return Exported(
            state=line["state"],
            group=Group.decode(_packed(line["group"])),
            trajectory=Trajectory.decode(_packed(line["trajectory"])),
            score=None if score is None else Score.decode(_packed(score)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CodecError(f"not an exported trajectory ({error!r})") from error


async def lines(replay: ReplayClient, states: Collection[str]) -> AsyncIterator[str]:
    """Yield a line for each trajectory of a group in one of `states` that the buffer holds."""
    run = await replay.state()
    async for group_id, _ in replay.groups(states):
        held = await replay.held(group_id)
        if held is None:  # it has ended since
            continue
        for trajectory, score in held.trajectories:
            origin = with_timelines(origin_of(trajectory, score), run.timeline_of)
            yield to_line(Exported(held.state, held.group, trajectory, score), origin)


def read(path: Path) -> Iterator[Exported]:
    """Yield the trajectories of a file of JSON lines. Raises `CodecError` naming the first invalid line."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                yield from_line(text)
            except CodecError as error:
                raise CodecError(f"{path}:{number}: {error}") from error


def _plain(record: Group | Trajectory | Score) -> Any:
    """The record's fields in JSON types, except for bytes in an environment's values."""
    return msgspec.to_builtins(record, builtin_types=(bytes,), enc_hook=np.ndarray.tolist)


def _packed(fields: dict[str, Any]) -> bytes:
    arrays = {name: np.asarray(fields[name], ARRAYS[name]).tobytes() for name in ARRAYS.keys() & fields.keys()}
    return msgspec.msgpack.encode({**fields, **arrays})
