"""The gateway over HTTP, with real clients and replicas that are toys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import ssl
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from headrace.cli.app import app as cli
from headrace.config import Config
from headrace.episode import without_keys
from headrace.errors import LeaseLost
from headrace.replay import Replica
from headrace.replica_client import ReplicaClient, ReplicaFenced, ReplicaUnavailable, SampleRequest
from headrace.tls import client_context
from headrace_services.agents import conversation, dialect, metrics
from headrace_services.agents import fleet as fleet_module
from headrace_services.agents import gateway as gateway_module
from tests.support.faulty_way import FAULTS, Fault, faulty_way
from tests.support.gateways import Open, open_episode, replica, unavailable
from tests.support.toy_policy import ToyPolicy
from tests.support.toy_sessions import LIMITS, TOOLS, user

HI: Any = [user("hi")]


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


async def ask(client: openai.AsyncOpenAI, messages: Any = HI, **options: Any) -> Any:
    return await client.chat.completions.create(model="any", messages=messages, **options)


def gate(opened: Open) -> asyncio.Event:
    """What every sampling waits for from now on."""
    event = asyncio.Event()
    for toy in opened.replicas.values():
        toy.before = lambda request: event.wait()
    return event


def elsewhere(reason: str) -> float:
    """How often a replica did not do its part of a call."""
    return metrics.ASKED_ELSEWHERE.labels(reason)._value.get()


# -- answers -----------------------------------------------------------------------------------------------------------------


async def test_an_openai_client_talks_over_several_turns() -> None:
    async with open_episode() as opened, opened.client() as client:
        messages = list(HI)
        for turn in range(3):
            answer = (await ask(client, messages)).choices[0]
            assert answer.finish_reason in ("stop", "tool_calls")
            messages += [answer.message.model_dump(), user(f"and {turn}?")]
        ending = await opened.episode.end()
    assert [call.parent for call in ending.calls] == [-1, 0, 1]
    assert [call.completion_token_ids.tolist() for call in opened.kept] == [
        call.completion_token_ids.tolist() for call in ending.calls
    ]


async def test_the_key_is_an_api_key_too() -> None:
    shared = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context())  # as docs/agents.md advises
    async with (
        open_episode() as opened,
        opened.client(base_url=f"{opened.address}/v1", api_key=opened.key, http_client=shared) as client,
    ):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await ask(client)).usage.completion_tokens > 0


@pytest.mark.parametrize("seed", range(6))
async def test_a_stream_says_what_an_answer_does(seed: int) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}}
    messages = [user(f"hi {seed}")]
    async with open_episode() as opened, opened.client() as client:
        whole = (await ask(client, messages, **asked)).model_dump()
    async with open_episode() as opened, opened.client() as client:
        stream = await ask(client, messages, **asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk.model_dump() async for chunk in stream]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message.get("reasoning", "")
    calls = [{**call, "index": None} for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls == [{**call, "index": None} for call in message["tool_calls"] or ()]
    last = chunks[-2]["choices"][0]
    assert last["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert last["token_ids"] == whole["choices"][0]["token_ids"]
    assert last["logprobs"] == whole["choices"][0]["logprobs"]
    assert chunks[-1]["usage"] == whole["usage"]


async def test_token_ids_and_log_probabilities_are_those_of_the_record() -> None:
    async with open_episode() as opened, opened.client() as client:
        answer = await ask(client, logprobs=True, extra_body={"return_token_ids": True})
    (call,) = opened.kept
    choice = answer.choices[0]
    assert answer.prompt_token_ids == call.context_token_ids.tolist()
    assert choice.token_ids == call.completion_token_ids.tolist()
    assert [each.token for each in choice.logprobs.content] == [f"token_id:{token}" for token in choice.token_ids]
    assert [each.logprob for each in choice.logprobs.content] == call.logprobs.tolist()


async def test_no_answer_leaves_before_its_call_is_kept() -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.may_keep.clear()
        asking = asyncio.create_task(ask(client))
        await until(lambda: any(call.answer for call in opened.episode.session.calls))
        done, _ = await asyncio.wait([asking], timeout=0.05)
        assert not done
        opened.may_keep.set()
        await asking
        assert len(opened.kept) == 1


async def test_parallel_calls_are_kept_in_the_order_of_their_numbers() -> None:
    async with open_episode(replicas=3) as opened, opened.client() as client:
        await asyncio.gather(*(ask(client, [user(f"{number}")]) for number in range(20)))
        ending = await opened.episode.end()
    assert len(opened.kept) == len(ending.calls) == 20


async def test_a_stream_stays_alive_while_the_policy_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "_KEEP_ALIVE_S", 0.01)
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        async with client.stream("POST", "/chat/completions", json={"messages": HI, "stream": True}) as response:
            parts = response.aiter_text()
            assert (await anext(parts)).startswith(":")
            go.set()
            rest = "".join([part async for part in parts])
    assert rest.endswith("data: [DONE]\n\n")


# -- who is let in -----------------------------------------------------------------------------------------------------------


async def test_an_unknown_key_and_one_of_an_episode_that_has_ended_open_nothing() -> None:
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


async def test_any_gateway_takes_a_request_and_forwards_what_is_another_ones() -> None:
    async with open_episode() as mine, open_episode() as other:
        other.gateway.peers = {mine.gateway.name: mine.address}
        for options in (
            {"base_url": f"{other.address}/s/{mine.key}/v1"},
            {"base_url": f"{other.address}/v1", "api_key": mine.key},
        ):
            async with mine.client(**options) as client:
                assert [model.id async for model in client.models.list()] == ["policy"]
                answer = await ask(client)
                stream = await ask(client, [user("streamed")], stream=True)
                assert [chunk async for chunk in stream][-1].choices[0].finish_reason
                with pytest.raises(openai.BadRequestError, match="n 2"):
                    await ask(client, n=2)
                assert answer.choices[0].message.role == "assistant"
        assert len(mine.kept) == len((await mine.episode.end()).calls) == 4
        assert not other.kept


@pytest.mark.parametrize(
    ("names", "advertised"),
    [
        ("agents", "https://Agents:8394"),  # all that are behind one name have a certificate for it, as in containers
        ("gateway-1,127.0.0.2", "https://agents:8394"),  # each has its own, and what is in front of them another
    ],
)
async def test_gateways_behind_one_name_know_each_other_by_their_certificates(
    tmp_path: Path, names: str, advertised: str
) -> None:
    made = CliRunner().invoke(cli, ["certs", "--dir", str(tmp_path), names])
    assert made.exit_code == 0
    pair = tmp_path / names.partition(",")[0]
    # an address of its own, which only the second certificate names
    agents = {"host": "127.0.0.2", "advertised_url": advertised}
    security = {"tls_cert": f"{pair}.pem", "tls_key": f"{pair}.key", "tls_ca": f"{tmp_path}/ca.pem"}
    config = Config.model_validate({"agents": agents, "security": security})
    async with open_episode(config=config) as mine, open_episode(config=config) as other:
        other.gateway.peers = {mine.gateway.name: mine.address}
        context = client_context(security["tls_ca"])
        context.check_hostname = False
        async with httpx.AsyncClient(verify=context, base_url=f"{other.address}/s/{mine.key}/v1", timeout=60) as client:
            answer = await client.post("/chat/completions", json={"messages": HI})
            assert answer.status_code == 200, answer.text
    assert len(mine.kept) == 1


async def test_a_gateway_that_was_not_heard_of_yet_is_waited_for_where_there_may_be_others() -> None:
    async with open_episode() as mine, open_episode(peers_every_s=0.5) as other:
        url = f"{other.address}/s/{mine.key}/v1"
        async with mine.client(base_url=url) as client:
            for turned in (client.models.list, partial(ask, client)):
                with pytest.raises(openai.InternalServerError, match="does not know yet") as error:
                    await turned()
                assert (error.value.status_code, error.value.response.headers["retry-after"]) == (503, "1")
        refused = metrics.REFUSED.labels("503", "server_error")._value
        before = refused.get()
        async with mine.client(base_url=url, max_retries=1) as client:
            asking = asyncio.create_task(ask(client))
            await until(lambda: refused.get() > before)
            other.gateway.peers = {mine.gateway.name: mine.address}
            await asking
        for key in (f"{other.gateway.name}-{'0' * 32}", mine.key.upper(), f"{mine.key}0", mine.key[1:]):
            async with other.client(base_url=f"{other.address}/s/{key}/v1") as client:
                with pytest.raises(openai.AuthenticationError):
                    await ask(client)


async def heads_alone(address: str, path: str, key: str) -> bytes:
    """What a gateway says to the head of a request whose body never comes."""
    _, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 5000\r\n\r\n"
        writer.write(head.encode())
        return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize("in_path", [True, False])
async def test_nothing_is_read_that_comes_with_a_key_that_opens_nothing(in_path: bool) -> None:
    async with open_episode() as mine, open_episode() as other:
        other.gateway.peers = {each.gateway.name: each.address for each in (mine, other)}
        made_up = [f"{name}-{'0' * 32}" for name in (other.gateway.name, mine.gateway.name)]
        odd = [f"{mine.gateway.name}-%0A", f"{mine.key}%0A", f"{mine.key}%00", f"{mine.gateway.name}-", "%2e%2e", "x"]
        for key in [*made_up, *odd]:
            path = f"/s/{key}/v1/chat/completions" if in_path else "/v1/chat/completions"
            assert b" 401 " in await heads_alone(other.address, path, key)
        assert not any(other.gateway.is_admitted(key) for key in made_up)


async def test_what_is_forwarded_is_bounded_as_what_is_not() -> None:
    async with open_episode() as mine, open_episode(max_parallel_calls=2, max_requests_per_s=0.4) as other:
        other.gateway.peers = {mine.gateway.name: mine.address}
        go = gate(mine)
        async with mine.client(base_url=f"{other.address}/s/{mine.key}/v1") as client:
            two = [asyncio.create_task(ask(client)) for _ in range(2)]
            await until(lambda: mine.replicas["replica-1"].sampling == 2)
            with pytest.raises(openai.RateLimitError, match=r"agents\.max_parallel_calls"):
                await ask(client)
            go.set()
            await asyncio.gather(*two)
            for _ in range(2):
                await ask(client)
            with pytest.raises(openai.RateLimitError, match=r"agents\.max_requests_per_s"):
                await ask(client)


async def test_as_many_requests_are_forwarded_at_once_as_come() -> None:
    many = 120  # more than httpx has connections, unless it is told otherwise
    limits = dataclasses.replace(LIMITS, calls=many, tokens=10**6, nbytes=10**8)
    async with (
        open_episode(limits=limits, max_parallel_calls=many) as mine,
        open_episode(max_parallel_calls=many) as other,
    ):
        other.gateway.peers = {mine.gateway.name: mine.address}
        go = gate(mine)
        async with mine.client(base_url=f"{other.address}/s/{mine.key}/v1") as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(many)]
            await until(lambda: mine.replicas["replica-1"].sampling == many or any(each.done() for each in asking))
            go.set()
            await asyncio.gather(*asking)


async def test_made_up_keys_ask_their_gateway_few_at_a_time_and_a_real_one_is_asked_for_once() -> None:
    asked, most, go = Counter[str](), [0], asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked[key := request.url.path.split("/")[2]] += 1
        most[0] = max(most[0], asked.total() - len(answered))
        await go.wait()
        answered.append(key)
        return httpx.Response(200 if key == real else 401)

    answered: list[str] = []
    real, *made_up = (f"01234567-{number:032x}" for number in range(500))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        lookups = gateway_module.KeyLookups(client)
        checks = [asyncio.create_task(lookups.check("http://other", key)) for key in [*[real] * 20, *made_up]]
        await until(lambda: any(check.done() for check in checks))
        go.set()
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
        assert outcomes[:20] == [None] * 20
        problems = [each.problem for each in outcomes[20:] if isinstance(each, gateway_module.RequestRejected)]
        assert Counter(problem.status for problem in problems) == {401: 255, 429: 244}
        assert asked[real] == 1
        assert most == [gateway_module._LOOKUPS_AT_ONCE]
        with pytest.raises(gateway_module.RequestRejected):
            await lookups.check("http://other", made_up[0])


async def test_a_key_that_died_with_its_episode_is_forgotten_by_other_gateways() -> None:
    async with open_episode() as mine, open_episode() as other:
        other.gateway.peers = {mine.gateway.name: mine.address}
        async with mine.client(base_url=f"{other.address}/s/{mine.key}/v1") as client:
            await ask(client)
            assert other.gateway.is_admitted(mine.key)
            mine.gateway.close(mine.key)
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await ask(client)
        assert not other.gateway.is_admitted(mine.key)


def test_a_key_of_another_gateway_is_remembered_while_it_is_used() -> None:
    now = [0.0]
    bounds = {"max_request_bytes": 1000, "max_parallel_calls": 1, "max_requests_per_s": 1.0}
    gateway = gateway_module.Gateway("policy", **bounds, clock=lambda: now[0])  # type: ignore[arg-type]
    used, idle, another = (f"{number}2345678-{'0' * 32}" for number in range(3))
    gateway.admit_foreign(used)
    with gateway.admitted(used, {}):
        gateway.admit_foreign(idle)
        with gateway.admitted(idle, {}):
            pass
        for now[0] in (5.0, 10.0):
            assert gateway.is_admitted(idle)
            gateway.admit_foreign(another)
        assert not gateway.is_admitted(idle)
        assert gateway.is_admitted(used)


async def test_a_client_that_goes_is_gone_behind_a_forwarding_gateway_too() -> None:
    async with open_episode() as mine, open_episode() as other:
        go = gate(mine)
        other.gateway.peers = {mine.gateway.name: mine.address}
        async with httpx.AsyncClient(base_url=f"{other.address}/s/{mine.key}/v1") as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/chat/completions", json={"messages": HI}, timeout=0.2)
            await until(lambda: mine.episode.session.calls[0].readers == 0)
        go.set()


async def test_a_gateway_that_is_away_is_an_error_that_clients_retry_and_nothing_goes_round() -> None:
    async with open_episode() as mine, open_episode() as other:
        unknown = f"{'0' * 8}-{'0' * 32}"
        mine.gateway.peers = {"0" * 8: "http://127.0.0.1:1"}
        async with mine.client(base_url=f"{mine.address}/s/{unknown}/v1") as client:
            with pytest.raises(openai.InternalServerError, match="can't reach the runner"):
                await ask(client)
        # two that take each other for its gateway
        mine.gateway.peers, other.gateway.peers = {"0" * 8: other.address}, {"0" * 8: mine.address}
        async with mine.client(base_url=f"{mine.address}/s/{unknown}/v1") as client:
            with pytest.raises(openai.AuthenticationError):
                await ask(client)


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


async def test_large_bodies_are_decoded_one_at_a_time_and_others_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
            toy.render = _renders_anything  # type: ignore[method-assign]
        asking = [asyncio.create_task(client.post("/chat/completions", json=large(each))) for each in "abcdefgh"]
        asking.append(asyncio.create_task(beside.post("/chat/completions", json=large("i"))))
        await until(began.is_set)
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
        opened.replicas["replica-1"].render = _renders_anything  # type: ignore[method-assign]
        async with opened.beside() as other, httpx.AsyncClient(base_url=address, timeout=60) as client:

            def post(to: Open, asked: Any) -> Any:
                return client.post(f"/s/{to.key}/v1/chat/completions", json=asked)

            asking = [asyncio.create_task(post(opened, large("a"))) for _ in range(many)]
            await until(lambda: reading[0] == gateway_module._LARGE_AT_ONCE)
            assert [(await post(to, {"messages": HI})).status_code for to in (opened, other)] == [200, 200]
            asking.append(asyncio.create_task(post(other, large("b"))))
            await until(lambda: reading[0] == gateway_module._LARGE_AT_ONCE + 1)
            go.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * (many + 1)
    assert most == [gateway_module._LARGE_AT_ONCE + 1]


async def test_while_a_call_is_sampled_only_the_call_has_its_messages() -> None:
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        opened.replicas["replica-1"].render = _renders_anything  # type: ignore[method-assign]
        go = gate(opened)
        asking = asyncio.create_task(client.post("/chat/completions", json={"messages": [user("0123456789")]}))
        await until(lambda: opened.replicas["replica-1"].sampling)
        gc.collect()
        requests = [each for each in gc.get_objects() if isinstance(each, dialect.ChatRequest)]
        assert [each.asked.messages for each in requests] == [()]
        go.set()
        assert (await asking).status_code == 200


async def test_requests_under_way_are_bounded() -> None:
    async with open_episode(max_parallel_calls=2) as opened, opened.client() as client:
        go = gate(opened)
        two = [asyncio.create_task(ask(client)) for _ in range(2)]
        await until(lambda: opened.replicas["replica-1"].sampling == 2)
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
    assert "ConnectionError: no answer from 01234567-KEY" in caplog.text


async def test_the_policy_is_a_model() -> None:
    async with open_episode() as opened, opened.client() as client:
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError, match='model "gpt/4" does not exist; the policy is "policy"') as error:
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


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a"]}},
        {"guided_regex": "a+"},
        {"tool_choice": "required", "tools": list(TOOLS)},
        {"tool_choice": {"type": "function", "function": {"name": "look"}}, "tools": list(TOOLS)},
        {"tools": [{"type": "web_search"}]},
        {"parallel_tool_calls": False},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"top_logprobs": 5, "logprobs": True},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"continue_final_message": True},
        {"stop_token_ids": [5]},
        {"ignore_eos": True},
        {"min_tokens": 5},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"stop": [1]},
        {"stop": ["a"] * 17},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": "hi", "seen": 2**70}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]},
        {"stream": "yes"},
        {"include_reasoning": False},
        {"priority": 5},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"temperature": True},
        {"seed": False},
    ],
    ids=lambda options: json.dumps(options)[:60],
)
async def test_what_would_change_what_is_sampled_is_refused_with_a_reason(options: dict[str, Any]) -> None:
    async with open_episode() as opened, opened.http() as client:
        response = await client.post("/chat/completions", content=json.dumps({"messages": HI, **options}))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert not opened.kept
        assert opened.episode.session.limit is None


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"messages": NaN}', b"[" * 100_000, b"\xff", b'{"messages": ' + b"[" * 80 + b"]" * 80 + b"}"],
)
async def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        response = await client.post("/chat/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


@pytest.mark.parametrize("arguments", ["[" * 50_000, "[" * 400 + "]" * 400, "{", "1e999", '"\\ud800"'])
async def test_arguments_of_tools_are_any_text(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "?"}]
    async with open_episode(max_request_bytes=10**6) as opened, opened.http() as client:
        opened.replicas["replica-1"].render = _renders_anything
        response = await client.post("/chat/completions", json={"messages": messages})
    assert response.status_code == 200


async def _renders_anything(*_: Any, **__: Any) -> list[int]:
    return [1]


async def test_options_of_sampling_are_imposed_and_what_was_asked_is_kept() -> None:
    seen: list[SampleRequest] = []

    async def before(request: SampleRequest) -> None:
        seen.append(request)

    async with open_episode() as opened, opened.client() as client:
        opened.replicas["replica-1"].before = before
        harmless = {"n": 1, "user": "me", "tool_choice": "auto", "tools": TOOLS, "response_format": {"type": "text"}}
        await ask(client, temperature=0.0, top_p=0.5, presence_penalty=1.0, seed=5, stop="z", max_tokens=7, **harmless)
    (request,) = seen
    assert (request.temperature, request.top_p, request.top_k) == (1.0, 1.0, None)
    assert request.seed != 5
    assert request.stop == ("z",)
    assert request.max_new_tokens == 7
    assert opened.episode.imposed == {"temperature": [0.0], "top_p": [0.5], "presence_penalty": [1.0], "seed": [5]}


async def test_few_of_many_values_that_were_asked_for_are_kept() -> None:
    async with open_episode() as opened, opened.client() as client:
        for number in range(30):
            await ask(client, temperature=number / 100)
        await ask(client, temperature=0.01)
        assert opened.episode.imposed == {"temperature": [number / 100 for number in range(16)]}


async def test_a_limit_is_an_error_of_the_contexts_length() -> None:
    async with open_episode(limits=dataclasses.replace(LIMITS, calls=1)) as opened, opened.client() as client:
        await ask(client)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match=r"agents\.max_rollout_turns") as refused:
                await ask(client)
            assert refused.value.code == "context_length_exceeded"
        assert (await opened.episode.end()).limit is not None


async def test_without_tools_to_choose_none_is_parsed() -> None:
    for number in range(20):
        async with open_episode() as opened, opened.client() as client:
            messages = [user(f"{number}")]
            parsed = (await ask(client, messages, tools=TOOLS)).choices[0].message
            if parsed.tool_calls:
                plain = (await ask(client, messages, tools=TOOLS, tool_choice="none")).choices[0].message
                assert not plain.tool_calls
                return
    raise AssertionError


# -- retries, with the client's own ------------------------------------------------------------------------------------------


async def test_a_client_that_times_out_and_asks_again_gets_the_answer_of_its_first_call() -> None:
    async with open_episode() as opened, opened.client(max_retries=3, timeout=0.2) as client:
        go = gate(opened)
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.episode.session.joined == 1)
        go.set()
        await asking
        ending = await opened.episode.end()
    assert len(opened.replicas["replica-1"].policy.asked) == len(ending.calls) == 1


async def test_a_client_that_goes_in_the_middle_of_an_answer_gets_it_whole_the_next_time() -> None:
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json={"messages": HI}, timeout=0.1)
        await until(lambda: opened.episode.session.calls[0].readers == 0)
        go.set()
        await until(lambda: opened.kept)
        assert not opened.episode.session.calls[0].delivered
        answer = await client.post("/chat/completions", json={"messages": HI})
        assert answer.json()["choices"][0]["message"] == opened.kept[0].answer
        assert len((await opened.episode.end()).calls) == len(opened.kept) == 1


async def test_a_call_that_nobody_came_back_for_is_dropped() -> None:
    async with open_episode() as opened, opened.http() as client:
        go = gate(opened)
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/chat/completions", json={"messages": HI}, timeout=0.1)
        await until(lambda: opened.episode.session.calls[0].readers == 0)
        go.set()
        await until(lambda: opened.kept)
        await client.post("/chat/completions", json={"messages": [user("something else")]})
        ending = await opened.episode.end()
    assert len(ending.calls) == 1
    assert ending.dropped == {"abandoned": 1}


@contextlib.asynccontextmanager
async def busy_loop() -> AsyncIterator[None]:
    """Each turn of the event loop takes as long as other threads need to do what they have to."""
    loop = asyncio.get_running_loop()
    next_turn = loop.call_soon(lambda: None)

    def turn() -> None:
        nonlocal next_turn
        time.sleep(0.002)
        next_turn = loop.call_soon(turn)

    turn()
    try:
        yield
    finally:
        next_turn.cancel()


def whole(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="any", messages=HI)


def streamed(client: openai.OpenAI) -> None:
    for _ in client.chat.completions.create(model="any", messages=HI, stream=True):
        pass


def streamed_to_its_finish_reason(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="any", messages=HI, stream=True) as chunks:
        assert any(chunk.choices[0].finish_reason for chunk in chunks)


@pytest.mark.parametrize("use", [whole, streamed, streamed_to_its_finish_reason])
async def test_a_client_that_closes_its_connection_once_it_has_its_answer_was_given_it(
    use: Callable[[openai.OpenAI], None],
) -> None:
    async with open_episode() as opened, busy_loop():
        with openai.OpenAI(base_url=opened.url, api_key="none", max_retries=0, timeout=60.0) as client:
            for _ in range(5):
                await asyncio.to_thread(use, client)
        ending = await opened.episode.end()
    assert len(ending.calls) == 5
    assert not ending.dropped


@pytest.mark.parametrize("stream", [False, True])
async def test_who_goes_before_the_last_part_of_an_answer_was_not_given_it(stream: bool) -> None:
    size = 2**24  # more than connections hold
    limits = dataclasses.replace(LIMITS, nbytes=2 * size)
    async with open_episode(limits=limits) as opened, opened.http() as client:
        large = {"role": "assistant", "content": "a" * size}
        opened.replicas["replica-1"].policy.derender = lambda *_: large  # type: ignore[method-assign]
        asked = {"messages": HI, "stream": stream}
        async with client.stream("POST", "/chat/completions", json=asked) as response:
            await anext(response.aiter_raw())
        await until(lambda: opened.episode.session.calls[0].readers == 0)
        assert not opened.episode.session.calls[0].delivered
        ending = await opened.episode.end()
    assert ending.dropped == {"abandoned": 1}


async def test_real_duplicates_at_once_are_calls_of_their_own() -> None:
    async with open_episode() as opened, opened.client() as client:
        answers = await asyncio.gather(*(ask(client, max_tokens=3) for _ in range(8)))
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == 8


async def test_duplicates_of_which_some_are_lost_leave_exactly_the_answers_that_were_used() -> None:
    """Acceptance 6: time-outs, retries and real duplicates at once."""
    async with open_episode(replicas=2) as opened:
        asked = itertools.count()

        async def before(request: SampleRequest) -> None:
            joined = opened.episode.session.joined
            if next(asked) % 3 == 0:  # slower than its client is patient
                await until(lambda: opened.episode.session.joined > joined)

        for toy in opened.replicas.values():
            toy.before = before
        async with opened.client(max_retries=8, timeout=0.2) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(12)))
        ending = await opened.episode.end()
        delivered = {f"chatcmpl-{call.number:06d}" for call in opened.episode.session.calls if call.delivered}
    assert {answer.id for answer in answers} == delivered
    assert len(ending.calls) == len(delivered)
    assert opened.episode.session.joined >= 4


@pytest.mark.parametrize("fault", FAULTS[:2])
async def test_equal_requests_that_never_arrived_get_an_answer_each(fault: Fault) -> None:
    """Their second tries are marked as such, and there is no first one that they could join."""
    many = 8
    async with open_episode() as opened, faulty_way(opened.address, [fault] * many) as address:
        async with opened.client(base_url=f"{address}/s/{opened.key}/v1", max_retries=3) as client:
            answers = await asyncio.gather(*(ask(client) for _ in range(many)))
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == many
    assert opened.episode.session.joined == 0


@pytest.mark.parametrize("forwarded", [False, True])
async def test_equal_requests_that_were_told_to_wait_get_an_answer_each(forwarded: bool) -> None:
    """Others that are equal became calls meanwhile."""
    many, at_once = 8, 3
    bounds = {"max_parallel_calls": at_once}
    async with open_episode(**bounds) as opened, open_episode(**bounds) as front:
        front.gateway.peers = {opened.gateway.name: opened.address}
        refused = metrics.REFUSED.labels("429", "rate_limit_exceeded")._value
        before = refused.get()
        go = gate(opened)
        address = front.address if forwarded else opened.address
        async with opened.client(base_url=f"{address}/s/{opened.key}/v1", max_retries=9) as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(many)]
            await until(lambda: refused.get() >= before + many - at_once)
            go.set()
            answers = await asyncio.gather(*asking)
        ending = await opened.episode.end()
    assert len({answer.id for answer in answers}) == len(ending.calls) == many
    assert opened.episode.session.joined == 0


def test_a_try_that_became_no_call_is_remembered_for_one_that_follows_it_and_for_a_while() -> None:
    admission = gateway_module.KeyAdmission()
    for tries in (0, 0, 1, None):
        admission.note_turned_away(tries, 0.0)
    assert not admission.is_idle(119.0)
    assert [admission.was_turned_away(tries, 119.0) for tries in (0, None, 1, 1, 1, 3)] == [
        *[False] * 2,
        *[True] * 2,
        *[False] * 2,
    ]
    assert not admission.was_turned_away(2, 120.0)
    assert admission.is_idle(120.0)


# -- replicas ----------------------------------------------------------------------------------------------------------------


async def test_a_call_whose_replica_is_lost_is_sampled_elsewhere() -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        opened.replicas["replica-1"].before = unavailable(1)
        await ask(client)
    assert opened.kept[0].replica == "replica-2"


async def test_a_call_that_loses_one_replica_after_the_other_fails() -> None:
    """It may be what ends them. Its client is told not to ask again, and the episode goes on."""
    async with open_episode(replicas=5) as opened, opened.client(max_retries=2) as client:
        for toy in opened.replicas.values():
            toy.before = unavailable(1)
        with pytest.raises(openai.InternalServerError, match="3 replicas were lost while they sampled this call"):
            await ask(client)
        assert not opened.episode.over.done()
        with pytest.raises(
            openai.InternalServerError, match="3 replicas were lost"
        ):  # a client that asks again loses no other
            await ask(client)
        await ask(client, [user("another")])
        ending = await opened.episode.end()
    assert len(ending.calls) == 1
    assert ending.dropped == {"failed": 1}
    assert sum(len(toy.policy.asked) for toy in opened.replicas.values()) == 1


@pytest.mark.parametrize("how", ["fenced", "not reached", "the same"])
async def test_what_no_call_can_have_caused_does_not_count_as_a_lost_replica(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_PAUSE_S", 0.01)
    failures = itertools.count()

    async def before(request: SampleRequest) -> None:
        if next(failures) >= 6:
            return
        if how == "fenced":
            raise ReplicaFenced("leaving", "it is being stopped")
        if how == "not reached":
            await ReplicaClient("http://127.0.0.1:1").sample(request)
        raise ReplicaUnavailable("its engine is gone")

    async with open_episode(replicas=1 if how == "the same" else 3) as opened, opened.client() as client:
        for toy in opened.replicas.values():
            toy.before = before
        await ask(client)


async def test_a_conversation_that_no_replica_renders_waits_for_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_PAUSE_S", 0.01)
    failures = itertools.count()
    async with open_episode(replicas=3) as opened, opened.client() as client:
        for toy in opened.replicas.values():

            async def render(*args: Any, render: Any = toy.render, **options: Any) -> Any:
                if next(failures) < 6:
                    raise ReplicaUnavailable("it has left the fleet")
                return await render(*args, **options)

            toy.render = render  # type: ignore[method-assign]
        await ask(client)


@pytest.mark.parametrize("silent_at", ["render", "sample"])
@pytest.mark.parametrize("then", [[replica("replica-1", "DEAD"), replica("replica-2")], [replica("replica-2")]])
async def test_a_call_whose_replica_fell_silent_is_sampled_elsewhere_as_soon_as_the_buffer_says_so(
    silent_at: str, then: list[Replica]
) -> None:
    asked = asyncio.Event()

    async def silent(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    counted = elsewhere("unavailable")
    async with open_episode(replicas=2) as opened, opened.client() as client:
        lost = opened.replicas["replica-1"]
        if silent_at == "render":
            lost.render = silent  # type: ignore[method-assign]
        else:
            lost.before = silent
        asking = asyncio.create_task(ask(client))
        await asked.wait()
        opened.fleet.note(then)
        await asking
        assert lost.sampling == 0  # nobody waits for it any more
    assert opened.kept[0].replica == "replica-2"
    assert elsewhere("unavailable") == counted + 1


async def test_a_call_of_another_timeline_than_its_replica_has_now_is_not_waited_for() -> None:
    counted = elsewhere("timeline")
    async with open_episode(replicas=2) as opened, opened.client() as client:
        gate(opened)
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.replicas["replica-1"].sampling)
        opened.replicas["replica-2"].before = lambda request: asyncio.sleep(0)
        opened.fleet.note([replica("replica-1", timeline="after"), replica("replica-2")])
        await asking
    assert [call.replica for call in opened.kept] == ["replica-2"]
    assert elsewhere("timeline") == counted + 1


async def test_a_call_whose_answer_may_still_count_is_waited_for() -> None:
    counted = elsewhere("unavailable"), elsewhere("timeline")
    async with open_episode(replicas=2) as opened, opened.client() as client:
        go = gate(opened)
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.replicas["replica-1"].sampling)
        other = replica("replica-2")
        for news in (
            [],  # the buffer is away
            [replica("replica-1", "STALE", version=-1), other],  # a refit failed, and another follows
            [replica("replica-1", "QUARANTINED", version=-1), other],
            [replica("replica-1", version=4), other],
        ):
            opened.fleet.note(news)
            await client.models.list()  # time enough to look for another replica
        go.set()
        await asking
    assert [call.replica for call in opened.kept] == ["replica-1"]
    assert (elsewhere("unavailable"), elsewhere("timeline")) == counted


async def test_the_client_of_a_replica_that_has_left_is_closed_once_its_calls_have_ended() -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        first, second = opened.replicas.values()
        await asyncio.gather(*(ask(client, [user(f"{number}")]) for number in range(4)))
        opened.fleet.note([])  # the buffer is away
        opened.fleet.note([replica("replica-1"), replica("replica-2")])
        await client.models.list()
        assert not first.is_closed
        go = gate(opened)
        asking = [asyncio.create_task(ask(client, [user(f"{number}")])) for number in range(4, 8)]
        await until(lambda: first.sampling and second.sampling)
        opened.fleet.note([replica("replica-2")])
        await until(lambda: second.sampling == 4)
        opened.fleet.note([replica("replica-2")])
        await until(lambda: first.is_closed)
        assert set(opened.fleet._clients) == set(opened.fleet._calls) == {"replica-2"}
        go.set()
        await asyncio.gather(*asking)
        await opened.fleet.aclose()
    assert second.is_closed


async def test_a_call_goes_to_the_replica_of_its_parent() -> None:
    async with open_episode(replicas=3) as opened, opened.client() as client:
        for number in range(6):
            answer = (await ask(client, [user(f"{number}")])).choices[0].message.model_dump()
            await ask(client, [user(f"{number}"), answer, user("and?")])
    assert all(opened.kept[number].replica == opened.kept[number + 1].replica for number in range(0, 12, 2))


async def test_with_no_healthy_replica_calls_wait_and_clocks_stand_still() -> None:
    now = [0.0]
    async with open_episode(clock=lambda: now[0]) as opened, opened.client() as client:
        opened.fleet.note([replica("replica-1", "STALE")])
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.episode.session.calls)
        now[0] = 1000.0
        opened.episode.look()
        assert not opened.episode.over.done()
        opened.fleet.note([replica("replica-1")])
        await asking
        now[0] += 10.0
        opened.episode.look()
        assert "agents.think_s" in await opened.episode.over


@pytest.mark.parametrize("other", [replica("replica-1", timeline="before"), replica("replica-1", version=2)])
async def test_a_replica_of_another_timeline_or_with_older_weights_samples_nothing(other: Any) -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.fleet.note([other])
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.episode.session.calls and opened.episode.session.calls[0].reserved)
        assert not opened.replicas["replica-1"].policy.asked
        opened.fleet.note([replica("replica-1")])
        await asking


@pytest.mark.parametrize("wrong", [{"timeline": "before"}, {"version": 2}])
async def test_an_answer_from_other_weights_than_it_was_asked_from_does_not_count(wrong: dict[str, Any]) -> None:
    async with open_episode(replicas=2) as opened, opened.client() as client:
        opened.replicas["replica-1"].policy = ToyPolicy(**wrong)
        await ask(client)
    assert opened.replicas["replica-1"].policy.asked
    assert [call.replica for call in opened.kept] == ["replica-2"]


async def test_a_refit_is_waited_for() -> None:
    async with open_episode() as opened, opened.client() as client:
        refusals = [3]

        async def before(request: SampleRequest) -> None:
            if refusals[0]:
                refusals[0] -= 1
                asyncio.get_running_loop().call_later(0.01, opened.fleet.note, [replica("replica-1")])
                raise ReplicaFenced("refit", "it takes no call until the refit is over")

        opened.replicas["replica-1"].before = before
        await ask(client)
    assert refusals == [0]


# -- clocks and ends ---------------------------------------------------------------------------------------------------------


async def test_a_call_that_takes_too_long_is_an_error_that_clients_retry() -> None:
    now = [0.0]
    async with open_episode(clock=lambda: now[0]) as opened, opened.client() as client:
        gate(opened)
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.replicas["replica-1"].sampling)
        now[0] = 20.0
        opened.episode.look()
        with pytest.raises(openai.InternalServerError, match=r"agents\.call_s") as error:
            await asking
        assert error.value.status_code == 504
        assert (await opened.episode.end()).dropped == {"failed": 1}


async def test_an_answer_that_can_not_be_kept_does_not_leave() -> None:
    async with open_episode() as opened, opened.client() as client:
        opened.fail_to_keep = LeaseLost("the lease is void")
        with pytest.raises(openai.InternalServerError, match="has ended"):
            await ask(client)
        assert isinstance(await opened.episode.over, LeaseLost)
        assert not (await opened.episode.end()).calls


async def test_the_end_of_an_episode_ends_its_calls() -> None:
    async with open_episode() as opened, opened.client() as client:
        gate(opened)
        asking = asyncio.create_task(ask(client))
        await until(lambda: opened.replicas["replica-1"].sampling)
        await opened.episode.end()
        assert opened.replicas["replica-1"].sampling == 0
        with pytest.raises(openai.APIStatusError, match="ended"):
            await asking
