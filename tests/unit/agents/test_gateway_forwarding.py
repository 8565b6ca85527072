"""Gateways behind a common address: each forwards what is another one's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from headrace.base.tls import client_context
from headrace.cli.app import app as cli
from headrace.config import Config
from headrace_services.agents import gateway as gateway_module
from headrace_services.agents import metrics
from tests.support.gateways import HI, ask, ask_and_go, gate, open_episode
from tests.support.toy_sessions import LIMITS, user
from tests.support.waiting import eventually


async def test_any_gateway_forwards_a_request_of_another_one() -> None:
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
async def test_gateways_behind_one_name_are_known_by_certificate(tmp_path: Path, names: str, advertised: str) -> None:
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


async def test_a_gateway_not_heard_of_is_waited_for_if_others_may_exist() -> None:
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
            await eventually(lambda: refused.get() > before)
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
            await eventually(lambda: mine.replicas["replica-1"].sampling == 2)
            with pytest.raises(openai.RateLimitError, match=r"agents\.max_parallel_calls"):
                await ask(client)
            go.set()
            await asyncio.gather(*two)
            for _ in range(2):
                await ask(client)
            with pytest.raises(openai.RateLimitError, match=r"agents\.max_requests_per_s"):
                await ask(client)


async def test_as_many_requests_are_forwarded_at_once_as_come() -> None:
    many = 120  # more than a client has connections, unless it is told otherwise
    limits = dataclasses.replace(LIMITS, calls=many, tokens=10**6, nbytes=10**8)
    async with (
        open_episode(limits=limits, max_parallel_calls=many) as mine,
        open_episode(max_parallel_calls=many) as other,
    ):
        other.gateway.peers = {mine.gateway.name: mine.address}
        go = gate(mine)
        async with mine.client(base_url=f"{other.address}/s/{mine.key}/v1") as client:
            asking = [asyncio.create_task(ask(client)) for _ in range(many)]
            await eventually(lambda: mine.replicas["replica-1"].sampling == many or any(each.done() for each in asking))
            go.set()
            await asyncio.gather(*asking)


async def test_made_up_keys_ask_few_at_a_time_and_a_real_one_once() -> None:
    asked, most, go = Counter[str](), [0], asyncio.Event()

    class Session:
        @contextlib.asynccontextmanager
        async def get(self, url: str, **_: Any) -> AsyncIterator[SimpleNamespace]:
            asked[key := url.split("/")[4]] += 1
            most[0] = max(most[0], asked.total() - len(answered))
            await go.wait()
            answered.append(key)
            yield SimpleNamespace(status=200 if key == real else 401)

    answered: list[str] = []
    real, *made_up = (f"01234567-{number:032x}" for number in range(500))
    lookups = gateway_module.KeyLookups(Session())
    checks = [asyncio.create_task(lookups.check("http://other", key)) for key in [*[real] * 20, *made_up]]
    await eventually(lambda: any(check.done() for check in checks))
    go.set()
    outcomes = await asyncio.gather(*checks, return_exceptions=True)
    assert outcomes[:20] == [None] * 20
    problems = [each.problem for each in outcomes[20:] if isinstance(each, gateway_module.RequestRejected)]
    assert Counter(problem.status for problem in problems) == {401: 255, 429: 244}
    assert asked[real] == 1
    assert most == [gateway_module._LOOKUPS_AT_ONCE]
    with pytest.raises(gateway_module.RequestRejected):
        await lookups.check("http://other", made_up[0])


async def test_a_repeated_request_is_the_same_call_at_every_gateway() -> None:
    key = {"idempotency-key": "Schlüssel".encode()}  # any bytes: they go on as they came
    async with open_episode() as mine, open_episode() as other:
        other.gateway.peers = {mine.gateway.name: mine.address}
        async with httpx.AsyncClient() as client:
            answers = [
                await client.post(
                    f"{each.address}/s/{mine.key}/v1/chat/completions", json={"messages": HI}, headers=key
                )
                for each in (mine, other)
            ]
        assert [answer.json()["id"] for answer in answers] == [answers[0].json()["id"]] * 2
        assert len(mine.kept) == 1


async def test_a_key_of_an_ended_episode_is_forgotten_by_other_gateways() -> None:
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
            await ask_and_go(mine, client)
        go.set()


async def test_a_gateway_that_is_away_is_a_retryable_error() -> None:
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
