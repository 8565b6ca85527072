"""The requests of a rollout replica for calls of episodes, and their client: tokens in, tokens out, and the model's own chat format.

`/sample` is work of the run, and is fenced like a lease: a replica samples only with verified weights of the timeline that the request
names. On request it returns what it has sampled as a message too. `/render` converts messages to tokens. Both use the engine's own parsers
and template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import msgspec

from headrace.base.errors import HeadraceError
from headrace.base.http_client import AnswerTooLarge, HttpClient
from headrace.base.tls import client_context
from headrace.net import tracing
from headrace.records.trajectory import FinishReason, Message, Sampling, Span

SAMPLE, RENDER = PATHS = ("/sample", "/render")
# the role whose token a caller presents
ROLE = "agents"
_CONNECT_S = 10.0
_SAID = 200  # the shown part of an answer that is not understood
_MOST_BYTES = 1024**3  # the largest answer: a context of tens of millions of tokens

T = TypeVar("T")

Positive = Annotated[int, msgspec.Meta(ge=1)]
# Why a replica samples nothing for a call, or doesn't finish it. Another replica may, or the same one later.
#   unhealthy: it holds no verified weights; timeline: its weights, or the call, are of another timeline; stale: its weights are older
#   than the call allows; refit: it accepts no calls until a refit is over; leaving: it is being stopped
FenceReason = Literal["unhealthy", "timeline", "stale", "refit", "leaving"]
# invalid: no replica can process it; context: it leaves no room in the model's context; too_large: its body has too many bytes
RefusalReason = Literal["invalid", "context", "too_large"]
StopReason = int | str | None


class SampleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for a completion of `token_ids`, from weights of `timeline` that are not older than `min_version`. With `message` it is
    returned as a message too, in which calls of `tools` are separated from text."""

    token_ids: tuple[int, ...]
    max_new_tokens: Positive
    timeline: str
    min_version: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    message: bool = False
    tools: list[dict[str, Any]] | None = None

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            self.temperature,
            self.max_new_tokens,
            self.stop_token_ids,
            self.stop,
            self.seed,
            self.top_k,
            self.top_p,
            self.bad_words,
        )


class Sampled(msgspec.Struct, frozen=True):
    """A completion. `logprobs` are those of a trajectory: natural logarithms, after temperature.

    `stop_reason` is the stop string, or the id of the last token, that ended it; None at finish reason "length". `timeline` and `version`
    are of the verified weights that the replica held when it answered; `spans` give the version of each token. `cached_tokens` is the
    number of prompt tokens found in the engine's prefix cache.

    `message`, if requested, has `role`, `content` (None beside only tool calls), and if present `reasoning` and `tool_calls`. Tool calls
    have no ids: the same tokens always give the same message, so the caller that answers a program numbers them.
    """

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    stop_reason: StopReason
    timeline: str
    version: int
    replica: str
    cached_tokens: int = 0
    message: Message = {}


class RenderRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages and tools as in the OpenAI API, which the run's chat template converts to tokens."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True


class Rendered(msgspec.Struct, frozen=True):
    token_ids: list[int]


class ReplicaFenced(HeadraceError):
    """Raised when the replica samples nothing for this call (status 409); another may, or this one later. Nothing that it has sampled for
    the call counts."""

    def __init__(self, reason: FenceReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ReplicaUnavailable(HeadraceError):
    """Raised when the replica can't be reached, or has failed."""


class RenderRefused(HeadraceError):
    """Raised when no replica can render, parse or sample from the request (status 400, or 413): its author is at fault."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ErrorDetail(msgspec.Struct):
    """The reason for a refused request. `type` is the reason's name, if it is one of the two above."""

    message: str
    type: str = ""


class ErrorBody(msgspec.Struct):
    """The body of an error answer."""

    error: ErrorDetail


class ReplicaClient:
    """The HTTP client of one replica. A caller that stops waiting (cancellation) ends its call in the engine. The client sets no deadline
    for answers: that is up to the caller.

    Methods raise `ReplicaUnavailable` besides the errors that they name.
    """

    def __init__(self, url: str, token: Callable[[], str] | None = None, authorities: str | None = None) -> None:
        """`token` returns the token of the role `agents` for each request (`Credentials.make_token_source`); None where none is required.
        `authorities` is security.tls_ca. Raises `ConfigError` if it can't be used."""
        self.url = url
        self._token = token
        verify = client_context(authorities) if url.startswith("https:") else None
        self._http = HttpClient(url, verify, most=_MOST_BYTES, connect_s=_CONNECT_S)

    async def sample(self, request: SampleRequest) -> Sampled:
        """Request a completion. Raises `ReplicaFenced`, and `RenderRefused`."""
        return await self._ask(SAMPLE, request, Sampled)

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises `RenderRefused`."""
        asked = RenderRequest(list(messages), None if tools is None else list(tools), add_generation_prompt)
        return (await self._ask(RENDER, asked, Rendered)).token_ids

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _ask(self, path: str, asked: msgspec.Struct, answer: type[T]) -> T:
        headers = tracing.headers() | ({} if self._token is None else {"authorization": f"Bearer {self._token()}"})
        try:
            body = msgspec.json.encode(asked)
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise RenderRefused("invalid", f"the request can't be written as JSON: {error}") from error
        try:
            status, content = await self._http.post(path, headers, body)
        except (OSError, AnswerTooLarge) as error:
            raise ReplicaUnavailable(f"{self.url}{path}: {str(error) or type(error).__name__}") from error
        if status != HTTPStatus.OK:
            raise self._error(path, status, content)
        try:
            return msgspec.json.decode(content, type=answer)
        except (ValueError, RecursionError) as error:
            raise ReplicaUnavailable(f"{self.url}{path}: its answer can't be read: {error}") from error

    def _error(self, path: str, status: int, content: bytes) -> HeadraceError:
        """Return the error for a status other than 200."""
        try:
            problem = msgspec.json.decode(content, type=ErrorBody).error
        except (ValueError, RecursionError):
            problem = ErrorDetail(repr(content[:_SAID].decode(errors="replace")))
        if status == HTTPStatus.CONFLICT and problem.type in get_args(FenceReason):
            return ReplicaFenced(cast(FenceReason, problem.type), problem.message)
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE) and problem.type in get_args(
            RefusalReason
        ):
            return RenderRefused(cast(RefusalReason, problem.type), problem.message)
        return ReplicaUnavailable(f"{self.url}{path}: answered {status}: {problem.message}")
