"""Replies of the buffer's functions as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import msgspec

from headrace.errors import CodecError
from headrace.replay.records import Epoch, Reservation, ReservedTrajectory, RunState, ScoringJob
from headrace.trajectory import Group, Trajectory


class Taken(msgspec.Struct, frozen=True):
    """An entry of `take_scoring`'s reply."""

    group: str
    index: int
    payload: bytes
    record: bytes
    token: str
    attempt: int

    def job(self, group: Group, payload: bytes) -> ScoringJob:
        trajectory = Trajectory.decode(payload)
        if (trajectory.group_id, trajectory.index) != (self.group, self.index):
            raise CodecError(
                f"the payload of trajectory {self.index} of group {self.group!r} says it is "
                f"{trajectory.index} of {trajectory.group_id!r}"
            )
        return ScoringJob(group, trajectory, self.token, self.attempt)


def score_key(payload_key: str) -> str:
    prefix, _, nonce = payload_key.rpartition(":p:")
    return f"{prefix}:s:{nonce}"


def reservation(reply: list[Any]) -> Reservation:
    _, step, prefix, ids, fields, scored, filtered = reply
    groups = tuple(group_id.decode() for group_id in ids)
    trajectories = tuple(
        reserved(group_id, index, prefix.decode(), pushed, reward)
        for group_id, values in zip(groups, fields, strict=True)
        for index, pushed, reward in zip(*[iter(values)] * 3, strict=True)
    )
    return Reservation(step, groups, trajectories, scored, filtered)


def reserved(group_id: str, index: int, prefix: str, pushed: bytes, reward: bytes) -> ReservedTrajectory:
    nonce, length, oldest, newest, _ = pushed.decode().split(" ")
    return ReservedTrajectory(group_id, index, prefix + nonce, float(reward), int(length), int(oldest), int(newest))


def described(index: int, key: str, pushed: bytes, reward: bytes) -> dict[str, Any]:
    _, length, oldest, newest, latency_ms = pushed.decode().split(" ")
    return {
        "index": index,
        "key": key,
        "length": int(length),
        "oldest_version": int(oldest),
        "newest_version": int(newest),
        "latency_s": int(latency_ms) / 1000,
        "reward": float(reward) if reward else None,
    }


def epoch_of(reply: list[Any]) -> Epoch:
    epoch_id, version, timeline, state, rendezvous, flat = reply
    did = {member.decode(): what.decode() for member, what in zip(*[iter(flat)] * 2, strict=True)}
    announced = state == b"announced"
    return Epoch(
        id=epoch_id.decode(),
        version=version,
        timeline=timeline.decode(),
        state=state.decode(),
        members=tuple(sorted(m for m, what in did.items() if announced or what not in ("asked", "left out"))),
        acknowledged=tuple(sorted(m for m, what in did.items() if what in ("acknowledged", "verified"))),
        verified=tuple(sorted(m for m, what in did.items() if what == "verified")),
        refused={m: what.removeprefix("refused ") for m, what in did.items() if what.startswith("refused ")},
        rendezvous=unpack(rendezvous),
    )


def run_state(run_id: str, fields: Mapping[str, Any]) -> RunState:
    timelines = (entry.rsplit(" ", 1) for entry in fields["timelines"] or ())
    return RunState(
        run_id=run_id,
        **{
            **fields,
            "counts": of_lane(fields["counts"] or {}, "train"),
            "timelines": tuple((timeline, int(start)) for timeline, start in timelines),
        },
    )


def of_lane(counts: Mapping[str, int], lane: str) -> dict[str, int]:
    prefix = f"{lane}:"
    return {name.removeprefix(prefix): count for name, count in counts.items() if name.startswith(prefix)}


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)
