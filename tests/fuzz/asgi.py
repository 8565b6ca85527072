"""Requests to an ASGI application as they stand, without a client that would correct them."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import httpx


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    raw_path: bytes
    query: bytes = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes = b""

    async def answer(self, app: Any) -> httpx.Response:
        """What `app` answers, of an endless stream the beginning. What it raises is raised."""
        sent: list[dict[str, Any]] = []
        begun, body = asyncio.Event(), [self.body]

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if any(b"text/event-stream" in value for _, value in message.get("headers", ())):
                begun.set()

        await app(self._scope(), receive, send)
        content = b"".join(message.get("body", b"") for message in sent[1:])
        where = httpx.Request(self.method, "http://localhost/")
        response = httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=content, request=where)
        response.elapsed = datetime.timedelta()
        return response

    def _scope(self) -> dict[str, Any]:
        # as uvicorn decodes it
        path = unquote(self.raw_path.decode("ascii", "replace"))
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in self.headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
