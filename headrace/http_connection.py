"""A connection of an HTTP server, as uvicorn's but for what a caller may make it wait for and keep before anything is known of that caller.

h11 bounds a request's head (path and headers), and parses the next request only when the one before has been answered; uvicorn's other
parser, httptools, does neither. Nothing in uvicorn bounds how long a caller may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEAD_BYTES = 64 * 1024
HEAD_S = 15.0
BODY_S = 60.0
READING_S = 60.0
IDLE_S = 5  # between two requests


class Connection(H11Protocol):
    """Ends when its caller takes longer than it may: `HEAD_S` for the head of a request, from the connection or from the answer before (the
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
        super().data_received(data)
        self._watch()

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
        elif self.conn.their_state is h11.IDLE:
            self._wait(HEAD_S)
        elif self.conn.their_state is h11.SEND_BODY:
            self._wait(BODY_S)
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
