"""Compares conversations as a program means them, not as it happens to serialise them.

A program sends the whole conversation with each request, after it has been through its own data types: keys come in another order, what
was absent is null, the arguments of a tool call are the same JSON with other spaces. Messages are compared without all that. Whether a
request really continues an earlier call is decided by tokens afterwards (`session.Session.place`): this only proposes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.trajectory import Message
from headrace_services.agents.json_values import has_too_many_values


def prefixes(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """A digest for each prefix of the conversation, the empty one first. Equal digests mean equal conversations with equal tools."""
    digests = [hashlib.sha256(_canonical(list(tools))).digest()]
    for message in messages:
        digests.append(followed_by(digests[-1], message))
    return tuple(digests)


def followed_by(prefix: bytes, message: Message) -> bytes:
    """The digest of the conversation with this message behind it."""
    return hashlib.sha256(prefix + _canonical(_compared(message))).digest()


def _compared(message: Message) -> dict[str, Any]:
    """What is compared of a message: null and empty are absent, and other fields (annotations, reasoning, …) are ignored."""
    fields = {
        "role": message.get("role"),
        "name": message.get("name"),
        "content": _text(message.get("content")),
        "tool_call_id": message.get("tool_call_id"),
        "tool_calls": [_tool_call(call) for call in message.get("tool_calls") or ()],
    }
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _text(content: Any) -> Any:
    """A single part of text is the text."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return texts[0] if len(texts) == 1 else texts


def _tool_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), _json(function.get("arguments"))]


def _json(arguments: Any) -> Any:
    """The JSON that a text of arguments holds. Text that is not JSON, is nested too deep or has too many values is compared as text."""
    if isinstance(arguments, str) and has_too_many_values(arguments.encode(errors="surrogatepass")):
        return arguments
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return [json.dumps(value, sort_keys=True)]  # in a list: the value, and no text that looks like it
    except (ValueError, RecursionError):
        return arguments


def _canonical(value: Any) -> bytes:
    # ensure_ascii: half a surrogate pair, which JSON can carry, has no UTF-8
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
