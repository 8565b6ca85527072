"""What a request says, as it is read."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.records.trajectory import JSON_DEPTH
from headrace_services.agents import conversation, dialect
from headrace_services.agents.dialect import TRAIN_HEADER, BadRequest, ChatRequest
from headrace_services.agents.json_values import MOST_VALUES
from headrace_services.agents.session import Refused, Session
from tests.support.gateways import open_episode
from tests.support.toy_policy import END, ToyPolicy
from tests.support.toy_sessions import CLOCKS, LIMITS, Program, user


@pytest.fixture
def program() -> Program:
    return Program(Session(LIMITS, CLOCKS, [END], "42 group-1 0", 0.0), ToyPolicy())


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [user("hi")], **fields}).encode()


def parse(sent: bytes, headers: Mapping[str, str] | None = None) -> ChatRequest:
    return dialect.parse(sent, headers or {}, "policy")


# -- the body ----------------------------------------------------------------------------------------------------------------


def test_a_body_is_read_as_it_was_sent() -> None:
    said = "\U0001f600 \u0000 \ufffd"
    for ensure_ascii in (True, False):
        sent = json.dumps(
            {"messages": [{**user(said), "more": [2**64 - 1, -(2**63), 1e300]}]}, ensure_ascii=ensure_ascii
        )
        assert parse(sent.encode()).asked.messages == ({**user(said), "more": [2**64 - 1, -(2**63), 1e300]},)
    twice = b'{"messages": [], "messages": [{"role": "user", "content": "one", "content": "two"}]}'
    assert parse(twice).asked.messages == (user("two"),)


@pytest.mark.parametrize("field", ["model", "user"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b'"\xed\xa0\x80"', r"invalid continuation byte in UTF-8 \(byte 4\d\)"),
        (b'"\\ud83d"', r"surrogate pair \(byte 4\d\)"),
        (b'"\\ude00"', r"surrogate pair \(byte 4\d\)"),
        (b"1e999", r"out of range"),
        (b"-1e999", r"out of range"),
        (b"NaN", r"invalid character \(byte 4\d\)"),
        (b"Infinity", r"invalid character \(byte 4\d\)"),
        (b"[" * 90_000, "nested more than 64 deep"),
        (b"[" * 64 + b"]" * 64, "nested more than 64 deep"),
        (b"1" * 10_000, "out of range"),
        (b'[1, {"a": [0, 18446744073709551616]}]', r"\.1\.a\.1 holds the integer 18446744073709551616"),
        (b"-9223372036854775809", "integer -9223372036854775809"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_no_text_or_no_number_is_refused_by_its_place(field: str, value: bytes, why: str) -> None:
    sent = b'{"messages": [{"role": "user"}], "%s": %s, "stream": false}' % (field.encode(), value)
    with pytest.raises(BadRequest, match=why):
        parse(sent)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_json_is_utf_8(encoding: str) -> None:
    sent = json.dumps({"messages": [user("\ud800")]}, ensure_ascii=False).encode(encoding, "surrogatepass")
    with pytest.raises(BadRequest, match=r"not valid JSON: .*\(byte \d+\)"):
        parse(sent)


def test_a_request_may_be_as_deep_as_a_record() -> None:
    deep: Any = "x"
    for _ in range(JSON_DEPTH - 3):
        deep = [deep]
    assert parse(body(messages=[{**user("hi"), "more": deep}])).asked.messages[0]["more"] == deep
    with pytest.raises(BadRequest, match=f"nested more than {JSON_DEPTH} deep"):
        parse(body(messages=[{**user("hi"), "more": [deep]}]))


@pytest.mark.parametrize("option", dialect.IMPOSED)
def test_what_the_runs_values_replace_is_a_number(option: str) -> None:
    assert parse(body(**{option: 2})).imposed == {option: 2}
    with pytest.raises(BadRequest, match=option):
        parse(body(**{option: ["anything"] * 1000}))


def test_an_idempotency_key_is_short() -> None:
    assert parse(body(), {"idempotency-key": "x" * 256}).asked.idempotency_key == "x" * 256
    with pytest.raises(BadRequest, match="257 characters"):
        parse(body(), {"idempotency-key": "x" * 257})


@pytest.mark.parametrize(
    ("message", "is_large"),
    [
        (user("x"), False),
        (user("x" * dialect.LARGE_BODY), True),
        ({**user("x"), "more": [[]] * 1_000}, False),
        ({**user("x"), "more": [[]] * 10_000}, True),
    ],
    ids=["small", "large", "some values", "many values"],
)
async def test_a_large_body_is_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, message: Any, is_large: bool
) -> None:
    readers: list[threading.Thread] = []

    def read(*args: Any) -> ChatRequest:
        readers.append(threading.current_thread())
        return original(*args)

    original = dialect.parse
    monkeypatch.setattr(dialect, "parse", read)
    limits = dataclasses.replace(LIMITS, context=10**6)
    async with open_episode(limits=limits, max_request_bytes=10**6) as opened, opened.client() as client:
        answer = await client.chat.completions.create(model="policy", messages=[message])
    assert answer.choices
    assert [reader is threading.main_thread() for reader in readers] == [not is_large]


def bomb(values: int) -> bytes:
    return b'{"messages": [{"role": "user"}], "tools": [{"x": [%s]}]}' % b",".join([b"[]"] * (values // 2))


def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: Any) -> Any:
        raise AssertionError("decoded")

    monkeypatch.setattr(dialect.msgspec.json, "decode", decode)
    with pytest.raises(BadRequest, match="more than 100,000 JSON values"):
        parse(bomb(MOST_VALUES))
    with pytest.raises(AssertionError, match="decoded"):
        parse(bomb(MOST_VALUES - 100))


@pytest.mark.parametrize("text", ["[],{:", '"', '\\"[', "\\", '\\\\"[,'], ids=repr)
def test_what_is_in_texts_are_no_values(text: str) -> None:
    said = text * MOST_VALUES
    assert parse(body(messages=[user(said), user(said)])).asked.messages == (user(said), user(said))
    with pytest.raises(BadRequest, match="JSON values"):
        parse(body(messages=[user(said), {**user("hi"), "more": [[]] * MOST_VALUES}]))


@pytest.mark.parametrize("values", [100, MOST_VALUES])
def test_arguments_of_too_many_values_are_compared_as_text(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    def loads(text: str) -> Any:
        decoded.append(text)
        return original(text)

    decoded: list[str] = []
    original = conversation.json.loads
    monkeypatch.setattr(conversation.json, "loads", loads)
    arguments = json.dumps([[]] * values)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    parse(body(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert decoded == ([arguments] if values == 100 else [])


# -- retries -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["0", "1"])
def test_a_request_that_opts_out_is_no_retry_of_one_that_does_not(program: Program, first: str) -> None:
    other = "1" if first == "0" else "0"
    call, _ = program.session.ask(parse(body(), {TRAIN_HEADER: first}).asked, 0.0)
    program.session.note_departure(call, 1.0)
    beside, is_new = program.session.ask(parse(body(), {TRAIN_HEADER: other}).asked, 2.0)
    assert is_new
    assert (call.asked.train, beside.asked.train) == (first == "1", other == "1")
    assert program.session.ask(parse(body(), {TRAIN_HEADER: first}).asked, 2.0) == (call, False)


def test_no_header_is_the_same_as_one_that_opts_in() -> None:
    assert parse(body()).asked == parse(body(), {TRAIN_HEADER: "1"}).asked


def test_an_idempotency_key_is_of_one_request_that_opts_out_or_not(program: Program) -> None:
    program.session.ask(parse(body(), {"idempotency-key": "once"}).asked, 0.0)
    with pytest.raises(Refused, match="idempotency key"):
        program.session.ask(parse(body(), {"idempotency-key": "once", TRAIN_HEADER: "0"}).asked, 0.0)
