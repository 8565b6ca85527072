"""The part of OpenAI's chat completions that episodes use: requests, answers, streams and errors. Pure: no I/O, no state.

An option that would change the distribution that the policy samples from is refused by name, or replaced by the run's value. No such option
is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.records.trajectory import JSON_DEPTH, Message

from . import conversation
from .json_values import MOST_VALUES, has_too_many_values
from .session import CallRequest, Refused, SessionCall

TRAIN_HEADER = "x-headrace-train"
_RETRY_HEADERS = ("x-stainless-retry-count", "x-headrace-retry-count")
# Set by the gateway: an earlier try of this request was turned away before it became a call.
TURNED_AWAY_HEADER = "x-headrace-turned-away"
_IDEMPOTENCY_HEADER = "idempotency-key"
_LONGEST_STOP, _MOST_STOPS, _LONGEST_KEY = 256, 16, 256
_TOO_DEEP = f"the request is nested more than {JSON_DEPTH} deep"
# Decoding a larger body takes so long that a thread does it.
LARGE_BODY = 100_000

# The run's own values replace these. The requested values are kept for people to read.
IMPOSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_OTHER_DISTRIBUTION = "the policy would sample from another distribution than the one that is trained"
_TEMPLATE = "every call uses the run's chat template (policy.tokenizer.chat_template_kwargs)"
_TEXT_ONLY = "the policy reads and writes text only"
# Options that are refused: the harmless values of each, and the reason.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send one request for each answer"),
    "best_of": ((1,), "send one request for each answer"),
    "logit_bias": (({},), _OTHER_DISTRIBUTION),
    "response_format": (({"type": "text"},), f"structured output: {_OTHER_DISTRIBUTION}"),
    "structured_outputs": ((), f"structured output: {_OTHER_DISTRIBUTION}"),
    "guided_json": ((), f"structured output: {_OTHER_DISTRIBUTION}"),
    "guided_regex": ((), f"structured output: {_OTHER_DISTRIBUTION}"),
    "guided_choice": ((), f"structured output: {_OTHER_DISTRIBUTION}"),
    "guided_grammar": ((), f"structured output: {_OTHER_DISTRIBUTION}"),
    "tool_choice": (("auto", "none"), f"a forced tool: {_OTHER_DISTRIBUTION}; leave it to the policy (auto)"),
    "parallel_tool_calls": (
        (True,),
        "an answer holds every call that the policy wrote; run the first and answer the others with an error",
    ),
    "use_beam_search": ((False,), _OTHER_DISTRIBUTION),
    "bad_words": (([],), _OTHER_DISTRIBUTION),
    "allowed_token_ids": (([],), _OTHER_DISTRIBUTION),
    "logits_processors": (([],), _OTHER_DISTRIBUTION),
    "min_tokens": ((0,), _OTHER_DISTRIBUTION),
    "ignore_eos": ((False,), _OTHER_DISTRIBUTION),
    "thinking_token_budget": ((), _OTHER_DISTRIBUTION),
    "repetition_detection": ((), _OTHER_DISTRIBUTION),
    "vllm_xargs": (({},), _OTHER_DISTRIBUTION),
    "stop_token_ids": (([],), "use `stop`, or set policy.generation.stop_token_ids for the run"),
    "include_stop_str_in_output": ((False,), "an answer never includes the stop string that ended it"),
    "skip_special_tokens": (
        (True,),
        "the run's parsers make the answer from the tokens; use `return_token_ids` to get the tokens",
    ),
    "prompt_logprobs": ((), "a prompt is not sampled"),
    "top_logprobs": ((0,), "only sampled tokens have log-probabilities"),
    "echo": ((False,), "an answer holds only what the policy wrote"),
    "truncate_prompt_tokens": ((), "shorten the messages instead"),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "reasoning_effort": ((), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "add_generation_prompt": ((True,), _TEMPLATE),
    "continue_final_message": ((False,), "each answer is a new turn; the policy can't continue a given one"),
    "add_special_tokens": ((False,), _TEMPLATE),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "mm_processor_kwargs": ((), _TEXT_ONLY),
    "web_search_options": ((), "there are no built-in tools; pass functions and call them yourself"),
    "functions": (([],), "pass them as `tools`"),
    "function_call": ((), "pass functions as `tools`; the policy chooses"),
    "prediction": ((), _OTHER_DISTRIBUTION),
    "include_reasoning": ((True,), "an answer holds everything that the policy wrote; ignore its reasoning instead"),
    "priority": ((0,), "all calls of a run have the same priority"),
    "kv_transfer_params": (({},), "the run chooses the replica of a call"),
}


class BadRequest(HeadraceError):
    """Raised for a request that would fail again if it were repeated. `param` is the invalid field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A request and the format of its answer. `imposed` holds the options that the run's own values replaced."""

    asked: CallRequest
    model: str
    parses_tools: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    imposed: Mapping[str, Any]

    def without_messages(self) -> ChatRequest:
        """Return this request without its messages. Used while the call runs, which keeps the messages itself."""
        return dataclasses.replace(self, asked=dataclasses.replace(self.asked, messages=(), tools=(), prefixes=()))


def parse(body: bytes, headers: Mapping[str, str], model: str) -> ChatRequest:
    """Parse the body of a POST to /v1/chat/completions. The names of `headers` are lower-case. `model` is the name of the run's model.

    Raises `BadRequest`.
    """
    fields = _fields(body)
    for option, (harmless, why) in _REFUSED.items():
        value = fields.get(option)
        if value is not None and not any(value == each and type(value) is type(each) for each in harmless):
            raise BadRequest(f"{option} {_show(value)} is not supported in an episode: {why}", option)
    messages = _messages(fields.get("messages"))
    tools = _tools(fields.get("tools"))
    train = _train(headers)
    digest = hashlib.sha256(body)
    digest.update(b"1" if train else b"0")
    stream_options = _read(fields, "stream_options", dict) or {}
    return ChatRequest(
        asked=CallRequest(
            messages=messages,
            prefixes=conversation.prefixes(messages, tools),
            body=digest.digest(),
            tools=tools,
            max_tokens=_max_tokens(fields),
            stop=_stop(fields.get("stop")),
            train=train,
            retry=retry_count(headers),
            turned_away=headers.get(TURNED_AWAY_HEADER) == "1",
            idempotency_key=_idempotency_key(headers),
        ),
        model=_read(fields, "model", str) or model,
        parses_tools=fields.get("tool_choice") != "none",
        stream=_read(fields, "stream", bool) or False,
        include_usage=_read(stream_options, "include_usage", bool) or False,
        return_token_ids=_read(fields, "return_token_ids", bool) or False,
        logprobs=_read(fields, "logprobs", bool) or False,
        imposed={name: value for name in IMPOSED if (value := _read(fields, name, int, float)) is not None},
    )


def _fields(body: bytes) -> dict[str, Any]:
    """Decode the body and check that a record can hold its text and numbers. The last value of a repeated name counts."""
    if has_too_many_values(body):
        raise BadRequest(
            f"the body has more than {MOST_VALUES:,} JSON values (its brackets, commas and colons outside of strings); "
            "send fewer messages, tools or fields"
        )
    try:
        fields = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise BadRequest(f"the body is not valid JSON: {_not_utf8(body)}") from None
    except RecursionError:
        raise BadRequest(_TOO_DEEP) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest("the body is not a JSON object")
    _check_depth(fields)
    try:
        msgspec.msgpack.encode(fields)
    except OverflowError:
        name, number = _first_large(fields)
        raise BadRequest(
            f"{name} holds the integer {number}, which needs more than 64 bits; send it as text", name
        ) from None
    return fields


def _not_utf8(body: bytes) -> str:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return f"{error.reason} in UTF-8 (byte {error.start})"
    raise AssertionError


def _check_depth(fields: dict[str, Any]) -> None:
    """Raise `BadRequest` for a body that is nested deeper than a record may be."""
    level: list[Any] = [fields]
    for _ in range(JSON_DEPTH):  # level by level, as the caller could exhaust a recursion
        level = [
            item
            for items in level
            for item in (items.values() if type(items) is dict else items)
            if type(item) in (dict, list)
        ]
        if not level:
            return
    raise BadRequest(_TOO_DEEP)


def _first_large(fields: dict[str, Any]) -> tuple[str, int]:
    """Return the path and value of the first integer that needs more than 64 bits."""
    left: list[tuple[str, Any]] = [("", fields)]
    while True:
        name, value = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return name, value
        inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        left += [(f"{name}.{key}".lstrip("."), item) for key, item in reversed(list(inner))]


def _read(fields: Mapping[str, Any], name: str, *kinds: type) -> Any:
    value = fields.get(name)
    is_kind = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if value is not None and not is_kind:
        raise BadRequest(f"{name} {_show(value)} must be of type {' or '.join(kind.__name__ for kind in kinds)}", name)
    return value


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list with at least one message", "messages")
    for place, message in enumerate(value):
        name = f"messages.{place}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{name} must be an object with a role", name)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in ("text", "refusal") or not _has_text(part):
                    raise BadRequest(f"{name}.content has a part that is not text: {_TEXT_ONLY}", name)
        elif content is not None and not isinstance(content, str):
            raise BadRequest(f"{name}.content must be a string or a list of parts", name)
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_tool_call, calls))):
            raise BadRequest(f"{name}.tool_calls must be a list of function calls", name)
        if message.get("function_call") is not None:
            raise BadRequest(f"{name}.function_call is not supported; use tool_calls", name)
    return tuple(value)


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get(str(part["type"])), str)


def _is_tool_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise BadRequest("tools must be a list", "tools")
    for place, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not _is_tool_call(tool):
            raise BadRequest(
                f"tools.{place} is not a function: there are no built-in tools; pass functions and call them yourself",
                "tools",
            )
    return tuple(value)


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    given = [name for name in ("max_completion_tokens", "max_tokens") if fields.get(name) is not None]
    for name in given:
        value = fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"{name} {_show(value)} must be a whole number of tokens, at least 1", name)
    return min((fields[name] for name in given), default=None)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise BadRequest(f"stop {_show(value)} must be a non-empty string or a list of them", "stop")
    if len(stops) > _MOST_STOPS or any(len(each) > _LONGEST_STOP for each in stops):
        raise BadRequest(f"stop may have at most {_MOST_STOPS} strings of {_LONGEST_STOP} characters each", "stop")
    return tuple(stops)


def _train(headers: Mapping[str, str]) -> bool:
    value = headers.get(TRAIN_HEADER, "1").strip()
    if value not in ("0", "1"):
        raise BadRequest(f"the header {TRAIN_HEADER} {_show(value)} must be 0 (the call is not trained) or 1")
    return value == "1"


def _idempotency_key(headers: Mapping[str, str]) -> str | None:
    key = headers.get(_IDEMPOTENCY_HEADER)
    if key is not None and len(key) > _LONGEST_KEY:
        raise BadRequest(f"the header {_IDEMPOTENCY_HEADER} has {len(key)} characters; the limit is {_LONGEST_KEY}")
    return key


def retry_count(headers: Mapping[str, str]) -> int | None:
    """Return how often the client has sent this request before, or None if it does not count its tries."""
    counts = (headers.get(name, "").strip() for name in _RETRY_HEADERS)
    return max((int(count[:9]) for count in counts if count.isdecimal()), default=None)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- answers -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """A call's answer. It follows from the call's record alone, so a retry gets the same answer."""

    id: str
    created: int
    message: Message
    finish_reason: str
    stop_reason: int | str | None
    prompt_tokens: int
    completion_token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_token_ids: Sequence[int] | None = None

    @property
    def usage(self) -> dict[str, int]:
        completion = len(self.completion_token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
        }


def make_answer(call: SessionCall, request: ChatRequest, created: int) -> Answer:
    completion, message = call.completion, call.answer
    assert completion is not None
    finish = str(completion.finish_reason)
    whole = call.path
    prompt = whole[: whole.size - len(completion.token_ids)]
    return Answer(
        id=f"chatcmpl-{call.number:06d}",
        created=created,
        message=message,
        finish_reason="tool_calls" if finish == "stop" and message.get("tool_calls") else finish,
        stop_reason=completion.stop_reason,
        prompt_tokens=int(prompt.size),
        completion_token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        prompt_token_ids=prompt.tolist() if request.return_token_ids else None,
    )


def response(answer: Answer, request: ChatRequest) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "logprobs": _logprobs(answer) if request.logprobs else None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    head: dict[str, Any] = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": request.model,
    }
    if request.return_token_ids:
        choice["token_ids"] = list(answer.completion_token_ids)
        head["prompt_token_ids"] = answer.prompt_token_ids
    return {**head, "choices": [choice], "usage": answer.usage}


def chunks(answer: Answer, request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    head = {"id": answer.id, "object": "chat.completion.chunk", "created": answer.created, "model": request.model}

    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}]}

    message = answer.message
    first = chunk({"role": message.get("role", "assistant"), "content": ""})
    yield first | ({"prompt_token_ids": answer.prompt_token_ids} if request.return_token_ids else {})
    for field in ("reasoning", "content"):
        if message.get(field):
            yield chunk({field: message[field]})
    for place, call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": place, **call}]})
    more: dict[str, Any] = {"stop_reason": answer.stop_reason}
    if request.logprobs:
        more["logprobs"] = _logprobs(answer)
    if request.return_token_ids:
        more["token_ids"] = list(answer.completion_token_ids)
    yield chunk({}, answer.finish_reason, **more)
    if request.include_usage:
        yield {**head, "choices": [], "usage": answer.usage}


def _logprobs(answer: Answer) -> dict[str, Any]:
    """Return the log-probabilities. Tokens are named by their ids, as in vLLM with `return_tokens_as_token_ids`."""
    tokens = zip(answer.completion_token_ids, answer.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in tokens
        ]
    }


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting for the policy\n\n"


# -- errors ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ApiProblem:
    """An error in OpenAI's format. OpenAI's clients retry after the statuses 408, 409, 429, and 500 and above."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


# The rest of the body is not read.
_HANGS_UP = {"connection": "close"}


def no_such_key() -> ApiProblem:
    return ApiProblem(
        401, "authentication_error", "the key belongs to no episode, or its episode has ended", "invalid_api_key"
    )


def unknown_gateway(again_s: float) -> ApiProblem:
    """`again_s` is the time between two updates of the list of gateways."""
    message = "the key belongs to a gateway that this one does not know yet; retry, as it may have just started"
    # clients do not wait longer than a minute
    return ApiProblem(503, "server_error", message, headers={"retry-after": f"{math.ceil(min(again_s, 60))}"})


def not_spoken(status: int, method: str, path: str, headers: Mapping[str, str]) -> ApiProblem:
    """Return the error for an unknown path (404) or method (405). `path` is without the key."""
    message = f"{method} {_show(path)} is not supported; use POST /v1/chat/completions, GET /v1/models or GET /v1/models/MODEL"
    if path.startswith("/v1/responses"):
        message += '. In the OpenAI Agents SDK, call agents.set_default_openai_api("chat_completions")'
    return ApiProblem(status, "invalid_request_error", message, "unknown_url", headers=headers)


def no_such_model(name: str, model: str) -> ApiProblem:
    message = f"the model {_show(name)} does not exist; the policy is {_show(model)}"
    return ApiProblem(404, "invalid_request_error", message, "model_not_found", "model")


def too_large(most: int) -> ApiProblem:
    message = f"the body has more than {most} bytes (agents.max_request_bytes)"
    return ApiProblem(413, "invalid_request_error", message, "request_too_large", headers=_HANGS_UP)


def too_slow(seconds: float) -> ApiProblem:
    return ApiProblem(408, "timeout_error", f"the body did not arrive within {seconds:g} s", headers=_HANGS_UP)


def failed(message: str, *, late: bool, again: bool = True) -> ApiProblem:
    """Return the error for a call without an answer. Unless `again`, OpenAI's clients are told not to retry."""
    if not again:
        return ApiProblem(500, "server_error", message, headers={"x-should-retry": "false"})
    return ApiProblem(504, "timeout_error", message) if late else ApiProblem(503, "server_error", message)


def broken() -> ApiProblem:
    return ApiProblem(500, "server_error", "the gateway failed; see the runner's log")


def too_many(message: str) -> ApiProblem:
    return ApiProblem(429, "rate_limit_error", message, "rate_limit_exceeded", headers={"retry-after": "1"})


def make_problem(error: BadRequest | Refused) -> ApiProblem:
    if isinstance(error, BadRequest):
        return ApiProblem(400, "invalid_request_error", str(error), "unsupported_or_invalid", error.param)
    match error.kind:
        case "limit":
            # harnesses know this code: they have to shorten the conversation or stop
            return ApiProblem(400, "invalid_request_error", str(error), "context_length_exceeded", "messages")
        case "conflict":
            return ApiProblem(400, "invalid_request_error", str(error), "idempotency_key_reused")
        case "ended":
            return no_such_key()
