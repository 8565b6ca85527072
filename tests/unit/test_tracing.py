"""Traces: which trace a span is in, what leaves the process, and what becomes of a run whose collector is away."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

from headrace.base.errors import ConfigError
from headrace.config.telemetry import TelemetryConfig
from headrace.net import tracing
from headrace.net.tracing import SpanContext, group_span, lease_span
from tests.support.collector import Collector, collecting
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

ON = TelemetryConfig()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        for name, value in found.variables.items():
            monkeypatch.setenv(name, value)
        yield found


def test_a_group_has_one_trace_that_every_service_knows() -> None:
    assert group_span("adder", "e0-train-1") == group_span("adder", "e0-train-1")
    assert lease_span("adder", "e0-train-1", 2, "rollout-1").trace == group_span("adder", "e0-train-1").trace
    others = [group_span("adder", "e0-train-2"), group_span("other", "e0-train-1"), tracing.step_span("adder", "e0", 1)]
    assert len({group_span("adder", "e0-train-1").trace, *(other.trace for other in others)}) == 4


def test_a_traceparent_is_read_as_w3c_writes_it() -> None:
    span = group_span("adder", "g")
    assert SpanContext.parse(span.traceparent) == span
    w3c = "4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"
    assert SpanContext.parse(f"00-{w3c}-01") == (0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7)
    assert SpanContext.parse(f"01-{w3c}-03-of-a-later-version") is not None
    zeros = "0" * 32
    for wrong in (
        "",
        f"00-{w3c}-00",
        f"ff-{w3c}-01",
        f"00-{zeros}-00f067aa0ba902b7-01",
        f"00-{w3c.upper()}-01",
        "x" * 99,
    ):
        assert SpanContext.parse(wrong) is None, wrong


def test_spans_arrive_with_their_parents_and_links(collector: Collector) -> None:
    root = group_span("adder", "g")
    with tracing.exporting(ON, "rollout", "adder"):
        assert tracing.current().context is None  # what begins here is the root of its trace
        with tracing.span("generate", root, attributes=tracing.named(index=3, reason=None)) as outer:
            assert tracing.current().context == outer.id
            with tracing.span("inner", links=[root]):
                assert tracing.current().id.trace == root.trace
                assert (
                    tracing.headers(groups=["g", "g", "a,b"])["baggage"]
                    == "headrace.group_id=g,headrace.group_id=a%2Cb"
                )
            outer.set(tracing.named(tokens=7))
        with pytest.raises(ValueError, match="what the policy wrote"), tracing.span("failing", root):
            raise ValueError("what the policy wrote")
    inner, generate, failing = collector.wait(3)
    assert (generate.name, generate.parent, generate.service) == ("generate", root, "headrace-rollout")
    assert generate.attributes == {"headrace.index": 3, "headrace.tokens": 7}
    assert (inner.parent, inner.links) == (generate.id, [root])
    assert failing.failed
    assert failing.attributes == {"error.type": "ValueError"}, "its text may be anybody's"


def test_without_a_collector_configured_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with tracing.exporting(ON, "rollout", "adder"):
        assert tracing.span("generate", group_span("adder", "g")) is tracing.NO_SPAN
        assert tracing.headers() == {}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with tracing.exporting(TelemetryConfig(enabled=False), "rollout", "adder"):
        assert not tracing.is_on()


def test_a_share_of_the_groups_is_traced_the_same_everywhere(collector: Collector) -> None:
    roots = [group_span("adder", str(number)) for number in range(200)]
    kept = []
    for service in ("rollout", "reward"):
        with tracing.exporting(TelemetryConfig(sampled_groups=0.25), service, "adder"):
            kept.append([root for root in roots if tracing.span("any", root) is not tracing.NO_SPAN])
    assert kept[0] == kept[1]
    assert 20 < len(kept[0]) < 80


def test_a_collector_that_is_away_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://name:secret@127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with caplog.at_level(logging.INFO), tracing.exporting(ON, "rollout", "adder"):
        for number in range(100):
            with tracing.span("generate", group_span("adder", str(number))):
                pass
            if number == 50:
                wait_until(lambda: "127.0.0.1" in caplog.text)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "127.0.0.1" in text]) == 1
    assert len([text for text in said if "Queue full" in text]) == 1
    assert len(said) == 2
    assert "secret" not in caplog.text


def test_traces_without_opentelemetry_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"headrace\[tracing\]"),
        tracing.exporting(TelemetryConfig(enabled=True), "rollout", "adder"),
    ):
        pass
    for name in ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        monkeypatch.setenv(name, "http/json")
        with (
            pytest.raises(ConfigError, match=rf"{name} .*http/json"),
            tracing.exporting(TelemetryConfig(enabled=True), "rollout", "adder"),
        ):
            pass
