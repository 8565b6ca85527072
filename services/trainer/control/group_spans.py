"""Turns the events of groups into the spans of their traces: a root for each group that has ended, and in it one for each state that it
was in.

Spans of work (generating a trajectory, scoring it) come from the services that did it. Those of a state are known to the buffer alone, and
its history tells them, so nothing is measured twice and nothing travels. Times are those of the buffer's server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from headrace.net import tracing
from headrace.records.group_event import GroupEvent

State = Literal["queued", "generating", "scoring", "ready", "reserved"]
# The state into which an event takes a group.
_INTO: dict[str, State] = {
    "enqueued": "queued", "requeued": "queued", "passed_on": "queued", "retried": "queued", "leased": "generating",
    "scoring": "scoring", "ready": "ready", "reserved": "reserved",
}  # fmt: skip
# Of an event, what spans need.
FIELDS = (
    "id", "part", "group", "what", "replica", "attempt", "step", "version", "timeline", "cause", "tokens", "lane", "order", "n",
    "environment",
)  # fmt: skip
_ENDS = frozenset({"trained", "filtered", "failed", "evaluated", "unused"})


@dataclasses.dataclass
class _Group:
    """A group that has not ended. `facts` are attributes of its root, `of_state` of the state that it is in."""

    began_ms: int
    state: State
    since_ms: int
    facts: dict[str, tracing.Value]
    of_state: dict[str, tracing.Value] = dataclasses.field(default_factory=dict)
    lease: tuple[int, str] | None = None  # the newest: attempt and holder
    step: tuple[str, int] | None = None  # that reserved it, with the timeline
    tokens: int = 0


class GroupSpans:
    """The groups of a run that have not ended. A group that a rewind takes back after its end is a new one, with the same root."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._groups: dict[str, _Group] = {}
        self._seen: tuple[int, int, int] = (0, 0, 0)

    def note(self, row: GroupEvent) -> list[tracing.EndedSpan]:
        """Return the spans that end with this event. An event that was noted before ends none."""
        place = (*row.cursor, row.part)
        if row.group is None or place <= self._seen:
            return []
        self._seen = place
        return list(self._spans(row, row.group, place[0]))

    def _spans(self, row: GroupEvent, name: str, now_ms: int) -> Iterator[tracing.EndedSpan]:
        group = self._groups.get(name)
        if row.what == "pushed" and group is not None:
            group.tokens += row.tokens or 0
        if row.what not in _INTO and row.what not in _ENDS:
            return
        if group is not None:
            yield self._state_span(name, group, row, now_ms)
        else:  # it is new, or the first of its events was lost
            group = self._groups[name] = _Group(now_ms, "queued", now_ms, {})
        if row.what in _ENDS:
            del self._groups[name]
            yield self._root(name, group, row, now_ms)
            return
        group.state, group.since_ms = _INTO[row.what], now_ms
        if row.what == "enqueued":
            group.facts = tracing.named(lane=row.lane, order=row.order, environment=row.environment, trajectories=row.n)
        elif row.what == "leased":
            group.lease, group.tokens = (row.attempt or 0, row.replica or ""), 0
            group.of_state = tracing.named(replica_id=row.replica, attempt=row.attempt, version=row.version)
        elif row.what == "reserved":
            assert row.step is not None
            group.step = row.timeline or "", row.step
            group.of_state = tracing.named(step=row.step, timeline=row.timeline)

    def _state_span(self, name: str, group: _Group, row: GroupEvent, now_ms: int) -> tracing.EndedSpan:
        root = tracing.group_span(self._run, name)
        at, attributes = root.fresh(), group.of_state
        links: tuple[tracing.SpanContext, ...] = ()
        if group.state == "generating":
            assert group.lease is not None
            at = tracing.lease_span(self._run, name, *group.lease)
            attributes = attributes | tracing.named(tokens=group.tokens)
        elif group.state == "reserved":
            assert group.step is not None
            links = (tracing.step_span(self._run, *group.step),)
        group.of_state = {}
        attributes = tracing.named(group_id=name, until=row.what, cause=row.cause) | attributes
        error = row.what if row.what in ("failed", "requeued") else None
        return tracing.EndedSpan(group.state, at, root, _ns(group.since_ms), _ns(now_ms), attributes, links, error)

    def _root(self, name: str, group: _Group, row: GroupEvent, now_ms: int) -> tracing.EndedSpan:
        told = tracing.named(
            group_id=name,
            end=row.what,
            attempts=None if group.lease is None else group.lease[0],
            step=None if group.step is None else group.step[1],
        )
        attributes = group.facts | told
        error = row.what if row.what == "failed" else None
        at = tracing.group_span(self._run, name)
        return tracing.EndedSpan("group", at, None, _ns(group.began_ms), _ns(now_ms), attributes, (), error)


def _ns(milliseconds: int) -> int:
    return milliseconds * 1_000_000
