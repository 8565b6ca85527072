"""Trajectories as JSON lines and back: one object a line, with its group, its score and its lineage.

`group`, `trajectory` and `score` hold the fields of the records of `headrace.trajectory` (`score` null before there is one), arrays as
lists; what is read is, to the last bit, what was written. `state` is the group's. `lineage` is `headrace.lineage.Origin`, for people.
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
    """Without the newline. Raises `CodecError` for what an environment said that JSON can't carry (bytes)."""
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
    """Raises `CodecError` for anything but a line of `to_line`."""
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
    """A line for each trajectory that the buffer holds of groups in one of `states`."""
    run = await replay.state()
    async for group_id, _ in replay.groups(states):
        held = await replay.held(group_id)
        if held is None:  # it has ended since
            continue
        for trajectory, score in held.trajectories:
            origin = with_timelines(origin_of(trajectory, score), run.timeline_of)
            yield to_line(Exported(held.state, held.group, trajectory, score), origin)


def read(path: Path) -> Iterator[Exported]:
    """The trajectories of a file of JSON lines. Raises `CodecError` naming the first line that is none."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                yield from_line(text)
            except CodecError as error:
                raise CodecError(f"{path}:{number}: {error}") from error


def _plain(record: Group | Trajectory | Score) -> Any:
    """The record's fields in JSON types, but for bytes that an environment said."""
    return msgspec.to_builtins(record, builtin_types=(bytes,), enc_hook=np.ndarray.tolist)


def _packed(fields: dict[str, Any]) -> bytes:
    arrays = {name: np.asarray(fields[name], ARRAYS[name]).tobytes() for name in ARRAYS.keys() & fields.keys()}
    return msgspec.msgpack.encode({**fields, **arrays})
