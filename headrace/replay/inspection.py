"""Calls of users and tools: statistics, metrics, events, groups and their trajectories; retries of failed groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headrace.base.repeats import alike
from headrace.records.origin import GroupLineage, trace_origin, with_timelines
from headrace.records.score import Score
from headrace.records.trajectory import AnyTrajectory, Group, decode_trajectory
from headrace.replay.base_client import BATCH, BufferClient, chunks
from headrace.replay.bias import Moment, TrajectoryMeter, read_meters
from headrace.replay.records import BatchReply, HeldGroup, Reservation, score_key, unpack

# The indices in which the buffer keeps groups, and the states in each (groups.lua).
_PLACES = {
    "queue": {"queued"},
    "line": {"queued", "open", "scoring", "ready"},
    "steps": {"ready", "reserved", "trained"},
    "failed": {"failed"},
    "unused": {"unused"},
    "lane": {"queued", "open", "scoring", "evaluated"},
}


class InspectionClient(BufferClient):
    async def stats(self) -> dict[str, Any]:
        """Return statistics of the run: RunState fields, counts by lane and state, refusals by code, bytes, ages, replicas, runners,
        scoring line, environments."""
        empty: dict[str, Any] = {"counts": {}, "refusals": {}, "requeues": {}}
        stats = empty | unpack(await self._connection.call("stats"))
        return {
            **stats,
            "counts": {"train": {}, "validation": {}} | stats["counts"],
            "replicas": [msgspec.structs.asdict(replica) for replica in await self.replicas()],
            "runners": [msgspec.structs.asdict(runner) for runner in await self.runners()],
            "environments": [msgspec.structs.asdict(environment) for environment in await self.environments()],
        }

    async def failures(self) -> list[str]:
        """Return the reasons of the newest training groups that failed, newest first; `frequent` counts them."""
        letters = unpack(await self._connection.call("stats"))["failed"]
        return [letter["reason"] for letter in letters if letter["lane"] == "train"]

    async def publish_metrics(
        self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float], timeline: str
    ) -> None:
        """Append a step's metrics to the run's metric stream, which live views follow. Publish each step once, in order."""
        entry = msgspec.msgpack.encode({name: float(value) for name, value in metrics.items()})
        await self._connection.call("publish_metrics", entry, kind=kind, step=step, timeline=timeline)

    async def metrics(self, after: str = "0", count: int = 1000) -> list[tuple[str, str, int, dict[str, float]]]:
        """Return the entries after id `after`: (id, kind, step, metrics)."""
        return _metrics(
            await self._connection.command(
                "XRANGE", f"{self._connection.key}:metrics", f"({after}", "+", "COUNT", count
            )
        )

    async def newest_metrics(self, count: int) -> list[tuple[str, str, int, dict[str, float]]]:
        """Return the newest entries in the form of `metrics`, newest first."""
        return _metrics(
            await self._connection.command("XREVRANGE", f"{self._connection.key}:metrics", "+", "-", "COUNT", count)
        )

    async def events(self, after: str, block_s: float, count: int = 1000) -> list[tuple[str, dict[str, str]]]:
        """Return the events after id `after`, waiting up to `block_s` seconds for the first: (id, fields with the `kind` of event)."""
        key = f"{self._connection.key}:events"
        milliseconds = max(1, round(block_s * 1000))
        reply = await self._connection.command("XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", key, after)
        return [
            (entry.decode(), {name.decode(): value.decode() for name, value in fields.items()})
            for _, entries in (reply or [])
            for entry, fields in entries
        ]

    async def append_event(self, kind: str, fields: Mapping[str, str]) -> None:
        """Append an event to the run's stream of events."""
        flat = [word for pair in fields.items() for word in pair]
        await self._connection.call("append_event", **self._number(), kind=kind, fields=flat)

    async def newest_event(self) -> str:
        """Return the id of the newest event, from which to follow the stream."""
        newest = await self._connection.command("XREVRANGE", f"{self._connection.key}:events", "+", "-", "COUNT", 1)
        return newest[0][0].decode() if newest else "0"

    async def group(self, group_id: str) -> dict[str, Any] | None:
        """Return a group as plain fields: its record, state, trajectories pushed so far, and calls of episodes that have not ended; None if
        the buffer does not hold it."""
        reply = await self._connection.call("group", group=group_id)
        if reply is None:
            return None
        found = unpack(reply)
        (record,) = await self._fetch([found["record"]])
        return {
            "id": group_id,
            "state": found["state"],
            **found["fields"],
            "group": None if record is None else Group.decode(record),
            "trajectories": list(map(_describe, found["trajectories"])),
            "begun": [dict(zip(("index", "calls", "bytes"), each, strict=True)) for each in found.get("begun", ())],
        }

    async def retry(self, failures: Mapping[int, int]) -> int:
        """Have failed training groups generated again; returns how many. `failures` maps their orders to how often each was retried before
        (`Ended.retries`), so that a repetition, however late, does not affect a later failure. The trainer enqueues their prompts again."""
        if self._incarnation is None:
            await self.state()
        again = 0
        for batch in chunks(sorted(failures.items()), BATCH):
            orders, retries = zip(*batch, strict=True)
            again += await self._connection.call("retry", incarnation=self._incarnation, orders=orders, retries=retries)
        return again

    async def trajectory(self, group_id: str, index: int) -> tuple[AnyTrajectory, Score | None] | None:
        """Return a trajectory in the buffer, with its score if it has one; None if the buffer does not hold it."""
        group = await self.group(group_id)
        found = [t for t in group["trajectories"] if t["index"] == index] if group else []
        if not found:
            return None
        payload, score = await self._fetch([found[0]["key"], score_key(found[0]["key"])])
        return None if payload is None else (decode_trajectory(payload), Score.decode(score) if score else None)

    async def bias(self) -> dict[Moment, TrajectoryMeter]:
        """Return the meters of the train lane's trajectories at each moment, since the run began."""
        return read_meters(dict(unpack(await self._connection.call("bias"))))

    async def groups(self, states: Collection[str]) -> AsyncIterator[tuple[str, str]]:
        """Yield id and state of every group in the buffer that is in one of `states`, in both lanes. A group that changes state meanwhile
        may be missed or yielded twice."""
        for place, kept in _PLACES.items():
            if not kept & set(states):
                continue
            seen: set[str] = set()  # scanning a Redis set may return a member twice
            cursor = 0
            while cursor >= 0:
                page = unpack(await self._connection.call("groups", place=place, cursor=cursor))
                cursor = page["cursor"]
                for group_id, state in page["groups"]:
                    if state in kept and state in states and group_id not in seen:
                        yield group_id, state
                        if place in ("unused", "lane"):
                            seen.add(group_id)

    async def read_held(self, group_id: str) -> HeldGroup | None:
        """Return a group with its trajectories in the buffer; None if the buffer does not hold the group."""
        found = await self.group(group_id)
        if found is None or found["group"] is None:
            return None
        keys = [trajectory["key"] for trajectory in found["trajectories"]]
        values = await self._fetch([*keys, *map(score_key, keys)])
        pairs = zip(values[: len(keys)], values[len(keys) :], strict=True)
        return HeldGroup(
            group=found["group"],
            state=found["state"],
            step=found.get("step"),
            reason=found.get("reason", ""),
            trajectories=tuple(
                (decode_trajectory(payload), None if score is None else Score.decode(score))
                for payload, score in pairs
                if payload is not None
            ),
        )

    async def lineage(self, group_id: str) -> GroupLineage | None:
        """Return the lineage so far of a group in the buffer; None if the buffer does not hold the group."""
        found = await self.read_held(group_id)
        return None if found is None else await self.trace_lineage(found)

    async def trace_lineage(self, found: HeldGroup) -> GroupLineage:
        run = await self.state()
        step = found.step if found.state in ("reserved", "trained") else None
        return GroupLineage(
            group=found.group.id,
            state=found.state,
            task=found.group.task_name,
            env=found.group.env_name,
            order=found.group.order,
            step=step,
            timeline=None if step is None else run.find_timeline(step + 1),
            trajectories=tuple(
                with_timelines(trace_origin(t, score), run.find_timeline) for t, score in found.trajectories
            ),
            reason=found.reason if found.state == "failed" else "",
        )

    async def read_held_batch(self, step: int) -> tuple[list[int], Reservation | None]:
        """Return the reserved steps whose batches are still held, and the batch of `step` if it is one of them."""
        reply = unpack(await self._connection.call("step", step=step))
        batch = reply.get("batch")
        return reply["held"], None if batch is None else msgspec.convert(batch, BatchReply).reservation()


def _describe(trajectory: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": trajectory["index"],
        "key": trajectory["key"],
        "length": trajectory["length"],
        "oldest_version": trajectory["oldest"],
        "newest_version": trajectory["newest"],
        "latency_s": trajectory["latency_ms"] / 1000,
        "reward": trajectory.get("reward"),
    }


def _metrics(entries: Any) -> list[tuple[str, str, int, dict[str, float]]]:
    return [
        (entry.decode(), fields[b"kind"].decode(), int(fields[b"step"]), unpack(fields[b"metrics"]))
        for entry, fields in entries
    ]


def frequent(reasons: Sequence[str]) -> list[str]:
    """Return the three most frequent reasons, each with its count. Reasons that differ only in numbers count as one, shown by the first."""
    first: dict[str, str] = {}
    times: Counter[str] = Counter()
    for reason in reasons:
        kind = alike(reason)
        first.setdefault(kind, " ".join(reason.split())[:300])
        times[kind] += 1
    return [f"{count} x {first[kind]}" for kind, count in times.most_common(3)]
