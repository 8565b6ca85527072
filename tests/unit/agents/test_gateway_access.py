"""Whom a gateway lets in, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from typing import Any

import httpx
import openai
import pytest

from headrace.base.printable import without_keys
from headrace_services.agents import conversation, dialect
from headrace_services.agents import gateway as gateway_module
from tests.support.gateways import HI, Open, ask, gate, open_episode, renders_anything
from tests.support.toy_sessions import user
from tests.support.waiting import eventually


async def test_keys_unknown_or_of_an_ended_episode_open_nothing() -> None:
    async with open_episode() as opened:
        async with opened.client(base_url=f"{opened.address}/s/{'0' * 32}/v1") as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)
        async with opened.client() as client:
            opened.gateway.close(opened.key)
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await ask(client)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with open_episode() as opened, opened.http() as client:

        async def endless() -> Any:
            while True:
                yield b" " * 1000

        refused = await client.post("/chat/completions", content=b" " * 20_000)
        assert refused.status_code == 413
        assert "agents.max_request_bytes" in refused.json()["error"]["message"]
        with contextlib.suppress(httpx.HTTPError):  # who goes on sending may not get to read why
            assert (await client.post("/chat/completions", content=endless())).status_code == 413


def large(text: str) -> dict[str, Any]:
    return {"messages": [user(text * dialect.LARGE_BODY)]}


async def test_large_bodies_are_decoded_singly_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding, and the digests of the conversation, are no work of the event loop."""
    go, began, decoding, most = threading.Event(), threading.Event(), [0], [0]
    digested_by: list[threading.Thread] = []
    parse, prefixes = dialect.parse, conversation.prefixes

    def slow(body: bytes, *args: Any) -> Any:
        if len(body) <= dialect.LARGE_BODY:
            return parse(body, *args)
        decoding[0] += 1
        most[0] = max(most[0], decoding[0])
        began.set()
        try:
            assert go.wait(60)
            return parse(body, *args)
        finally:
            decoding[0] -= 1

    def digests(messages: Any, tools: Any) -> Any:
        if len(messages[0]["content"]) >= dialect.LARGE_BODY:
            digested_by.append(threading.current_thread())
        return prefixes(messages, tools)

    monkeypatch.setattr(dialect, "parse", slow)
    monkeypatch.setattr(conversation, "prefixes", digests)
    async with (
        open_episode(max_request_bytes=10**6) as opened,
        opened.beside() as other,
        opened.http() as client,
        other.http() as beside,
    ):
        for toy in opened.replicas.values():
            toy.render = renders_anything  # type: ignore[method-assign]
        asking = [asyncio.create_task(client.post("/chat/completions", json=large(each))) for each in "abcdefgh"]
        asking.append(asyncio.create_task(beside.post("/chat/completions", json=large("i"))))
        await eventually(began.is_set)
        answers = [await each.post("/chat/completions", json={"messages": HI}) for each in (beside, client)]
        go.set()
        answers += await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 11
    assert most == [1]
    assert len(digested_by) == 9
    assert threading.main_thread() not in digested_by


@pytest.mark.parametrize("forwarded", [False, True])
async def test_few_large_bodies_of_an_episode_are_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch, forwarded: bool
) -> None:
    """Those that come after them wait, and are read later; small ones, and those of another episode, are read at once."""
    go, reading, most = asyncio.Event(), [0], [0]
    original = gateway_module._read

    async def read(request: Any, limit: int) -> bytes:
        if int(request.headers["content-length"]) <= dialect.LARGE_BODY:
            return await original(request, limit)
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        await go.wait()
        reading[0] -= 1
        return await original(request, limit)

    many = 10
    async with open_episode(max_request_bytes=10**6) as opened, open_episode(max_request_bytes=10**6) as front:
        monkeypatch.setattr(gateway_module, "_read", read)
        front.gateway.peers = {opened.gateway.name: opened.address}
        address = front.address if forwarded else opened.address
        opened.replicas["replica-1"].render = renders_anything  # type: ignore[method-assign]
        async with opened.beside() as other, httpx.AsyncClient(base_url=address, timeout=60) as client:

            def post(to: Open, asked: Any) -> Any:
                return client.post(f"/s/{to.key}/v1/chat/completions", json=asked)

            asking = [asyncio.create_task(post(opened, large("a"))) for _ in range(many)]
            await eventually(lambda: reading[0] == gateway_module._LARGE_AT_ONCE)
            assert [(await post(to, {"messages": HI})).status_code for to in (opened, other)] == [200, 200]
            asking.append(asyncio.create_task(post(other, large("b"))))
            await eventually(lambda: reading[0] == gateway_module._LARGE_AT_ONCE + 1)
            go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * (many + 1)
    assert most == [gateway_module._LARGE_AT_ONCE + 1]


async def test_while_a_call_is_sampled_only_the_call_has_its_messages() -> None:
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        opened.replicas["replica-1"].render = renders_anything  # type: ignore[method-assign]
        go = gate(opened)
        asking = asyncio.create_task(client.post("/chat/completions", json={"messages": [user("0123456789")]}))
        await eventually(lambda: opened.replicas["replica-1"].sampling)
        gc.collect()
        requests = [each for each in gc.get_objects() if isinstance(each, dialect.ChatRequest)]
        assert [each.asked.messages for each in requests] == [()]
        go.set()
        assert (await asking).status_code == 200


async def test_requests_under_way_are_bounded() -> None:
    async with open_episode(max_parallel_calls=2) as opened, opened.client() as client:
        go = gate(opened)
        two = [asyncio.create_task(ask(client)) for _ in range(2)]
        await eventually(lambda: opened.replicas["replica-1"].sampling == 2)
        with pytest.raises(openai.RateLimitError, match=r"agents\.max_parallel_calls"):
            await ask(client)
        go.set()
        await asyncio.gather(*two)
        await ask(client)


async def test_the_rate_of_requests_is_bounded() -> None:
    async with open_episode(max_requests_per_s=0.3) as opened, opened.client() as client:
        for _ in range(3):
            await ask(client)
        with pytest.raises(openai.RateLimitError, match=r"agents\.max_requests_per_s"):
            await ask(client)


def test_no_key_gets_into_a_log() -> None:
    key = f"01234567-{'0123456789abcdef' * 2}"
    record = logging.LogRecord("any", logging.INFO, "", 0, "POST %s", (f"http://host/s/{key}/v1/chat",), None)
    assert without_keys(record)
    assert record.getMessage() == "POST http://host/s/01234567-KEY/v1/chat"


def test_no_key_gets_into_a_log_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    key = f"01234567-{'0123456789abcdef' * 2}"
    caplog.handler.addFilter(without_keys)
    try:
        try:
            raise ValueError(f"http://host/s/{key}/v1/chat")
        except ValueError as error:
            raise ConnectionError(f"no answer from {key}") from error
    except ConnectionError:
        logging.getLogger("any").exception("failed", stack_info=True)
    assert key not in caplog.text
    assert "ValueError: http://host/s/01234567-KEY/v1/chat" in caplog.text
    assert "no answer from 01234567-KEY" in caplog.text


async def test_the_policy_is_a_model() -> None:
    async with open_episode() as opened, opened.client() as client:
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match=r'"gpt/4".*"policy"') as error:
            await client.models.retrieve("gpt/4")
        assert error.value.code == "model_not_found"
        opened.gateway.close(opened.key)
        with pytest.raises(openai.AuthenticationError):
            await client.models.retrieve("policy")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/responses", 404),
        ("POST", "/completions", 404),
        ("POST", "/chat/completions/", 404),
        ("GET", "/", 404),
        ("GET", "/models/", 404),
        ("GET", "/chat/completions", 405),
        ("POST", "/models", 405),
        ("DELETE", "/models/policy", 405),
    ],
)
@pytest.mark.parametrize("key_in_path", [True, False])
async def test_what_is_not_spoken_here_is_refused_as_openai_does(
    method: str, path: str, status: int, key_in_path: bool
) -> None:
    async with open_episode() as opened, opened.http() as client:
        url = f"{opened.url if key_in_path else f'{opened.address}/v1'}{path}"
        answer = await client.request(method, url, headers={"authorization": f"Bearer {opened.key}"}, json={})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("unknown_url", "model_not_found")
        assert opened.key not in error["message"]
        if path != "/models/":
            assert f'{method} "/v1{path}" is not supported' in error["message"]
            assert "POST /v1/chat/completions" in error["message"]
        if status == 405:
            assert answer.headers["allow"] in ("GET", "POST")


async def test_who_asks_for_responses_is_told_what_to_set_in_the_agents_sdk() -> None:
    async with open_episode() as opened, opened.client() as client:
        with pytest.raises(openai.NotFoundError, match=r'set_default_openai_api\("chat_completions"\)'):
            await client.responses.create(model="policy", input="hi")


async def test_a_gateway_that_fails_says_so_as_openai_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    async with open_episode() as opened, opened.client() as client:
        monkeypatch.setattr(opened.gateway, "episode", fail)
        with pytest.raises(openai.InternalServerError, match="see the runner's log") as error:
            await client.models.list()
        assert error.value.type == "server_error"
        assert "a bug" not in str(error.value)
