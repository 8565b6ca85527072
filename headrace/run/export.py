"""Converts trajectories to JSON lines and back: one object per line, with its group, its score and its lineage.

`group`, `trajectory` and `score` have the fields of the records of `headrace.records`, with arrays as lists, also inside an
episode's `calls`. `score` is null before there is one. The round trip is exact. `state` is the group's. `lineage` is a
`headrace.records.origin.Origin`, for readers.

Values of data sets and environments (`extra_env_info`, `messages`, `metadata`, …) may be more than JSON has. Bytes are
`{"__bytes__": BASE64}`, numbers that are not finite `{"__float__": "nan"}`, and a map whose keys are not text (or are one of these names)
`{"__map__": [[KEY, VALUE], …]}`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.deferred import np
from headrace.base.errors import CodecError
from headrace.records.origin import Origin, trace_origin, with_timelines
from headrace.records.score import FREE_OF_SCORE, Score
from headrace.records.trajectory import ARRAYS, FREE, RECORDS, AnyTrajectory, Group, decode_trajectory
from headrace.replay import ReplayClient

_BYTES, _FLOAT, _MAP = "__bytes__", "__float__", "__map__"
_TAGS = frozenset({_BYTES, _FLOAT, _MAP})
_FREE = FREE | FREE_OF_SCORE


@dataclasses.dataclass(frozen=True)
class Exported:
    state: str
    group: Group
    trajectory: AnyTrajectory
    score: Score | None


def to_line(exported: Exported, origin: Origin) -> str:
    """Return the JSON line, without the newline. Raises `CodecError` for a value of an environment that only msgpack has (an extension
    type)."""
    try:
        line = {
            "state": exported.state,
            "group": plain(exported.group),
            "trajectory": plain(exported.trajectory),
            "score": None if exported.score is None else plain(exported.score),
            "lineage": dataclasses.asdict(origin),
        }
        return json.dumps(line, allow_nan=False)
    except (TypeError, ValueError) as error:
        trajectory = exported.trajectory
        raise CodecError(
            f"trajectory {trajectory.index} of group {trajectory.group_id!r} can't be written as JSON ({error})"
        ) from error


def from_line(text: str) -> Exported:
    """Return the trajectory in a line of `to_line`. Raises `CodecError` for any other line."""
    try:
        line: dict[str, Any] = json.loads(text)
        score = line["score"]
        return Exported(
            state=line["state"],
            group=Group.decode(_pack(line["group"])),
            trajectory=decode_trajectory(_pack(line["trajectory"])),
            score=None if score is None else Score.decode(_pack(score)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CodecError(f"not an exported trajectory ({error!r})") from error


async def lines(replay: ReplayClient, states: Collection[str]) -> AsyncIterator[str]:
    """Yield a line for each trajectory in the buffer whose group is in one of `states`."""
    run = await replay.state()
    async for group_id, _ in replay.groups(states):
        held = await replay.read_held(group_id)
        if held is None:  # the group has ended since
            continue
        for trajectory, score in held.trajectories:
            origin = with_timelines(trace_origin(trajectory, score), run.find_timeline)
            yield to_line(Exported(held.state, held.group, trajectory, score), origin)


def read(path: Path) -> Iterator[Exported]:
    """Yield the trajectories of a file of JSON lines. Raises `CodecError` naming the first invalid line."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            try:
                yield from_line(text)
            except CodecError as error:
                raise CodecError(f"{path}:{number}: {error}") from error


def plain(record: Group | AnyTrajectory | Score) -> dict[str, Any]:
    """Return the record's fields in JSON types, as in a line."""
    kept = (bytes, datetime.datetime, msgspec.msgpack.Ext)  # JSON lacks these: don't convert them to text
    return _with_tags(msgspec.to_builtins(record, builtin_types=kept, enc_hook=np.ndarray.tolist))


def _with_tags(fields: dict[str, Any]) -> dict[str, Any]:
    free = {name: _tag(fields[name]) for name in _FREE & fields.keys()}
    records = {name: list(map(_with_tags, fields[name])) for name in RECORDS & fields.keys()}
    return {**fields, **free, **records}


def _pack(fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(_without_tags(fields))


def _without_tags(fields: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: np.asarray(fields[name], ARRAYS[name]).tobytes() for name in ARRAYS.keys() & fields.keys()}
    free = {name: _untag(fields[name]) for name in _FREE & fields.keys()}
    records = {name: list(map(_without_tags, fields[name])) for name in RECORDS & fields.keys()}
    return {**fields, **arrays, **free, **records}


def _tag(value: Any) -> Any:
    match value:
        case bytes():
            return {_BYTES: base64.b64encode(value).decode()}
        case float() if not math.isfinite(value):
            return {_FLOAT: str(value)}
        case list() | tuple():
            return [_tag(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value) and not _TAGS & value.keys():
            return {key: _tag(item) for key, item in value.items()}
        case dict():
            return {_MAP: [[_tag(key), _tag(item)] for key, item in value.items()]}
    return value


def _untag(value: Any) -> Any:
    match value:
        case list():
            return [_untag(item) for item in value]
        case {"__bytes__": data, **rest} if not rest:
            return base64.b64decode(data, validate=True)
        case {"__float__": number, **rest} if not rest:
            return float(number)
        case {"__map__": items, **rest} if not rest:
            keys = [_untag(key) for key, _ in items]
            return {
                tuple(key) if isinstance(key, list) else key: _untag(item)
                for key, (_, item) in zip(keys, items, strict=True)
            }
        case dict():
            return {key: _untag(item) for key, item in value.items()}
    return value
