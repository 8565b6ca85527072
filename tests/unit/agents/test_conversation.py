"""Which conversations are the same one, however a program writes them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_services.agents.conversation import prefixes

MANY = f"[{','.join(['0'] * 200_000)}]"


def calling(arguments: Any, **changes: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}, **changes}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (said("hi"), said("hi", name=None, tool_calls=[], annotations=[]), True),
        (said("hi"), said([{"type": "text", "text": "hi"}]), True),
        (said("hi"), said(["hi"]), True),
        (said("hi"), said("ho"), False),
        (said(["a", "b"]), said(["a", "c"]), False),
        (said(["a", "b"]), said(["c", "b"]), False),
        (said(["a", "b"]), said("a"), False),
        (said("\ud800"), said("\ud801"), False),
        (calling('{"a": 1, "b": 2}'), calling('{"b":2,"a":1}'), True),
        (calling('{"a": 1}'), calling({"a": 1}), True),
        (calling('{"a": 1}'), calling('{"a": 2}'), False),
        (calling('{"a": 1}'), said(None), False),
        (calling("{"), calling("{"), True),
        (calling("{"), calling("["), False),
        (calling("{"), calling(None), False),
        # neither is parsed, so their spaces count
        (calling(MANY), calling(f"{MANY} "), False),
        (calling("1"), calling("1", id="d"), False),
        (calling("1"), calling("1", function={"name": "g", "arguments": "1"}), False),
        (calling("1", function=None), calling("2", function=None), True),
        (calling("1", function=None), calling("1"), False),
    ],
)
def test_conversations_are_compared_by_meaning(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    first, second = prefixes([one], []), prefixes([other], [])
    assert (first == second) is same
    assert first[0] == second[0]


def test_tools_are_compared_whatever_the_order_of_their_keys() -> None:
    assert prefixes([], [{"a": 1, "b": 2}]) == prefixes([], [{"b": 2, "a": 1}])
    assert prefixes([], [{"a": 1}]) != prefixes([], [{"a": 2}])
