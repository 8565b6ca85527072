"""One call of the policy through OpenAI's chat completions API, for programs without their own client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
import secrets
import ssl
from http import HTTPStatus
from typing import Any

from headrace.base.backoff import pause_after
from headrace.base.errors import ChatError
from headrace.base.http_client import AnswerTooLarge, HttpClient
from headrace.records.trajectory import Message

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_MOST_TRIES = 8
# Worth another try, besides server errors: the server was too busy or too slow, or another call came first.
_AGAIN = (408, 409, 429)
_LONGEST_REASON = 500
# The largest answer.
MOST_BYTES = 64 * 1024**2


async def chat(base_url: str, api_key: str, request: dict[str, Any], within_s: float) -> Message:
    """Send `request` to `base_url` and return the answer's message. Raises `ChatError` if the request is refused, `TimeoutError` if it
    takes longer than `within_s`."""
    body = json.dumps({"model": "policy", **request}).encode()
    # all tries are one call: the server recognizes a repeated try by this key
    key = secrets.token_hex(16)
    verify = _authorities() if base_url.startswith("https:") else None
    async with (
        asyncio.timeout(None if math.isinf(within_s) else within_s),
        contextlib.aclosing(HttpClient(base_url, verify, most=MOST_BYTES)) as policy,
    ):
        for number in itertools.count(1):
            headers = {
                "authorization": f"Bearer {api_key}",
                "idempotency-key": key,
                "x-stainless-retry-count": str(number - 1),
            }
            try:
                status, answer = await policy.post("/chat/completions", headers, body)
            except AnswerTooLarge as error:  # a second try would be answered the same
                raise ChatError(f"the policy's answer can't be taken: {error}") from error
            except OSError as error:
                refusal = ChatError(f"the policy can't be reached ({type(error).__name__}: {error})")
            else:
                if status == HTTPStatus.OK:
                    return _message(answer)
                refusal = _refusal(status, answer)
                if status not in _AGAIN and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise refusal
            if number == _MOST_TRIES:
                raise refusal
            await asyncio.sleep(pause_after(number, _FIRST_PAUSE_S, _LAST_PAUSE_S))
    raise AssertionError  # a timeout raises


@functools.cache
def _authorities() -> ssl.SSLContext:
    """Return a context that trusts the machine's authorities, or those in `SSL_CERT_FILE`. All calls share it: loading them takes tens of
    milliseconds, during which no other episode of the process goes on."""
    return ssl.create_default_context()


def _message(answer: bytes) -> Message:
    try:
        message = json.loads(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"the policy's answer is not a chat completion ({error!r}): {_excerpt(answer)}") from error
    if not isinstance(message, dict):
        raise ChatError(f"the policy's answer has {message!r:.80} where its message should be")
    return message


def _refusal(status: int, answer: bytes) -> ChatError:
    try:
        error = json.loads(answer)["error"]
        reason, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        reason, code = _excerpt(answer), None
    return ChatError(f"the policy refused the call ({status}): {reason[:_LONGEST_REASON]}", status, code)


def _excerpt(answer: bytes) -> str:
    return answer[:_LONGEST_REASON].decode(errors="replace")
