"""Replicas that pull their weights fetch them from each other, before they ask the store (`headrace.run.weight_store`).

The buffer names those above a replica in its tree (`parents.lua`). What comes from one is checked as if the store had sent it. So one that
is dead, slow, behind or wrong costs a little time, and then the next is asked, and at last the store.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from fastapi import Request, Response

from headrace.base.addresses import has_host, is_loopback, own_address, parse_hosts, with_port
from headrace.base.backoff import pause_after
from headrace.base.errors import HeadraceError
from headrace.base.http_client import AnswerTooLarge, HttpClient, NotReached
from headrace.base.tasks import cancel
from headrace.base.tls import client_context
from headrace.config import Config
from headrace.net.credentials import make_token_source
from headrace.net.service import read_body
from headrace.run.weight_store import NotBegun, StillFetching

T = TypeVar("T")

# The path of what a replica serves, and the role whose token a caller presents.
PATH, ROLE = "/weights/objects", "rollout"
# In a replica's info: the address at which others that pull reach it.
SERVES = "serves"
# How long one that is asked may wait for what it is still fetching, and how long it may take to send that.
WAIT_S, SEND_S = 2.0, 4.0
# For how long nothing may come from one that has not begun with this version, or is fetching it.
_PATIENCE_S: dict[int, float] = {HTTPStatus.CONFLICT: 6.0, HTTPStatus.SERVICE_UNAVAILABLE: 30.0}
# How long one is left alone that was not reached, or too slow.
FIRST_PAUSE_S, LAST_PAUSE_S = 60.0, 600.0
# How many are served at a time: the blocks of those that are next in the tree, and of some that have lost their own.
MOST_SERVED = 32
_CONNECT_S = 3.0
_MOST_BYTES = 64 << 20  # a list; blocks have less
_MOST_ASKED = 4096
_CHUNK = 256 << 10  # sent at a time: the loop has the engine's outputs to handle too

Serve = Callable[[str, int, str, float], bytes | None]


class Asked(msgspec.Struct, frozen=True):
    """A request for an object of a version."""

    timeline: str
    version: int
    name: str


def own_url(config: Config, url: str) -> str | None:
    """Return the address at which others that pull reach this replica, whose HTTP server is at `url`: that of the interface which leads to
    the buffer. None if they can't."""
    host, hosts = config.rollout.host, parse_hosts(config.redis_url)
    is_local = all(map(is_loopback, hosts))  # where the buffer is
    if is_loopback(host):
        return url if is_local else None
    if host not in ("0.0.0.0", "::") or is_local:
        return url
    parts = urlsplit(url)
    assert parts.port is not None
    try:
        return f"{parts.scheme}://{with_port(own_address(hosts[0]), parts.port)}"
    except OSError:
        return None


class Peers:
    """The replicas that this one asks, over connections whose loop is in a thread of its own: the engine's has other work."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` for credentials that can't be used."""
        self._token = make_token_source(config, ROLE)
        self._config = config
        self._is_local = all(map(is_loopback, parse_hosts(config.redis_url)))
        self._clients: dict[str, HttpClient] = {}
        # how often in a row one was no help, and until when it is not asked
        self._left_alone: dict[str, tuple[int, float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def of(self, found: Sequence[tuple[str, Mapping[str, Any]]], stopped: Callable[[], bool]) -> list[AskedPeer]:
        """Return those of the replicas, by id and info, that can be asked during one fetch."""
        peers = []
        for replica, info in found:
            url, page = str(info.get(SERVES, "")), str(info.get("url", ""))
            if has_host(url) and has_host(page) and self._may_ask(url):
                # its certificate is for the name of its pages
                peers.append(AskedPeer(replica, url, partial(self._send, url, urlsplit(page).hostname), stopped))
        urls = {peer.url for peer in peers}
        for url in [url for url in self._clients if url not in urls]:
            self._submit(self._clients.pop(url).aclose())
        return peers

    def note(self, url: str, *, reached: bool, in_time: bool) -> None:
        """Leave one alone for a while that was not reached, the longer the more often, or that was too slow."""
        if reached and in_time:
            self._left_alone.pop(url, None)
            return
        times = 1 if reached else self._left_alone.get(url, (0, 0.0))[0] + 1
        self._left_alone[url] = times, time.monotonic() + pause_after(times, FIRST_PAUSE_S, LAST_PAUSE_S)

    def close(self) -> None:
        if self._loop is not None:
            self._submit(self._end())

    def _may_ask(self, url: str) -> bool:
        """Whether it helps, and the token may be sent there."""
        parts = urlsplit(url)
        is_here = is_loopback(parts.hostname or "")
        is_safe = self._is_local if is_here else parts.scheme == "https" or self._config.security.insecure
        return is_safe and time.monotonic() >= self._left_alone.get(url, (0, 0.0))[1]

    def _send(self, url: str, name: str | None, body: bytes) -> tuple[int, bytes]:
        """Raises as `HttpClient.post` does, and `ConfigError` for credentials or authorities that can't be used."""
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token()}"}
        if (client := self._clients.get(url)) is None:
            verify = client_context(self._config.security.tls_ca) if url.startswith("https:") else None
            client = HttpClient(
                url, verify, most=_MOST_BYTES, connect_s=_CONNECT_S, total_s=WAIT_S + SEND_S, server_hostname=name
            )
            client = self._clients.setdefault(url, client)
        return self._submit(client.post(PATH, headers, body)).result(2 * (WAIT_S + SEND_S))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="peers", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})
        for client in self._clients.values():
            await client.aclose()
        asyncio.get_running_loop().stop()


class AskedPeer:
    """A replica that is asked during one fetch, by several threads. `problem` is why it is asked no more, and `is_unreached` whether that
    is because no connection could be made."""

    def __init__(
        self, replica: str, url: str, send: Callable[[bytes], tuple[int, bytes]], stopped: Callable[[], bool]
    ) -> None:
        self.replica, self.url = replica, url
        self.problem: str | None = None
        self.is_unreached = False
        self._send, self._stopped = send, stopped
        self._heard = time.monotonic()

    def read(self, timeline: str, version: int, name: str) -> bytes | None:
        """Return what it has, once it has that. None if it is to be asked no more, or has not got it and won't."""
        body = msgspec.json.encode(Asked(timeline, version, name))
        while self.problem is None and not self._stopped():
            try:
                status, data = self._send(body)
            except NotReached as error:
                self.is_unreached = True
                self.give_up(str(error))
                break
            except TimeoutError:
                self.give_up(f"an answer took more than {WAIT_S + SEND_S:g} s")
                break
            except (OSError, AnswerTooLarge, CancelledError, HeadraceError) as error:
                self.give_up(str(error) or type(error).__name__)
                break
            if status == HTTPStatus.OK:
                self._heard = time.monotonic()
                return data
            if status in (HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS):
                break
            longest = _PATIENCE_S.get(status, 0.0)
            if time.monotonic() - self._heard >= longest:
                said = data[:200].decode(errors="replace")
                self.give_up(f"it answered {status} for {longest:g} s: {said}" if longest else f"{status}: {said}")
        return None

    def give_up(self, why: str) -> None:
        self.problem = self.problem or why


class Served:
    """Answers to other replicas that pull, from what this one has."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._threads = ThreadPoolExecutor(MOST_SERVED, thread_name_prefix="serving")  # they wait, most of the time
        self._count = 0
        self.served_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application of `PATH`."""
        if self._count >= MOST_SERVED:
            await Response(status_code=HTTPStatus.TOO_MANY_REQUESTS)(scope, receive, send)
            return
        self._count += 1
        try:
            status, data = await self._answer(Request(scope, receive))
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % len(data))]
            await send({"type": "http.response.start", "status": int(status), "headers": headers})
            for begin in range(0, len(data), _CHUNK):
                await send({"type": "http.response.body", "body": data[begin : begin + _CHUNK], "more_body": True})
                self.served_bytes += len(data[begin : begin + _CHUNK])
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._count -= 1

    async def _answer(self, request: Request) -> tuple[HTTPStatus, bytes]:
        try:
            asked = msgspec.json.decode(await read_body(request, _MOST_ASKED) or b"", type=Asked)
        except (ValueError, RecursionError) as error:
            return HTTPStatus.BAD_REQUEST, str(error).encode()
        loop = asyncio.get_running_loop()
        try:
            serve = partial(self._serve, asked.timeline, asked.version, asked.name, WAIT_S)
            data = await loop.run_in_executor(self._threads, serve)
        except StillFetching:
            return HTTPStatus.SERVICE_UNAVAILABLE, b"it is still fetched"
        except NotBegun:
            return HTTPStatus.CONFLICT, b"the version is not known yet"
        return (HTTPStatus.NOT_FOUND, b"") if data is None else (HTTPStatus.OK, data)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
