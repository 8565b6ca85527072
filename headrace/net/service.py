"""Shared by all service processes: exit codes, health pages, ports, signals, and ending with the parent process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.base.errors import HeadraceError, ServiceError, is_outage
from headrace.base.parent import RESERVED, admit
from headrace.base.tls import CertificateFiles, Reloading

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from prometheus_client.registry import Collector

    from headrace.net.http_access import HttpAccess

Ready = Callable[[], Awaitable[str | None]]
WaitsFor = Callable[[], Awaitable[list[str]]]

# Exit codes of a service. The user must fix something: restarting the service won't help.
EXIT_USER_ERROR = 1
# `StoppedByAlarm`.
EXIT_ALARM = 3
# An unexpected exception, or `Restartable`: a new process may continue where this one ended.
EXIT_INTERNAL_ERROR = os.EX_SOFTWARE
# The buffer can't be reached; it may come back.
EXIT_BUFFER_UNAVAILABLE = os.EX_TEMPFAIL
# 128 + SIGTERM: the service was stopped before its work was done.
EXIT_STOPPED = 143
# How long a trainer that is being stopped may take for its step and a checkpoint.
SAVE_DEADLINE_S = 600.0
# The variable that names the file for a service's `Ending`. It doesn't begin with HEADRACE_, which would make it a configuration key.
ENDING = "_HEADRACE_ENDING"


class Ending(msgspec.Struct, frozen=True):
    """The exception that ended a process of a service. `place` is the innermost line of Headrace's own code, `module:line`; it is empty for
    an error that was raised on purpose, whose message says everything. `is_outage`: what failed is around the service."""

    error: str
    place: str
    message: str
    is_outage: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Ending:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        message = " ".join(str(error).split())
        if isinstance(error, HeadraceError):
            return cls(type(error).__name__, "", message, is_outage(error))
        frames = [
            (frame.f_globals.get("__name__", "?"), line) for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        own = [each for each in frames if each[0].partition(".")[0] in ("headrace", "headrace_services")]
        module, line = (own or frames)[-1]
        return cls(type(error).__name__, f"{module}:{line}", message, is_outage(error))

    def __str__(self) -> str:
        return f"{self.error} at {self.place}: {self.message}" if self.place else self.message

    def repeats(self, before: Ending | None) -> bool:
        """Whether it is the same exception at the same place as the one before. Messages may differ: they name steps and files."""
        return before is not None and self.place != "" and (self.error, self.place) == (before.error, before.place)


@contextlib.contextmanager
def ending_recorded() -> Iterator[None]:
    """Record an exception that leaves the context in the file that the supervisor named. Of several ranks, the first to fail writes it. The
    service's own children don't inherit the name."""
    path = os.environ.pop(ENDING, None)
    try:
        yield
    except Exception as error:
        if path is not None:
            with contextlib.suppress(OSError), Path(path).open("xb") as file:  # the exception itself matters more
                file.write(msgspec.json.encode(Ending.of(error)))
        raise


# The body of an error answer, as JSON schema. It is not a pydantic model, because environments import this module and need no pydantic.
_PROBLEM = {
    "title": "Problem",
    "type": "object",
    "properties": {"detail": {"type": "string"}},
    "required": ["detail"],
}


@dataclasses.dataclass
class Health:
    """The health of a service: `alive`, `stuck`, `ready` or `not ready`, with the reason, and what a ready service waits for."""

    status: str
    reason: str | None = None
    waits_for: list[str] | None = None


_PROBLEMS = {
    400: "The arguments are invalid",
    401: "No token, or an unknown one",
    403: "The token is for something else, or the request comes from another site",
    404: "Not found",
    415: "The body is not sent as JSON",
    500: "What is stored can't be read",
    503: "The service can't do this now",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may answer with these statuses, and a body with the reason."""
    content = {"application/json": {"schema": _PROBLEM}}
    sign_in: dict[str, Any] = {"text/html": {}}  # for browsers
    return {
        status: {"description": _PROBLEMS[status], "content": content | (sign_in if status == 401 else {})}
        for status in statuses
    }


async def nothing() -> list[str]:
    """Return an empty list, for a service that waits for nothing."""
    return []


def create_app(
    title: str, ready: Ready, stuck: Callable[[], str | None] = lambda: None, waits_for: WaitsFor = nothing
) -> FastAPI:
    """Return a FastAPI application with `/healthz`, `/readyz` and `/metrics`.

    `ready` returns None when the service can do its work, else why it can't (503). `stuck` returns None, or why only a new process can.
    `waits_for` names what a ready service waits for.
    """
    from fastapi import FastAPI, Response
    from fastapi.responses import JSONResponse
    from prometheus_client import REGISTRY
    from prometheus_client.exposition import choose_encoder

    # FastAPI's documentation pages would load scripts of other sites; /openapi.json has the same content
    app = FastAPI(title=title, docs_url=None, redoc_url=None)

    @app.get(
        "/healthz",
        summary="The process is alive",
        response_model=Health,
        responses={503: {"model": Health, "description": "Only a new process can do its work"}},
    )
    async def healthz() -> JSONResponse:
        reason = stuck()
        if reason is not None:
            return JSONResponse({"status": "stuck", "reason": reason}, status_code=503)
        return JSONResponse({"status": "alive"})

    # every other route is guarded (see `headrace.net.http_access`)
    app.router.responses = problems(401, 403)

    @app.get(
        "/readyz",
        summary="The service can do its work",
        response_model=Health,
        responses={503: {"model": Health, "description": "It can't, for the reason given"}},
    )
    async def readyz() -> JSONResponse:
        reason = await ready()
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)
        return JSONResponse({"status": "ready"} | ({"waits_for": found} if (found := await waits_for()) else {}))

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), headers={"content-type": content_type})

    # routes, because a mount answers `/metrics` with a redirect, and a caller that follows it loses its token
    for path in ("/metrics", "/metrics/"):
        app.add_route(path, metrics, include_in_schema=False)
    return app


@contextlib.contextmanager
def exported(metrics: Collector) -> Iterator[None]:
    """Show these on `/metrics` while the context is open."""
    from prometheus_client import REGISTRY

    REGISTRY.register(metrics)
    try:
        yield
    finally:
        REGISTRY.unregister(metrics)


async def read_body(request: Request, most: int) -> bytes | None:
    """Return the body of a request; None as soon as it has more than `most` bytes, and then the rest is not read."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > most:
        return None
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return bytes(body)


def bind(host: str, port: int, key: str) -> socket.socket:
    """Return a listening TCP socket; port 0 chooses a free one. Raises `ServiceError` naming the configuration key of a busy port."""
    with admitting(port), _socket_for(host, port, key) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    return sock


def reserve(host: str, key: str) -> socket.socket:
    """Return a socket that is bound to a free port and doesn't listen. While it is open nobody can listen there (Linux), not even with
    SO_REUSEADDR, but a process that inherits the socket (`pass_sockets`), while it is `admitting` that. Raises as `bind` does."""
    with _socket_for(host, 0, key) as sock:
        sock.bind((host, 0))
    return sock


def reserve_again(sock: socket.socket) -> None:
    """Call this after the end of a process that inherited a reservation: one that was killed may have left its port open to others."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


@contextlib.contextmanager
def _socket_for(host: str, port: int, key: str) -> Iterator[socket.socket]:
    """Yield a TCP socket. An error of the context closes it, and names the key."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it the second part of an answer waits 40 ms for the reader's delayed
    # acknowledgement of the first
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        yield sock
    except OSError as error:
        sock.close()
        raise ServiceError(
            f"{key}: can't listen on {host}:{port} ({error.strerror}); free the port or set {key} to another"
        ) from error


def pass_sockets(reserved: Iterable[socket.socket]) -> dict[str, str]:
    """Return the variables for a process that inherits the sockets which reserve its ports."""
    return {RESERVED: " ".join(str(sock.fileno()) for sock in reserved)}


@contextlib.contextmanager
def admitting(port: int) -> Iterator[None]:
    """Let another socket listen on `port` while the context is open, if it is reserved for this process."""
    admit(True, port)
    try:
        yield
    finally:
        admit(False, port)


def most_connections() -> int:
    """Return how many connections a port keeps for callers of whom it knows nothing. Most of the files that this process may open remain
    for its work."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1000 if files == resource.RLIM_INFINITY else min(1000, files // 4)


@contextlib.asynccontextmanager
async def serve_http(app: FastAPI, sock: socket.socket, access: HttpAccess) -> AsyncIterator[None]:
    """Serve `app` on `sock` while the context is open, to callers that `access` admits. Raises `ConfigError` for a certificate that can't
    be used."""
    from headrace.net.http_access import Guard

    async with serve_openly(Guard(app, access), sock, access.certificate):
        yield


@contextlib.asynccontextmanager
async def serve_openly(
    app: Any, sock: socket.socket, certificate: CertificateFiles | None = None
) -> AsyncIterator[None]:
    """Serve an ASGI application that controls access itself. Raises as `serve_http` does."""
    import uvicorn

    from headrace.net.http_connection import IDLE_S, Connection

    context = Reloading(certificate).context() if certificate is not None else None
    config = uvicorn.Config(
        app,
        http=partial(Connection, context=context, most_waiting=most_connections()),  # type: ignore[arg-type]  # it is only called
        timeout_keep_alive=IDLE_S,
        ws="none",
        backlog=512,
        lifespan="on",
        timeout_graceful_shutdown=2,
        log_config=None,  # its records go through the service's own handlers
        log_level="error",  # the lower ones are of requests that anyone can send
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]  # the service handles signals
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield
    finally:
        server.should_exit = True
        with _silent_about_cut_off():
            await task


@contextlib.contextmanager
def _silent_about_cut_off() -> Iterator[None]:
    """Callers that still read when a server ends, as a page that follows does, are cut off, which is no error."""

    def is_error(record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if record.exc_info else None
        return not (isinstance(raised, asyncio.CancelledError) or str(record.msg).startswith("Cancel "))

    log = logging.getLogger("uvicorn.error")
    log.addFilter(is_error)
    try:
        yield
    finally:
        log.removeFilter(is_error)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a process in order: SIGTERM, SIGINT, and SIGHUP, unless `nohup` keeps that from it."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def stop_on_signals() -> asyncio.Event:
    """Return an event that any of `stop_signals` sets. Call it from the running loop."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in stop_signals():
        loop.add_signal_handler(signum, event.set)
    return event


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during many imports, because it would search all their objects again and again, and find nothing. All
    objects that exist at the end are frozen, which excludes them from later collections too."""
    collecting = gc.isenabled()
    if collecting:
        gc.collect()  # garbage must not be frozen
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            atexit.register(gc.unfreeze)  # nanobind reports objects that are not collected at exit as leaks
            gc.enable()


def hide_from_user() -> None:
    """Deny other processes of this user this process's memory and its files in /proc, such as `environ` (Linux). Root still reads them.

    For a service that holds secrets and starts programs that are not trusted. Programs it starts afterwards are not hidden. The kernel
    writes no core dump of a hidden process.
    """
    if sys.platform == "linux":
        pr_set_dumpable = 4
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_dumpable, 0, 0, 0, 0)
