"""One call of the policy, by an API that speaks OpenAI's chat completions, with the standard library alone: the SDK brings no client."""

from __future__ import annotations

import asyncio
import http.client
import io
import itertools
import json
import math
import secrets
import ssl
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ChatError
from headrace.trajectory import Message

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0
_MOST_TRIES = 8
# What is worth another try, besides what is the server's fault: it has too much to do, or somebody was faster.
_AGAIN = (408, 409, 429)
_LONGEST_REASON = 500


async def chat(base_url: str, api_key: str, request: dict[str, Any], within_s: float) -> Message:
    """The message that `base_url` answers to `request`. Raises `ChatError` if it refuses, `TimeoutError` if it takes longer than
    `within_s`."""
    body = json.dumps({"model": "policy", **request}).encode()
    # all tries are one call: who answers tells a try from a new question by these
    key = secrets.token_hex(16)
    async with asyncio.timeout(None if math.isinf(within_s) else within_s):
        for number in itertools.count(1):
            headers = {"idempotency-key": key, "x-stainless-retry-count": str(number - 1)}
            try:
                status, answer = await _post(f"{base_url}/chat/completions", api_key, headers, body)
            except (OSError, http.client.HTTPException) as error:
                refusal = ChatError(f"the policy can't be reached ({type(error).__name__}: {error})")
            else:
                if status == http.client.OK:
                    return _message(answer)
                refusal = _refusal(status, answer)
                if status not in _AGAIN and status < http.client.INTERNAL_SERVER_ERROR:
                    raise refusal
            if number == _MOST_TRIES:
                raise refusal
            await asyncio.sleep(min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (number - 1)))
    raise AssertionError  # a timeout raises


async def _post(url: str, api_key: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """The status and the body of the answer. The connection is this call's alone, and ends with it, cancelled or not."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=ssl.create_default_context() if secure else None
    )
    try:
        lines = [
            f"POST {parts.path} HTTP/1.1",
            f"host: {parts.netloc}",
            f"authorization: Bearer {api_key}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        response = http.client.HTTPResponse(_Received(await reader.read()))  # type: ignore[arg-type]
        response.begin()
        return response.status, response.read()
    finally:
        writer.close()


class _Received:
    """What `HTTPResponse` reads, in the place of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _message(answer: bytes) -> Message:
    try:
        message = json.loads(answer)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"the policy's answer is no chat completion ({error!r}): {_excerpt(answer)}") from error
    if not isinstance(message, dict):
        raise ChatError(f"the policy's answer has {message!r:.80} where its message should be")
    return message


def _refusal(status: int, answer: bytes) -> ChatError:
    try:
        error = json.loads(answer)["error"]
        said, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        said, code = _excerpt(answer), None
    return ChatError(f"the policy refused the call ({status}): {said[:_LONGEST_REASON]}", status, code)


def _excerpt(answer: bytes) -> str:
    return answer[:_LONGEST_REASON].decode(errors="replace")
