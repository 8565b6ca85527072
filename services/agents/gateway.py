"""The gateway: an endpoint for each open episode, which speaks OpenAI's chat completions.

    POST /s/KEY/v1/chat/completions      KEY in the path, or as the API key:      POST /v1/chat/completions
    GET  /s/KEY/v1/models                                                         GET  /v1/models

Programs are somebody else's, and what they send is hostile: bodies, requests under way and requests a second are bounded, the key is all
that is known of a caller, and it opens one episode.

A key begins with the name of its gateway. Behind one address for all (`agents.advertised_url`) any gateway takes a request, and forwards
what is another's.

An answer is delivered once its last byte was written to a connection that was still open. So it is sent in chunks, of which a client needs
the last, and the connection is looked at before that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from headrace.service import body_of
from headrace_services.agents import dialect, metrics
from headrace_services.agents.dialect import BadRequest, ChatRequest, Problem
from headrace_services.agents.episode import CallFailed, OpenEpisode
from headrace_services.agents.session import Refused, SessionCall

log = logging.getLogger(__name__)

# While a stream has nothing to say, it says so this often; until then an error has a status of its own.
_KEEP_ALIVE_S = 5.0
# For a body to come in.
_BODY_S = 60.0
# Of the event loop, until a connection that was closed is seen to be.
_TURNS = 5
# Over which requests a second are counted.
_RATE_S = 10.0
# Marks a request that another gateway sent on.
_FORWARDED = "x-headrace-forwarded"
# Headers of a request and of its answer that mean something to whoever gets them.
_PASSED_ON = (
    b"authorization",
    b"content-type",
    b"idempotency-key",
    b"x-headrace-train",
    b"x-stainless-retry-count",
    b"x-headrace-retry-count",
)
_HANDED_ON = (b"content-type", b"cache-control", b"retry-after")


class _Door:
    """An open episode, with its requests that are under way and the times of its last ones."""

    def __init__(self, episode: OpenEpisode) -> None:
        self.episode = episode
        self.under_way = 0
        self.times: deque[float] = deque()


class Gateway:
    """The endpoints of the episodes that this runner has open. `model` is the policy's name. `peers` are the addresses of the other
    gateways, by their names."""

    def __init__(
        self,
        model: str,
        *,
        max_request_bytes: int,
        max_parallel_calls: int,
        max_requests_per_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.max_request_bytes = max_request_bytes
        self._max_parallel_calls = max_parallel_calls
        self._max_in_rate = max(1, round(max_requests_per_s * _RATE_S))
        self._clock = clock
        self._doors: dict[str, _Door] = {}
        self.name = secrets.token_hex(4)
        self.peers: Mapping[str, str] = {}

    def open(self, episode: OpenEpisode) -> str:
        """Returns the key that opens the episode."""
        key = f"{self.name}-{secrets.token_hex(16)}"
        self._doors[key] = _Door(episode)
        return key

    def close(self, key: str) -> None:
        """The key is dead from here on."""
        self._doors.pop(key, None)

    def knows(self, key: str) -> bool:
        return key in self._doors

    def peer(self, key: str) -> str | None:
        """The address of the gateway whose key this is, if it is another's."""
        return None if self.knows(key) else self.peers.get(key.partition("-")[0])

    @contextlib.contextmanager
    def admitted(self, key: str) -> Iterator[OpenEpisode]:
        """The key's episode, for one request. Raises `Turned`."""
        door = self._doors.get(key)
        if door is None:
            raise Turned(dialect.no_such_key())
        if door.under_way >= self._max_parallel_calls:
            raise Turned(
                dialect.too_many(f"{door.under_way} requests of this episode are under way (agents.max_parallel_calls)")
            )
        now = self._clock()
        while door.times and now - door.times[0] >= _RATE_S:
            door.times.popleft()
        if len(door.times) >= self._max_in_rate:
            raise Turned(
                dialect.too_many(
                    f"{len(door.times)} requests in {_RATE_S:g} s (agents.max_requests_per_s); wait a moment"
                )
            )
        door.times.append(now)
        door.under_way += 1
        try:
            yield door.episode
        finally:
            door.under_way -= 1


class Turned(Exception):
    """A request that is turned away at the door."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def build_app(gateway: Gateway, forward: httpx.AsyncClient) -> FastAPI:
    """`forward` asks the other gateways."""
    app = FastAPI(title="Headrace gateway", docs_url=None, redoc_url=None, openapi_url=None)

    async def chat(request: Request) -> Response:
        if (peer := _peer_of(gateway, request)) is not None:
            return _Forwarded(gateway, peer, forward)
        return _Answer(gateway, _key_of(request))

    async def models(request: Request) -> Response:
        if (peer := _peer_of(gateway, request)) is not None:
            return _Forwarded(gateway, peer, forward)
        if not gateway.knows(_key_of(request)):
            return _refuse(dialect.no_such_key())
        model = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "headrace"}
        return JSONResponse({"object": "list", "data": [model]})

    for prefix in ("/s/{key}", ""):
        app.add_api_route(f"{prefix}/v1/chat/completions", chat, methods=["POST"])
        app.add_api_route(f"{prefix}/v1/models", models, methods=["GET"])
    return app


def _peer_of(gateway: Gateway, request: Request) -> str | None:
    """Where the request is to be forwarded; what was, is not again."""
    return None if _FORWARDED in request.headers else gateway.peer(_key_of(request))


def _key_of(request: Request) -> str:
    """The path's, else the API key."""
    if "key" in request.path_params:
        return str(request.path_params["key"])
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _read(request: Request, most: int) -> bytes:
    """The body. Raises `Turned` as soon as it is too large, or too slow."""
    try:
        async with asyncio.timeout(_BODY_S):
            body = await body_of(request, most)
    except TimeoutError:
        raise Turned(dialect.too_slow(_BODY_S)) from None
    if body is None:
        raise Turned(dialect.too_large(most))
    return body


def _refuse(problem: Problem) -> JSONResponse:
    metrics.REFUSED.labels(str(problem.status), problem.code or problem.type).inc()
    return JSONResponse(problem.body, problem.status, dict(problem.headers))


class _Answer(Response):
    """Asks the episode of `key`, and sends its answer to a client that is still there."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        super().__init__()
        self._gateway, self._key = gateway, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with self._gateway.admitted(self._key) as episode:
                asked = Request(scope, receive)
                body = await _read(asked, self._gateway.max_request_bytes)
                request = dialect.parse(body, dict(asked.headers), self._gateway.model)
                del body
                gone = asyncio.create_task(_gone(receive))
                try:
                    problem = await _answer(episode, request, gone, send)
                finally:
                    gone.cancel()
        except (Turned, BadRequest, Refused) as error:
            problem = error.problem if isinstance(error, Turned) else dialect.problem_of(error)
        except ClientDisconnect:  # in the middle of its request
            return
        if problem is not None:
            await _refuse(problem)(scope, receive, send)


class _Forwarded(Response):
    """Asks another gateway, and hands its answer on as it comes. A client that goes is gone there too."""

    def __init__(self, gateway: Gateway, peer: str, client: httpx.AsyncClient) -> None:
        super().__init__()
        self._gateway, self._peer, self._client = gateway, peer, client

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = Request(scope, receive)
        try:
            body = await _read(asked, self._gateway.max_request_bytes)
        except Turned as turned:
            await _refuse(turned.problem)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        headers = [(name, value) for name, value in asked.headers.raw if name.lower() in _PASSED_ON]
        request = self._client.build_request(
            asked.method, self._peer + scope["path"], content=body, headers=[*headers, (_FORWARDED.encode(), b"1")]
        )
        gone, handing = asyncio.create_task(_gone(receive)), asyncio.create_task(self._hand_on(request, send))
        try:
            await asyncio.wait([gone, handing], return_when=asyncio.FIRST_COMPLETED)
            if not handing.done():
                return
            problem = handing.result()
        finally:
            gone.cancel()
            handing.cancel()
        if problem is not None:
            await _refuse(problem)(scope, receive, send)

    async def _hand_on(self, request: httpx.Request, send: Any) -> Problem | None:
        """Returns why there is no answer, as long as nothing has been sent."""
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            return dialect.failed(
                f"the runner of this episode can't be reached: {error or type(error).__name__}", late=False
            )
        async with contextlib.aclosing(answer):
            kept = [(name, value) for name, value in answer.headers.raw if name.lower() in _HANDED_ON]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for part in answer.aiter_raw():
                await _part(send, part)
            await _end(send)
        return None


async def _answer(episode: OpenEpisode, request: ChatRequest, gone: asyncio.Task[None], send: Any) -> Problem | None:
    """Send the answer, or return why there is none, as long as nothing has been sent. Raises `Refused`."""
    call = episode.ask(request)
    waiting = asyncio.create_task(episode.wait(call))
    delivered = started = False
    try:
        while not waiting.done() and not gone.done():
            pause = _KEEP_ALIVE_S if request.stream else None
            await asyncio.wait([waiting, gone], timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and not gone.done():
                if not started:
                    await _start(send, request)
                    started = True
                await _part(send, dialect.KEEP_ALIVE)
        if not waiting.done():
            return None
        problem = _problem_of(episode, waiting.exception())
        if problem is not None and not started:
            return problem
        if not started:
            await _start(send, request)
        if problem is not None:
            await _part(send, dialect.event(problem.body))
            await _end(send)
            return None
        await _part(send, _body(call, request, episode.created))
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if not gone.done():
            episode.delivered(call)
            delivered = True
            await _end(send)
        return None
    finally:
        waiting.cancel()
        if not delivered:
            episode.left(call)


def _body(call: SessionCall, request: ChatRequest, created: int) -> bytes:
    answer = dialect.answer_of(call, request, created)
    if not request.stream:
        return json.dumps(dialect.response(answer, request), ensure_ascii=False, separators=(",", ":")).encode()
    return b"".join([*map(dialect.event, dialect.chunks(answer, request)), dialect.DONE])


def _problem_of(episode: OpenEpisode, error: BaseException | None) -> Problem | None:
    match error:
        case None:
            return None
        case BadRequest() | Refused():
            return dialect.problem_of(error)
        case CallFailed():
            return dialect.failed(str(error), late=error.late)
    log.error("%s: a call failed", episode.name, exc_info=error)
    return dialect.failed("the runner failed; its log says why", late=False)


async def _gone(receive: Any) -> None:
    """Return when the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Any, request: ChatRequest) -> None:
    kind = b"text/event-stream" if request.stream else b"application/json"
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _part(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _end(send: Any) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})
