"""The spans of a group's states, from the buffer's history."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from headrace.config.telemetry import TelemetryConfig
from headrace.net import tracing
from headrace.net.tracing import EndedSpan, group_span, lease_span, step_span
from headrace.records.group_event import GroupEvent
from headrace.replay import BufferRetry, ReplayClient
from headrace_services.trainer.control.group_spans import GroupSpans
from headrace_services.trainer.control.history_writer import HistoryWriter
from tests.support.collector import collecting
from tests.support.group_events import events, find_sum, life

RUN = "adder"


class Buffer:
    """A buffer whose history tells this, once."""

    run_id = RUN

    def __init__(self, *entries: tuple[str, dict[str, str]]) -> None:
        self.entries = [(id_, {name.encode(): value.encode() for name, value in told.items()}) for id_, told in entries]

    async def read_history(self, most: int) -> tuple[list[tuple[str, dict[bytes, bytes]]], int]:
        return self.entries, 0

    async def clear_history(self, timeline: str, last: str) -> None:
        self.entries = []


def spans_of(rows: list[GroupEvent], groups: GroupSpans | None = None) -> list[EndedSpan]:
    groups = groups or GroupSpans(RUN)
    return [span for row in rows for span in groups.note(row)]


def milliseconds(span: EndedSpan) -> tuple[float, float]:
    return span.began_ns / 1e6, span.ended_ns / 1e6


def test_a_trained_group_is_one_trace_from_queue_to_commit() -> None:
    end = [("ready", {}), ("reserved", {"step": 4, "timeline": "t1"}), ("trained", {"step": 4, "timeline": "t1"})]
    spans = spans_of(events(*life("g", 0, *end)))
    root = group_span(RUN, "g")
    assert [span.name for span in spans] == ["queued", "generating", "scoring", "ready", "reserved", "group"]
    *states, group = spans
    assert [span.parent for span in states] == [root] * 5
    assert (group.id, group.parent, milliseconds(group)) == (root, None, (1000, 1009))
    # one follows the other, without a gap
    assert [span.ended_ns for span in states] == [*(span.began_ns for span in states[1:]), group.ended_ns]
    _, generating, _, _, reserved = states
    assert generating.id == lease_span(RUN, "g", 1, "r1"), "replicas that generate it know this span"
    assert (generating.attributes["headrace.replica_id"], generating.attributes["headrace.tokens"]) == ("r1", 9)
    assert reserved.links == (step_span(RUN, "t1", 4),)
    assert group.attributes["headrace.end"] == "trained"
    assert not any(span.error for span in spans)


def test_a_group_that_is_queued_again_has_a_span_for_each_attempt() -> None:
    lost = ("requeued", "g", {"cause": "dead", "reason": "what a replica said"})
    again = ("leased", "g", {"replica": "r2", "attempt": 2, "version": 3})
    failed = ("failed", "g", {"reason": "what an environment said"})
    spans = spans_of(events(*life("g", 0)[:2], lost, again, failed))
    assert [span.name for span in spans] == ["queued", "generating", "queued", "generating", "group"]
    leases = [lease_span(RUN, "g", 1, "r1"), lease_span(RUN, "g", 2, "r2")]
    assert [span.id for span in spans if span.name == "generating"] == leases
    assert [span.error for span in spans] == [None, "requeued", None, "failed", "failed"]
    assert spans[1].attributes["headrace.cause"] == "dead"
    assert not any("said" in str(span.attributes) for span in spans), "texts may be anybody's"


def test_what_was_noted_before_ends_nothing_again() -> None:
    groups, rows = GroupSpans(RUN), events(*life("g", 0, ("ready", {}), ("unused", {})))
    first = spans_of(rows[:5], groups)
    assert [span.name for span in first] == ["queued", "generating"]
    assert [span.name for span in spans_of(rows, groups)] == ["scoring", "ready", "group"]


def test_a_group_that_is_taken_back_goes_on_in_its_trace() -> None:
    reserved = [("reserved", {"step": 4, "timeline": "t1"}), ("trained", {"step": 4, "timeline": "t1"})]
    rows = events(*life("g", 0, *reserved, ("ready", {}), ("reserved", {"step": 4, "timeline": "t2"}), ("trained", {})))
    spans = spans_of(rows)
    assert [span.id for span in spans if span.name == "group"] == [group_span(RUN, "g")] * 2
    assert [span.links for span in spans if span.name == "reserved"] == [
        (step_span(RUN, timeline, 4),) for timeline in ("t1", "t2")
    ]


async def test_a_trainer_that_goes_on_knows_when_the_group_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Buffer(
        ("1000-0", {"w": "enqueued", "g": "g", "o": "0"}), ("1002-0", {"w": "leased", "g": "g", "r": "r1", "a": "1"})
    )
    second = Buffer(("1007-0", {"w": "failed", "g": "g", "m": "no way"}))
    with collecting() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        for buffer in (first, second):
            with tracing.exporting(TelemetryConfig(), "trainer", RUN):
                writer = HistoryWriter(tmp_path, cast(ReplayClient, buffer), BufferRetry(), "t", find_sum)
                await writer.write_all()
        spans = collector.wait(3)
    assert [(span.name, span.seconds) for span in spans] == [
        ("queued", pytest.approx(0.002)),
        ("generating", pytest.approx(0.005)),
        ("group", pytest.approx(0.007)),
    ]
