"""Calls for people: metrics, events, and what the buffer holds of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgpack

from headrace.replay.calls import Calls
from headrace.replay.replies import described, score_key, unpack
from headrace.trajectory import Group, Score, Trajectory

_METRICS_KEPT = 100_000


class PeopleCalls(Calls):
    async def publish_metrics(
        self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Append a step's metrics to the run's metric stream, which live views follow."""
        entry = msgpack.packb({name: float(value) for name, value in metrics.items()})
        key = f"{self._wire.key}:metrics"
        await self._wire.command(
            "XADD", key, "MAXLEN", "~", _METRICS_KEPT, "*", "kind", kind, "step", step, "metrics", entry
        )

    async def metrics(self, after: str = "0", count: int = 1000) -> list[tuple[str, str, int, dict[str, float]]]:
        """Entries after id `after`: (id, kind, step, metrics)."""
        entries = await self._wire.command("XRANGE", f"{self._wire.key}:metrics", f"({after}", "+", "COUNT", count)
        return [
            (entry.decode(), fields[b"kind"].decode(), int(fields[b"step"]), unpack(fields[b"metrics"]))
            for entry, fields in entries
        ]

    async def events(self, after: str, block_s: float, count: int = 1000) -> list[tuple[str, dict[str, str]]]:
        """What happened after id `after`, waiting up to `block_s` seconds for the first: (id, fields with the `kind` of event)."""
        key = f"{self._wire.key}:events"
        milliseconds = max(1, round(block_s * 1000))
        reply = await self._wire.command("XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", key, after)
        return [
            (entry.decode(), {name.decode(): value.decode() for name, value in fields.items()})
            for _, entries in (reply or [])
            for entry, fields in entries
        ]

    async def newest_event(self) -> str:
        """Id of the newest event, to follow from here on."""
        newest = await self._wire.command("XREVRANGE", f"{self._wire.key}:events", "+", "-", "COUNT", 1)
        return newest[0][0].decode() if newest else "0"

    async def group(self, group_id: str) -> dict[str, Any] | None:
        """One group for people: its record, state, fields, and trajectories pushed so far; None if the buffer does not hold it."""
        reply = await self._wire.call("group", group_id)
        if reply is None:
            return None
        state, record, fields, trajectories = reply
        (data,) = await self._fetch([record])
        pairs = zip(*[iter(fields)] * 2, strict=True)
        return {
            "id": group_id,
            "state": state.decode(),
            **{name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in pairs},
            "group": None if data is None else Group.decode(data),
            "trajectories": [
                described(index, key.decode(), pushed, reward)
                for index, key, pushed, reward in zip(*[iter(trajectories)] * 4, strict=True)
            ],
        }

    async def trajectory(self, group_id: str, index: int) -> tuple[Trajectory, Score | None] | None:
        """One trajectory that the buffer holds, with its score if it has one; None if it does not hold it."""
        group = await self.group(group_id)
        found = [t for t in group["trajectories"] if t["index"] == index] if group else []
        if not found:
            return None
        payload, score = await self._fetch([found[0]["key"], score_key(found[0]["key"])])
        return None if payload is None else (Trajectory.decode(payload), Score.decode(score) if score else None)
