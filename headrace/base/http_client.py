"""HTTP requests over kept connections: POST with a limit on the size of answers, and the sessions that requests go through."""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import aiohttp

# A service closes a connection after five silent seconds.
_IDLE_S = 3.0


class AnswerTooLarge(Exception):
    """Raised for an answer with more bytes than the client accepts."""


class NotReached(ConnectionError):
    """Raised if no connection could be made, so that the server has not received the request."""


class HttpAnswer(NamedTuple):
    """A complete answer. The names of its headers are in lower case."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def open_session(
    verify: ssl.SSLContext | None,
    *,
    connect_s: float | None = None,
    total_s: float | None = None,
    connections: int = 0,
    proxy: str | None = None,
    server_hostname: str | None = None,
) -> aiohttp.ClientSession:
    """Open a session that keeps no cookies and decompresses nothing. `verify` checks certificates, against `server_hostname`, if given, in
    the place of the address's host. The session has at most `connections` (0: any number), and waits `connect_s` for one and
    `total_s` for the end of an answer, from the request on (None: forever)."""
    import aiohttp  # takes a quarter of a second, which the start of an environment should not wait for

    async def expect(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.server_hostname = server_hostname
        return await send(request)

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=_IDLE_S, ssl=verify or True),
        timeout=aiohttp.ClientTimeout(total=total_s, connect=connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept-encoding": "identity"},
        auto_decompress=False,
        proxy=proxy,
        middlewares=() if server_hostname is None else (expect,),
    )


class HttpClient:
    """A client for one address. Answers are limited to `most` bytes. The other arguments are those of `open_session`. A caller that stops
    waiting (cancellation) closes its connection."""

    def __init__(
        self,
        url: str,
        verify: ssl.SSLContext | None,
        *,
        most: int,
        connect_s: float | None = None,
        total_s: float | None = None,
        connections: int = 0,
        proxy: str | None = None,
        server_hostname: str | None = None,
    ) -> None:
        self._url, self._most = url.rstrip("/"), most
        self._open = functools.partial(
            open_session,
            verify,
            connect_s=connect_s,
            total_s=total_s,
            connections=connections,
            proxy=proxy,
            server_hostname=server_hostname,
        )
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        """Send `body`, which is JSON, and return the answer's status and body. Raises what `send` raises."""
        answer = await self.send(path, headers, body)
        return answer.status, answer.body

    async def send(self, path: str, headers: Mapping[str, str], body: bytes) -> HttpAnswer:
        """Send `body`, which is JSON, and return the answer. Raises `AnswerTooLarge`, `NotReached`, `TimeoutError` if the answer is late,
        and another `OSError` if no complete answer arrives."""
        import aiohttp

        if self._session is None:
            self._session = self._open()
        answer = bytearray()
        sent = {"content-type": "application/json", **headers}
        try:
            async with self._session.post(
                f"{self._url}{path}", data=body, headers=sent, allow_redirects=False
            ) as response:
                self._check(response.content_length or 0)
                async for part in response.content.iter_any():
                    answer += part
                    self._check(len(answer))
                told = {name.lower(): value for name, value in response.headers.items()}
                return HttpAnswer(response.status, bytes(answer), told)
        except aiohttp.ClientHttpProxyError as error:  # its text has the proxy's password
            raise NotReached(f"the proxy answered {error.status} {error.message}") from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotReached(str(error) or type(error).__name__) from error
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _check(self, size: int) -> None:
        if size > self._most:
            raise AnswerTooLarge(f"it has more than {self._most} bytes")
