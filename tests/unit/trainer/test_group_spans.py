"""The spans of a group's states, from the buffer's history."""

from __future__ import annotations

from headrace.net.tracing import EndedSpan, group_span, lease_span, step_span
from headrace.replay.history import HistoryRow
from headrace_services.trainer.control.group_spans import GroupSpans
from tests.support.group_events import events, life

RUN = "adder"


def spans_of(rows: list[HistoryRow], groups: GroupSpans | None = None) -> list[EndedSpan]:
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
