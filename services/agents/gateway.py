"""The gateway: an endpoint for each open episode, with OpenAI's chat completions API.

    POST /s/KEY/v1/chat/completions      KEY in the path, or as the API key:      POST /v1/chat/completions
    GET  /s/KEY/v1/models, /s/KEY/v1/models/MODEL                                 GET  /v1/models, /v1/models/MODEL

Programs are not trusted. Bodies, parallel requests and requests a second are bounded. A caller is known by its key alone, which opens one
episode.

A key begins with the name of its gateway. Behind a common address (`agents.advertised_url`), any gateway accepts a request and forwards it
to the gateway of its key. It reads no body until that gateway has confirmed the key, and then applies the same bounds as to its own keys.

An answer counts as delivered if the connection was still open when all but the last part had been written. A client has no answer without
the last part, and may close the connection as soon as it has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from headrace.base.printable import EPISODE_KEY
from headrace.base.tasks import run_until
from headrace.net.service import read_body

from . import dialect, metrics
from .dialect import ApiProblem, BadRequest, ChatRequest
from .fleet import CallFailed
from .json_values import may_have_many_values
from .running_episode import OpenEpisode
from .session import Refused, SessionCall

log = logging.getLogger(__name__)

# A waiting stream sends a comment this often. Until the first one, an error still has its own HTTP status.
_KEEP_ALIVE_S = 5.0
# The time for a body to arrive.
_BODY_S = 60.0
# The time for another gateway to confirm a key.
_VOUCH_S = 10.0
# Keys of other gateways that are looked up at a time, and that are looked up or wait for it.
_LOOKUPS_AT_ONCE, _MOST_LOOKUPS = 8, 256
# Turns of the event loop until a closed connection is noticed.
_TURNS = 5
# How many large bodies of one key are in memory at a time.
_LARGE_AT_ONCE = 4
# How long, and how many, requests of one key that became no call are remembered.
_RETRY_WITHIN_S, _MOST_TURNED_AWAY = 120.0, 1000
# The window in which requests a second are counted.
_RATE_S = 10.0
# Marks a request that another gateway sent on.
_FORWARDED = "x-headrace-forwarded"
# The headers to forward: of a request, and of its answer.
_PASSED_ON = (
    b"content-type",
    b"idempotency-key",
    b"x-headrace-train",
    b"x-stainless-retry-count",
    b"x-headrace-retry-count",
)
_HANDED_ON = (b"content-type", b"cache-control", b"retry-after", b"x-should-retry")


class KeyAdmission:
    """Admits the requests of one key: counts parallel and recent requests, and limits large bodies."""

    def __init__(self) -> None:
        self.under_way = 0
        self.times: deque[float] = deque()
        # requests that became no call: the time, and how often they had been tried before
        self._turned_away: deque[tuple[float, int]] = deque(maxlen=_MOST_TURNED_AWAY)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    def is_idle(self, now: float) -> bool:
        """Return whether no request of the key is under way or expected."""
        times = [at + _RATE_S for at in self.times] + [at + _RETRY_WITHIN_S for at, _ in self._turned_away]
        return not self.under_way and all(now >= until for until in times)

    def note_turned_away(self, tries: int | None, now: float) -> None:
        """Remember a request that became no call. `tries` is how often it had been tried before."""
        if tries is not None:
            self._turned_away.append((now, tries))

    def was_turned_away(self, tries: int | None, now: float) -> bool:
        """Return whether an earlier try of this request became no call, judged without its body. Each remembered try is used once."""
        while self._turned_away and now - self._turned_away[0][0] >= _RETRY_WITHIN_S:
            self._turned_away.popleft()
        for place, (_, before) in enumerate(self._turned_away):
            if before + 1 == tries:
                del self._turned_away[place]
                return True
        return False

    @contextlib.asynccontextmanager
    async def read_body(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Read the body of the request, for use within the context only. A large body waits while others of this key fill the room for
        them. Raises `RequestRejected`."""
        length = request.headers.get("content-length", "")
        is_small = length.isdecimal() and int(length[:19]) <= dialect.LARGE_BODY
        async with contextlib.nullcontext() if is_small else self._large:
            yield await _read(request, most)


class Gateway:
    """The endpoints of the open episodes of this runner. `model` is the policy's name. `peers` maps the names of the gateways behind the
    common address to their own addresses, and is updated every `peers_every_s` (None: there are no other gateways)."""

    def __init__(
        self,
        model: str,
        *,
        max_request_bytes: int,
        max_parallel_calls: int,
        max_requests_per_s: float,
        peers_every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.max_request_bytes = max_request_bytes
        self._max_parallel_calls = max_parallel_calls
        self._max_in_rate = max(1, round(max_requests_per_s * _RATE_S))
        self._peers_every_s = peers_every_s
        self._clock = clock
        self._decoding = asyncio.Lock()
        self._episodes: dict[str, OpenEpisode] = {}
        self._admissions: dict[str, KeyAdmission] = {}  # also for keys of other gateways, while in use
        self.name = secrets.token_hex(4)
        self.peers: Mapping[str, str] = {}

    def open(self, episode: OpenEpisode) -> str:
        """Create and return the key that opens the episode."""
        key = f"{self.name}-{secrets.token_hex(16)}"
        self._episodes[key], self._admissions[key] = episode, KeyAdmission()
        return key

    def close(self, key: str) -> None:
        """Invalidate the key."""
        self._episodes.pop(key, None)
        self._admissions.pop(key, None)

    def peer(self, key: str) -> str | None:
        """Return the address of the gateway that made this key, or None if it is this one. Raises `RequestRejected` for a key of no gateway
        or of an unknown one."""
        made = EPISODE_KEY.fullmatch(key)
        if made is None:
            raise RequestRejected(dialect.no_such_key())
        if made[1] == self.name:
            return None
        if made[1] not in self.peers:
            unknown = self._peers_every_s
            raise RequestRejected(dialect.no_such_key() if unknown is None else dialect.unknown_gateway(unknown))
        return self.peers[made[1]]

    def episode(self, key: str) -> OpenEpisode:
        """Return the episode of the key. Raises `RequestRejected` if it has none."""
        if key not in self._episodes:
            raise RequestRejected(dialect.no_such_key())
        return self._episodes[key]

    def is_admitted(self, key: str) -> bool:
        """Return whether the key is known to exist."""
        return key in self._admissions

    def admit_foreign(self, key: str) -> None:
        """Admit a key that another gateway has confirmed. Forgets idle ones."""
        now = self._clock()
        foreign = [(each, admission) for each, admission in self._admissions.items() if each not in self._episodes]
        for each, admission in foreign:
            if admission.is_idle(now):
                del self._admissions[each]
        self._admissions.setdefault(key, KeyAdmission())

    async def decode(self, body: bytes, headers: Mapping[str, str]) -> ChatRequest:
        """Decode a body. Large bodies, and those with many values, are decoded in a thread, one at a time. Raises `BadRequest`."""
        if len(body) <= dialect.LARGE_BODY and not may_have_many_values(body):
            return dialect.parse(body, headers, self.model)
        async with self._decoding:
            return await asyncio.to_thread(dialect.parse, body, headers, self.model)

    @contextlib.contextmanager
    def admitted(self, key: str, headers: Mapping[str, str]) -> Iterator[tuple[KeyAdmission, bool]]:
        """Admit one request of a key that `is_admitted`. Yields the key's admission, and whether an earlier try of the request became no
        call. Raises `RequestRejected`."""
        admission, tries = self._admissions[key], dialect.retry_count(headers)
        turned_away = headers.get(dialect.TURNED_AWAY_HEADER) == "1" or admission.was_turned_away(tries, self._clock())
        try:
            self._let_in(admission)
            try:
                yield admission, turned_away
            finally:
                admission.under_way -= 1
        except (BadRequest, Refused, CallFailed):  # a retry would get the same answer
            raise
        except Exception:
            admission.note_turned_away(tries, self._clock())
            raise

    def _let_in(self, admission: KeyAdmission) -> None:
        if admission.under_way >= self._max_parallel_calls:
            raise RequestRejected(
                dialect.too_many(
                    f"{admission.under_way} requests of this episode are under way (agents.max_parallel_calls)"
                )
            )
        now = self._clock()
        while admission.times and now - admission.times[0] >= _RATE_S:
            admission.times.popleft()
        if len(admission.times) >= self._max_in_rate:
            raise RequestRejected(
                dialect.too_many(
                    f"{len(admission.times)} requests in {_RATE_S:g} s (agents.max_requests_per_s); wait a moment"
                )
            )
        admission.times.append(now)
        admission.under_way += 1


class RequestRejected(Exception):
    """Raised for a request that becomes no call."""

    def __init__(self, problem: ApiProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def build_app(gateway: Gateway, forward: aiohttp.ClientSession) -> FastAPI:
    """Build the gateway's HTTP application. `forward` is the client for other gateways."""
    app = FastAPI(title="Headrace gateway", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    lookups = KeyLookups(forward)

    @app.exception_handler(RequestRejected)
    async def turned(_: Request, error: RequestRejected) -> Response:
        return _refuse(error.problem)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def not_spoken(request: Request, error: HTTPException) -> Response:
        path = re.sub("^/s/[^/]*", "", request.scope["path"])
        return _refuse(dialect.not_spoken(error.status_code, request.method, path, error.headers or {}))

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return _refuse(dialect.broken())

    async def chat(request: Request) -> Response:
        key = _read_key(request)
        if (peer := _find_peer(gateway, request)) is None:
            return _ChatAnswer(gateway, key)
        return _Forwarded(gateway, key, peer, forward, lookups)

    async def models(request: Request) -> Response:
        key = _read_key(request)
        if (peer := _find_peer(gateway, request)) is not None:
            await lookups.check(peer, key)
        else:
            gateway.episode(key)
        policy = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "headrace"}
        if "model" not in request.path_params:
            return JSONResponse({"object": "list", "data": [policy]})
        model = request.path_params["model"]
        return JSONResponse(policy) if model == gateway.model else _refuse(dialect.no_such_model(model, gateway.model))

    for prefix in ("/s/{key}", ""):
        app.add_api_route(f"{prefix}/v1/chat/completions", chat, methods=["POST"])
        for path in ("/v1/models", "/v1/models/{model:path}"):
            app.add_api_route(f"{prefix}{path}", models, methods=["GET"])
    return app


def _find_peer(gateway: Gateway, request: Request) -> str | None:
    """Return the address to forward the request to, or None. A forwarded request is not forwarded again."""
    return None if _FORWARDED in request.headers else gateway.peer(_read_key(request))


def _read_key(request: Request) -> str:
    """Return the key in the path, else the API key."""
    if "key" in request.path_params:
        return str(request.path_params["key"])
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class KeyLookups:
    """Asks other gateways whether they have a key. Parallel questions about one key are merged, and only a few run at a time, so that
    made-up keys cost little."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._at_once = asyncio.Semaphore(_LOOKUPS_AT_ONCE)
        self._under_way: dict[str, asyncio.Task[ApiProblem | None]] = {}

    async def check(self, peer: str, key: str) -> None:
        """Check that the gateway at `peer` has the key. Raises `RequestRejected` if not."""
        lookup = self._under_way.get(key)
        if lookup is None:
            if len(self._under_way) >= _MOST_LOOKUPS:
                raise RequestRejected(
                    dialect.too_many(f"{_MOST_LOOKUPS} keys of other runners are being looked up; retry")
                )
            lookup = self._under_way[key] = asyncio.create_task(self._ask(peer, key))
            lookup.add_done_callback(lambda _: self._under_way.pop(key))
        if (problem := await asyncio.shield(lookup)) is not None:
            raise RequestRejected(problem)

    async def _ask(self, peer: str, key: str) -> ApiProblem | None:
        try:
            async with (
                self._at_once,
                asyncio.timeout(_VOUCH_S),
                self._session.get(
                    f"{peer}/s/{key}/v1/models", headers={_FORWARDED: "1"}, allow_redirects=False
                ) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            return _unreachable(error)
        if status == 401:
            return dialect.no_such_key()
        if status != 200:
            return dialect.failed(f"the runner of this episode answered {status}", late=False)
        return None


def _unreachable(error: Exception) -> ApiProblem:
    return dialect.failed(f"can't reach the runner of this episode: {str(error) or type(error).__name__}", late=False)


async def _read(request: Request, most: int) -> bytes:
    """Read the body. Raises `RequestRejected` as soon as it is too large or too slow."""
    try:
        async with asyncio.timeout(_BODY_S):
            body = await read_body(request, most)
    except TimeoutError:
        raise RequestRejected(dialect.too_slow(_BODY_S)) from None
    if body is None:
        raise RequestRejected(dialect.too_large(most))
    return body


def _refuse(problem: ApiProblem) -> JSONResponse:
    metrics.REFUSED.labels(str(problem.status), problem.code or problem.type).inc()
    return JSONResponse(problem.body, problem.status, dict(problem.headers))


class _ChatAnswer(Response):
    """Makes the call in the episode of `key`, and sends the answer if the client is still connected."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        super().__init__()
        self._gateway, self._key = gateway, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            episode = self._gateway.episode(self._key)
            asked = Request(scope, receive)
            with self._gateway.admitted(self._key, asked.headers) as (admission, turned_away):
                headers = {**asked.headers, dialect.TURNED_AWAY_HEADER: f"{turned_away:d}"}
                async with admission.read_body(asked, self._gateway.max_request_bytes) as body:
                    request = await self._gateway.decode(body, headers)
                    del body
                call = episode.ask(request)
                request = request.without_messages()
                gone = asyncio.create_task(_gone(receive))
                try:
                    problem = await _answer(episode, call, request, gone, send)
                finally:
                    gone.cancel()
        except RequestRejected as error:
            problem = error.problem
        except (BadRequest, Refused, CallFailed) as error:
            problem = _find_problem(episode, error)
        except ClientDisconnect:  # while it sent its request
            return
        if problem is not None:
            await _refuse(problem)(scope, receive, send)


class _Forwarded(Response):
    """Forwards the request to another gateway and streams the answer back. If the client disconnects, so does the forwarded request."""

    def __init__(
        self, gateway: Gateway, key: str, peer: str, session: aiohttp.ClientSession, lookups: KeyLookups
    ) -> None:
        super().__init__()
        self._gateway, self._key, self._peer, self._session, self._lookups = gateway, key, peer, session, lookups

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            if not self._gateway.is_admitted(self._key):
                await self._lookups.check(self._peer, self._key)
                self._gateway.admit_foreign(self._key)
            asked = Request(scope, receive)
            with self._gateway.admitted(self._key, asked.headers) as (admission, turned_away):
                async with contextlib.AsyncExitStack() as in_hand:
                    body_of = admission.read_body(asked, self._gateway.max_request_bytes)
                    body = [await in_hand.enter_async_context(body_of)]
                    await self._ask(asked, body, in_hand, send, turned_away=turned_away)
        except RequestRejected as error:
            await _refuse(error.problem)(scope, receive, send)
        except ClientDisconnect:
            return

    async def _ask(
        self, asked: Request, body: list[bytes], in_hand: contextlib.AsyncExitStack, send: Any, *, turned_away: bool
    ) -> None:
        """Forward the request. The `body` is freed once it is sent. Raises `RequestRejected`."""

        async def sent() -> AsyncIterator[bytes]:
            yield body.pop()
            await in_hand.aclose()

        headers = [
            (name.decode(), value.decode(errors="replace")) for name, value in asked.headers.raw if name in _PASSED_ON
        ]
        headers += [
            ("content-length", f"{len(body[0])}"),
            (_FORWARDED, "1"),
            (dialect.TURNED_AWAY_HEADER, f"{turned_away:d}"),
        ]
        url = f"{self._peer}/s/{self._key}/v1/chat/completions"
        request = self._session.post(url, data=sent(), headers=headers, allow_redirects=False)
        await run_until(self._hand_on(request, send), _gone(asked.receive))

    async def _hand_on(self, request: AbstractAsyncContextManager[aiohttp.ClientResponse], send: Any) -> None:
        """Stream the other gateway's answer back. Raises `RequestRejected` if there is none."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(request)
            except aiohttp.ClientError as error:
                raise RequestRejected(_unreachable(error)) from None
            if answer.status == 401:  # the key is no longer valid there
                self._gateway.close(self._key)
            kept = [(name, value) for name, value in answer.raw_headers if name.lower() in _HANDED_ON]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for part in answer.content.iter_any():
                await _part(send, part)
            await _end(send)


async def _answer(
    episode: OpenEpisode, call: SessionCall, request: ChatRequest, gone: asyncio.Task[None], send: Any
) -> ApiProblem | None:
    """Send the call's answer. Returns the error instead if there is no answer and nothing has been sent."""
    waiting, pause = asyncio.create_task(episode.wait(call)), _KEEP_ALIVE_S if request.stream else None
    started = delivered = False
    try:
        while not (await asyncio.wait([waiting, gone], timeout=pause, return_when=asyncio.FIRST_COMPLETED))[0]:
            if not started:
                await _start(send, request)
            started = True
            await _part(send, dialect.KEEP_ALIVE)
        if not waiting.done():
            return None
        problem = _find_problem(episode, waiting.exception())
        if not started:
            if problem is not None:
                return problem
            await _start(send, request)
        if problem is not None:
            await _end(send, dialect.event(problem.body))
            return None
        most, last = _split_answer(call, request, episode.created)
        await _part(send, most)
        await _part(send, b"")  # waits until the connection accepts more
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if not gone.done():
            episode.session.note_delivery(call)
            delivered = True
            await _end(send, last)
        return None
    finally:
        waiting.cancel()
        if not delivered:
            episode.note_departure(call)


def _split_answer(call: SessionCall, request: ChatRequest, created: int) -> tuple[bytes, bytes]:
    """Return the answer in two parts. A client without the second part has no answer; one that has it may disconnect at once."""
    answer = dialect.make_answer(call, request, created)
    if not request.stream:
        whole = json.dumps(dialect.response(answer, request), ensure_ascii=False, separators=(",", ":")).encode()
        return whole[:-1], whole[-1:]
    chunks = list(dialect.chunks(answer, request))
    last = next(place for place, chunk in enumerate(chunks) if chunk["choices"][0]["finish_reason"] is not None)
    return b"".join(map(dialect.event, chunks[:last])), b"".join([*map(dialect.event, chunks[last:]), dialect.DONE])


def _find_problem(episode: OpenEpisode, error: BaseException | None) -> ApiProblem | None:
    match error:
        case None:
            return None
        case BadRequest() | Refused():
            return dialect.make_problem(error)
        case CallFailed():
            return dialect.failed(str(error), late=error.late, again=error.again)
    log.error("%s: a call failed", episode.name, exc_info=error)
    return dialect.failed("the runner failed; see its log", late=False)


async def _gone(receive: Any) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Any, request: ChatRequest) -> None:
    kind = b"text/event-stream" if request.stream else b"application/json"
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _part(send: Any, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _end(send: Any, data: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": data, "more_body": False})
