"""Traces in OpenTelemetry: what happened to each group from its prompt to its commit, and what each step of the trainer did.

A group has one trace. Its id follows from the run and the group, so a service that knows the group knows the trace: nothing travels through
the buffer. The same holds for the spans in which others begin (the root, the leases, the steps, the epochs of refits). To where only a
message goes, the context travels as W3C's `traceparent`: to environments and programs, and to the replicas that agents call.

Spans are sent by OpenTelemetry's batch processor, on a thread that begins with the first span (a replica's engine is forked before). Its
queue is bounded, and a collector that is away costs spans, never time of the run. Without `telemetry.enabled` a span costs microseconds.

Attributes are ids, counts, versions and states. What a model, a data set or an environment wrote is in none of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib.util
import logging
import os
import re
import secrets
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.telemetry import TelemetryConfig

log = logging.getLogger(__name__)

HEADER, BAGGAGE = "traceparent", "baggage"
_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# How long the end of a service waits for the newest spans to leave.
_CLOSE_S = 2.0
# Of the libraries that export: what they say is said here, once.
_EXPORTERS = "opentelemetry.exporter"
_PROCESSOR = "opentelemetry.sdk._shared_internal"

Value = str | bool | int | float | Sequence[str]


class SpanContext(NamedTuple):
    """Which span of which trace."""

    trace: int
    span: int

    @staticmethod
    def derive(*parts: str | int) -> SpanContext:
        """Return the root of the trace that these names stand for."""
        digest = hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogatepass")).digest()
        return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))

    def child(self, *parts: str | int) -> SpanContext:
        """Return the span that these names stand for in the same trace."""
        return SpanContext(self.trace, SpanContext.derive(self.trace, *parts).span)

    def fresh(self) -> SpanContext:
        """Return a span of the same trace that nobody else knows."""
        return SpanContext(self.trace, secrets.randbits(64) or 1)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-01"

    @staticmethod
    def parse(traceparent: str) -> SpanContext | None:
        """Return the span of a W3C `traceparent`; None if it is no valid one, or is not sampled."""
        found = _FORM.fullmatch(traceparent)
        if found is None or found[0].startswith("ff") or not int(found[3], 16) & 1:
            return None
        trace, span = int(found[1], 16), int(found[2], 16)
        return SpanContext(trace, span) if trace and span else None


def group_span(run: str, group: str) -> SpanContext:
    """Return the root of a group's trace."""
    return SpanContext.derive("headrace group", run, group)


def lease_span(run: str, group: str, attempt: int, holder: str) -> SpanContext:
    """Return the span of the lease under which `holder`, as the buffer names it, generates an attempt at a group. Another holder may go on
    with the same attempt."""
    return group_span(run, group).child("lease", attempt, holder)


def step_span(run: str, timeline: str, step: int) -> SpanContext:
    """Return the root of the trace of a trainer step, which begins with the refit to its version."""
    return SpanContext.derive("headrace step", run, timeline, step)


def epoch_span(run: str, timeline: str, step: int, epoch: str) -> SpanContext:
    """Return the span of a membership epoch, in which its members receive weights."""
    return step_span(run, timeline, step).child("epoch", epoch)


class EndedSpan(NamedTuple):
    """A span that is over. `error` is the type of what ended it, not its text."""

    name: str
    id: SpanContext
    parent: SpanContext | None
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Value]
    links: Sequence[SpanContext] = ()
    error: str | None = None


class Span:
    """A span that is under way in a `with` block, and the parent of spans that begin there. One that ends by an exception has its type."""

    def __init__(
        self,
        name: str,
        parent: SpanContext | None,
        at: SpanContext,
        links: Sequence[SpanContext],
        attributes: Mapping[str, Value],
    ) -> None:
        self.name, self.parent, self.id = name, parent, at
        self.links, self.attributes = links, dict(attributes)
        self._began = time.time_ns()

    @property
    def context(self) -> SpanContext | None:
        """What begins in it has as its parent: None while nothing is traced."""
        return self.id

    @property
    def traceparent(self) -> str:
        return self.id.traceparent

    def set(self, attributes: Mapping[str, Value]) -> None:
        self.attributes |= attributes

    def __enter__(self) -> Span:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.reset(self._token)
        ended, failed = time.time_ns(), None if kind is None else kind.__name__
        emit(EndedSpan(self.name, self.id, self.parent, self._began, ended, self.attributes, self.links, failed))


class _NoSpan(Span):
    """What a span is while nothing is traced."""

    def __init__(self) -> None:
        super().__init__("", None, SpanContext(0, 0), (), {})

    @property
    def context(self) -> SpanContext | None:
        return None

    @property
    def traceparent(self) -> str:
        return ""

    def set(self, attributes: Mapping[str, Value]) -> None:
        pass

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN = _NoSpan()
_current: contextvars.ContextVar[Span] = contextvars.ContextVar("headrace_span", default=NO_SPAN)


def span(
    name: str,
    parent: SpanContext | None = None,
    *,
    links: Sequence[SpanContext] = (),
    attributes: Mapping[str, Value] | None = None,
) -> Span:
    """Return a span for a `with` block. Its parent is `parent`, or else the current span; without either, nothing is traced."""
    if _tracer is None:
        return NO_SPAN
    parent = parent or _current.get().context
    if parent is None or not _tracer.samples(parent):
        return NO_SPAN
    return Span(name, parent, parent.fresh(), links, attributes or {})


def current() -> Span:
    """Return the span of the innermost `with` block."""
    return _current.get()


def headers(traceparent: str | None = None, groups: Iterable[str] = ()) -> dict[str, str]:
    """Return what a call carries to its receiver, over HTTP or as the metadata of gRPC: the context of the current span (or another), and
    the group ids as baggage. Empty if nothing is traced."""
    context = current().traceparent if traceparent is None else traceparent
    if not context:
        return {}
    ids = ",".join(f"headrace.group_id={urllib.parse.quote(group)}" for group in dict.fromkeys(groups))
    return {HEADER: context} | ({BAGGAGE: ids} if ids else {})


def emit(ended: EndedSpan) -> None:
    """Export a span, unless nothing is traced or its trace is left out."""
    if _tracer is not None and _tracer.samples(ended.id):
        _tracer.emit(ended)


def named(**values: Value | None) -> dict[str, Value]:
    """Return attributes of the project: `named(step=3)` is `{"headrace.step": 3}`. Those that are None are left out."""
    return {f"headrace.{name}": value for name, value in values.items() if value is not None}


def is_on() -> bool:
    return _tracer is not None


@contextlib.contextmanager
def handed_over(traceparent: str, group: str) -> Iterator[None]:
    """While the context is open, OpenTelemetry's current span is this one, and its baggage has the group: spans that a user's code begins
    continue the trace, if its process exports any."""
    if SpanContext.parse(traceparent) is None:
        yield
        return
    try:
        from opentelemetry import baggage, context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:  # then no code of the user's begins spans
        yield
        return
    found = TraceContextTextMapPropagator().extract({HEADER: traceparent})
    token = context.attach(baggage.set_baggage("headrace.group_id", group, found))
    try:
        yield
    finally:
        context.detach(token)


class _Tracer:
    """The exporter of one process. It begins with the first span."""

    def __init__(self, telemetry: TelemetryConfig, service: str, run: str, endpoint: str) -> None:
        self._endpoint = _without_password(endpoint)
        self._bound = round(telemetry.sampled_groups * 2**64)
        self._resource = {
            "service.name": f"{telemetry.service_name}-{service}",
            "service.version": version("headrace"),
            "headrace.run_id": run,
        }
        self._lock = threading.Lock()
        self._export: _Export | None = None

    def samples(self, at: SpanContext) -> bool:
        """Return whether a trace is exported: as all services decide, by its id (as OpenTelemetry's `TraceIdRatioBased` does)."""
        return at.trace & (2**64 - 1) < self._bound

    def emit(self, ended: EndedSpan) -> None:
        with self._lock:
            if self._export is None:
                self._export = _Export(self._resource, self._endpoint)
        self._export.emit(ended)

    def close(self) -> None:
        if self._export is not None:
            self._export.close()


class _Export:
    """OpenTelemetry's exporter and its thread."""

    def __init__(self, resource: Mapping[str, str], endpoint: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        logging.getLogger(_EXPORTERS).setLevel(logging.CRITICAL)
        logging.getLogger(_PROCESSOR).addFilter(_Once())
        self._trace, self._sdk = trace, sdk
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("headrace", version("headrace"))
        self._processor = BatchSpanProcessor(_said_once(_exporter(), endpoint))

    def emit(self, ended: EndedSpan) -> None:
        ok = ended.error is None
        self._processor.on_end(
            self._sdk.ReadableSpan(
                ended.name,
                context=self._context(ended.id),
                parent=None if ended.parent is None else self._context(ended.parent),
                resource=self._resource,
                attributes={**ended.attributes, **({} if ok else {"error.type": ended.error})},
                links=[self._trace.Link(self._context(link)) for link in ended.links],
                status=self._trace.Status(self._trace.StatusCode.UNSET if ok else self._trace.StatusCode.ERROR),
                start_time=ended.began_ns,
                end_time=max(ended.began_ns, ended.ended_ns),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Send what there is, for a short time. A collector that is away holds up no service's end."""
        closing = threading.Thread(target=self._processor.shutdown, name="traces-closing", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _context(self, at: SpanContext) -> Any:
        return self._trace.SpanContext(at.trace, at.span, is_remote=False, trace_flags=self._trace.TraceFlags(1))


def _protocol() -> tuple[str, str]:
    """Return the variable that decides over which protocol traces are exported, and its value."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := os.environ.get(name):
            return name, protocol
    return name, "grpc"


def _exporter() -> Any:
    if _protocol()[1] == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    return OverGrpc()


def _said_once(exporter: Any, endpoint: str) -> Any:
    """Return the exporter, which says once that its collector is away, and once that it is there again."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class SaidOnce(SpanExporter):
        lost = 0

        def export(self, spans: Sequence[Any]) -> Any:
            result = exporter.export(spans)
            if result is SpanExportResult.SUCCESS:
                if self.lost:
                    log.info("traces are exported again, without %d spans", self.lost)
                self.lost = 0
                return result
            if not self.lost:
                log.warning(
                    "traces can't be exported to %s; the run goes on without them. Check that a collector listens there "
                    "(OTEL_EXPORTER_OTLP_ENDPOINT), or set telemetry.enabled=false",
                    endpoint,
                )
            self.lost += len(spans)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return SaidOnce()


class _Once(logging.Filter):
    """Lets each message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        first = record.msg not in self._said
        self._said.add(str(record.msg))
        return first


def _without_password(endpoint: str) -> str:
    return re.sub(r"//[^/@]*@", "//", endpoint).partition("?")[0]


_tracer: _Tracer | None = None


def _check() -> None:
    protocols = {"grpc": "grpc", "http/protobuf": "http"}
    name, given = _protocol()
    if given not in protocols:
        raise ConfigError(f"{name} is {given!r:.80}; give {' or '.join(protocols)}")
    try:
        there = importlib.util.find_spec(f"opentelemetry.exporter.otlp.proto.{protocols[given]}") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise ConfigError(
            "traces are to be exported (telemetry.enabled, or OTEL_EXPORTER_OTLP_ENDPOINT is set), and OpenTelemetry is not installed; "
            "pip install 'headrace[tracing]', or set telemetry.enabled=false"
        )


@contextlib.contextmanager
def exporting(telemetry: TelemetryConfig, service: str, run: str) -> Iterator[None]:
    """Export the spans of this process while the context is open, if the configuration or its environment says so. Raises `ConfigError` if
    OpenTelemetry is not installed, or for a protocol that it doesn't speak."""
    global _tracer  # like OpenTelemetry's own: spans begin everywhere
    endpoint = telemetry.endpoint(os.environ)
    if endpoint is None:
        yield
        return
    _check()
    _tracer = _Tracer(telemetry, service, run, endpoint)
    try:
        yield
    finally:
        stop()


def stop() -> None:
    """Send what there is, and export no more. For a process that ends without unwinding."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()
