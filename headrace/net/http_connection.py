"""A connection of an HTTP server, as uvicorn's but for what a caller may make it wait for and keep before anything is known of that caller.

httptools parses whatever comes, at once, and keeps all of it that is no body; nothing in uvicorn bounds how long a caller may take.
h11, its other parser, bounds heads, but takes twice as long for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
BODY_S = 60.0
READING_S = 60.0
IDLE_S = 5  # between two requests


class Connection(HttpToolsProtocol):
    """Refuses a request of which more than `MOST_HEAD_BYTES` come in a row that are no body: a head, or sizes of chunks, or trailers. Does
    not parse a request that comes before the answer to the one before: that answer is the connection's last.

    Ends when its caller takes longer than it may: `HEAD_S` for the head of a request, from the connection or from the answer before (the
    handshake of TLS is part of it), `BODY_S` for a body, `READING_S` to read what no longer fits into the socket's buffer.

    A service has at most `most_waiting` connections that wait for their callers. A further one ends the one whose turn to be known is
    the longest ago, a head before a body: so who only opens connections ends his own.
    """

    def __init__(self, *, context: ssl.SSLContext | None, most_waiting: int, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._context = context
        self._most_waiting = most_waiting
        self._handshake: asyncio.Task[None] | None = None
        self._early = b""
        self._no_body = 0  # bytes in a row
        self._in_body = False
        self._refused = False
        self._longest: float | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.connections.add(self)
        self._wait(HEAD_S)
        self._make_room()
        if self._context is None:
            super().connection_made(transport)
        else:
            transport.pause_reading()  # what comes is for the handshake
            self._handshake = self.loop.create_task(self._encrypt(transport, self._context))

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.flow is None:  # it came with the end of the handshake
            self._early += data
            return
        rest = memoryview(data)
        while rest and not self._refused:
            part = rest[: MOST_HEAD_BYTES - self._no_body]
            rest = rest[len(part) :]
            self._no_body += len(part)
            super().data_received(part)  # type: ignore[arg-type]  # httptools takes either
            if self._no_body == MOST_HEAD_BYTES:
                self.send_400_response(f"More than {MOST_HEAD_BYTES} bytes of a request are no body.")
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self._refused:
            return
        self._refused = True
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
        elif not self.cycle.more_body:  # it is what came next that is refused
            self.cycle.keep_alive = False
        elif self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            raise httptools.HttpParserError("a request before the answer")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        # httptools takes the body of such a request for the other protocol
        if self.parser.should_upgrade() and any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        ):
            self.send_400_response("A request with Upgrade can't have a body here; send it without Upgrade.")
            raise httptools.HttpParserError("a body after Upgrade")
        super().on_headers_complete()
        self.headers = []  # trailers are no part of what the application has
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._no_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._no_body = 0
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    async def _encrypt(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        encrypted = None
        # no time of its own: HEAD_S ends it
        with contextlib.suppress(OSError):  # no TLS, or gone: nothing of it reaches the application
            encrypted = await self.loop.start_tls(
                transport, self, context, server_side=True, ssl_handshake_timeout=2 * HEAD_S
            )
        if encrypted is None or self not in self.connections:
            self._wait(None)
            self.connections.discard(self)
            return
        super().connection_made(encrypted)
        if self._early:
            self.data_received(self._early)

    def _watch(self) -> None:
        if self not in self.connections:  # lost
            return
        if self.flow.write_paused or self.transport.is_closing():
            self._wait(READING_S)
        elif self._in_body:
            self._wait(BODY_S)
        elif self.cycle is None or self.cycle.response_complete:
            self._wait(HEAD_S)
        else:
            self._wait(None)

    def _wait(self, longest: float | None) -> None:
        """Expect something of the caller within `longest` seconds, from when that began; None expects nothing."""
        if longest == self._longest:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._longest, self._since = longest, self.loop.time()
        self._timer = None if longest is None else self.loop.call_later(longest, self._end)

    def _end(self) -> None:
        self.connections.discard(self)
        self.transport.abort()

    def _make_room(self) -> None:
        if len(self.connections) <= self._most_waiting:
            return
        waiting = [each for each in self.connections if isinstance(each, Connection) and each._longest is not None]
        if len(waiting) > self._most_waiting:
            min(waiting, key=lambda each: (each._longest != HEAD_S, each._since))._end()
