"""A collector of OpenTelemetry: the gRPC service to which traces are exported, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from headrace.net.tracing import SpanContext
from tests.support.waiting import wait_until


@dataclasses.dataclass(frozen=True)
class Received:
    name: str
    id: SpanContext
    parent: SpanContext | None
    service: str
    attributes: dict[str, Any]
    links: list[SpanContext]
    seconds: float
    failed: bool

    def __getitem__(self, name: str) -> Any:
        return self.attributes[f"headrace.{name}"]


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent, in order of arrival."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.port = 0

    def Export(self, request: pb.ExportTraceServiceRequest, context: object) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_read(span, service) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def wait(self, count: int) -> list[Received]:
        wait_until(lambda: len(self.spans) >= count)
        return self.spans

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that exports to this collector, at once."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector while the context is open."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _read(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        id=_id(span.trace_id, span.span_id),
        parent=_id(span.trace_id, span.parent_span_id) if span.parent_span_id else None,
        service=service,
        attributes=_values(span.attributes),
        links=[_id(link.trace_id, link.span_id) for link in span.links],
        seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _id(trace: bytes, span: bytes) -> SpanContext:
    return SpanContext(int.from_bytes(trace), int.from_bytes(span))


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found
