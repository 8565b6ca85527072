"""POST requests over kept connections, with a limit on the size of answers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

# A service closes a connection after five silent seconds.
_IDLE_S = 3.0


class AnswerTooLarge(Exception):
    """Raised for an answer with more bytes than the client accepts."""


class HttpClient:
    """A client for one address. `verify` checks its certificate if it has one; answers are limited to `most` bytes. The client has no
    timeout for answers: a caller that stops waiting (cancellation) closes its connection."""

    def __init__(self, url: str, verify: ssl.SSLContext | None, *, most: int, connect_s: float | None = None) -> None:
        self._url, self._verify = url.rstrip("/"), verify
        self._most, self._connect_s = most, connect_s
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Return the answer's status and body. Raises `AnswerTooLarge`, and `OSError` if no complete answer arrives."""
        import aiohttp  # takes a quarter of a second, which the start of an environment should not wait for

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=self._verify or True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"content-type": "application/json", "accept-encoding": "identity"},
                auto_decompress=False,
            )
        answer = bytearray()
        try:
            async with self._session.post(
                f"{self._url}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                self._check(response.content_length or 0)
                async for part in response.content.iter_any():
                    answer += part
                    self._check(len(answer))
                return response.status, bytes(answer)
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _check(self, size: int) -> None:
        if size > self._most:
            raise AnswerTooLarge(f"it has more than {self._most} bytes")
