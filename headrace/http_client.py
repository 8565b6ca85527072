"""POST requests over kept connections, HTTP/1.1, with the standard library alone.

A runner has as many requests to replicas under way as it has episodes open: a pool that looks through all its connections for each of them
(httpx) costs it more than all else that it does. And the SDK brings no client of HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

# A service closes a connection after five silent seconds.
_IDLE_S = 3.0
_CONTINUE, _FINAL = 100, 200


class TooLarge(http.client.HTTPException):
    """An answer of more bytes than its reader takes."""


@dataclasses.dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    def usable(self, now: float) -> bool:
        return now - self.idle_since < _IDLE_S and not (self.reader.at_eof() or self.writer.is_closing())


class HttpClient:
    """To one address. `verify` judges its certificate if it has one; no answer has more than `most` bytes. How long an answer may take is
    the caller's to say: one that stops waiting (cancellation) closes its connection."""

    def __init__(self, url: str, verify: ssl.SSLContext | None, *, most: int, connect_s: float | None = None) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._path, self._netloc = parts.path.rstrip("/"), parts.netloc
        self._verify = verify if secure else None
        self._most, self._connect_s = most, connect_s
        self._idle: list[_Connection] = []  # the one used last is the last

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """The answer's status and body. Raises `OSError`, `http.client.HTTPException`."""
        lines = [
            f"POST {self._path}{path} HTTP/1.1",
            f"host: {self._netloc}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        connection = await self._connection()
        kept = False
        try:
            connection.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
            await connection.writer.drain()
            status, answer, kept = await _answer(connection.reader, self._most)
        finally:
            if not kept:
                connection.writer.close()
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        return status, answer

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().writer.close()

    async def _connection(self) -> _Connection:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(now):
                return connection
            connection.writer.close()
        async with asyncio.timeout(self._connect_s):
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=self._verify))


async def _answer(reader: asyncio.StreamReader, most: int) -> tuple[int, bytes, bool]:
    """Status and body, and whether another request may follow."""
    try:
        status = _CONTINUE
        while status < _FINAL:
            head = await reader.readuntil(b"\r\n\r\n")
            line, *lines = head[:-4].decode("latin-1").split("\r\n")
            version, status = _status(line)
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if fields.get("transfer-encoding", "").lower() == "chunked":
            body, framed = await _chunks(reader, most), True
        elif (length := fields.get("content-length")) is not None:
            if not (length.isascii() and length.isdecimal()):
                raise http.client.HTTPException(f"content-length {length!r:.80}")
            _check(int(length[:19]), most)
            body, framed = await reader.readexactly(int(length)), True
        else:
            body, framed = await _to_the_end(reader, most), False
    except asyncio.IncompleteReadError as error:
        raise http.client.IncompleteRead(error.partial[:80], error.expected) from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise http.client.HTTPException(f"no answer of HTTP/1.1: {error}") from error
    return status, body, framed and version == "HTTP/1.1" and fields.get("connection", "").lower() != "close"


def _status(line: str) -> tuple[str, int]:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdecimal()):
        raise http.client.BadStatusLine(line[:80])
    return version, int(code)


async def _chunks(reader: asyncio.StreamReader, most: int) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        _check(len(body) + size, most)
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        pass
    return bytes(body)


async def _to_the_end(reader: asyncio.StreamReader, most: int) -> bytes:
    body = bytearray()
    while part := await reader.read(1 << 16):
        body += part
        _check(len(body), most)
    return bytes(body)


def _check(size: int, most: int) -> None:
    if size > most:
        raise TooLarge(f"it has more than {most} bytes")
