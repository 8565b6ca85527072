"""Compares conversations by their meaning, not by how a program serialises them.

A program sends the whole conversation with each request, and its own data types change details: the order of keys, null for absent fields,
the spaces in the arguments of a tool call. The comparison ignores these. It only proposes which earlier call a request continues; tokens
decide afterwards (`session.Session.place`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.records.trajectory import Message

from .json_values import has_too_many_values


def prefixes(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return a digest of each prefix of the conversation, the empty one first. Equal digests mean equal conversations and tools."""
    digests = [hashlib.sha256(_canonical(list(tools))).digest()]
    for message in messages:
        digests.append(followed_by(digests[-1], message))
    return tuple(digests)


def followed_by(prefix: bytes, message: Message) -> bytes:
    """Return the digest of the conversation `prefix` followed by this message."""
    return hashlib.sha256(prefix + _canonical(_fields_to_compare(message))).digest()


def _fields_to_compare(message: Message) -> dict[str, Any]:
    """Return the fields to compare. Null and empty count as absent; other fields (annotations, reasoning, …) are ignored."""
    fields = {
        "role": message.get("role"),
        "name": message.get("name"),
        "content": _text(message.get("content")),
        "tool_call_id": message.get("tool_call_id"),
        "tool_calls": [_tool_call(call) for call in message.get("tool_calls") or ()],
    }
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _text(content: Any) -> Any:
    """Return the text of a list with a single part, else the list of texts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return texts[0] if len(texts) == 1 else texts


def _tool_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or {}
    return [call.get("id"), function.get("name"), _json(function.get("arguments"))]


def _json(arguments: Any) -> Any:
    """Return the JSON value of arguments, which travel as text. Text that is not JSON, too deep or too large is compared as text."""
    if isinstance(arguments, str) and has_too_many_values(arguments.encode(errors="surrogatepass")):
        return arguments
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return [json.dumps(value, sort_keys=True)]  # a list, so that it never equals a text
    except (ValueError, RecursionError):
        return arguments


def _canonical(value: Any) -> bytes:
    # ensure_ascii: a lone surrogate, which JSON can carry, can't be encoded as UTF-8
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
