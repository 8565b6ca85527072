"""What a client of a replica makes of answers that are none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config.telemetry import TelemetryConfig
from headrace.net import tracing
from headrace.net.credentials import Credentials
from headrace.net.replica_client import RenderRefused, ReplicaClient, ReplicaFenced, ReplicaUnavailable, SampleRequest
from tests.support.collector import collecting

CALL = SampleRequest(token_ids=(3, 4), max_new_tokens=2, timeline="t", min_version=1)


@contextlib.asynccontextmanager
async def answering(status: int, body: bytes, heard: list[bytes] | None = None) -> AsyncIterator[str]:
    """The address of a server that gives every request the same answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        if heard is not None:
            heard.append(head)
        writer.write(b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, b"", "can't be read"),
        (200, b'{"token_ids": [1]}', "missing required field"),
        (200, b"[" * 10**5, "can't be read"),
        (401, b'{"detail": "give the token"}', "answered 401: .*give the token"),
        (409, b"", "answered 409"),
        (409, b'{"error": {"message": "of another release", "type": "weary"}}', "answered 409: of another release"),
        (400, b'{"error": {"message": "of vLLM", "type": "BadRequestError"}}', "answered 400: of vLLM"),
        (500, b'{"error": {"message": "the engine gave no output"}}', "answered 500: the engine gave no output"),
        (503, b"\xff" * 10**4, "answered 503"),
    ],
)
async def test_an_answer_that_is_none_says_what_it_was(status: int, body: bytes, said: str) -> None:
    async with answering(status, body) as url:
        client = ReplicaClient(url)
        with pytest.raises(ReplicaUnavailable, match=said) as unavailable:
            await client.sample(CALL)
        assert url in str(unavailable.value)
        assert len(str(unavailable.value)) < 1200
        await client.aclose()


async def test_a_refusal_carries_its_reason() -> None:
    async with answering(409, b'{"error": {"message": "wait", "type": "refit"}}') as url:
        client = ReplicaClient(url)
        with pytest.raises(ReplicaFenced, match="wait") as fenced:
            await client.sample(CALL)
        assert fenced.value.reason == "refit"
        await client.aclose()
    async with answering(400, b'{"error": {"message": "too long", "type": "context"}}') as url:
        client = ReplicaClient(url)
        with pytest.raises(RenderRefused, match="too long") as refused:
            await client.render([])
        assert refused.value.reason == "context"
        await client.aclose()


async def test_a_replica_that_is_gone_is_unavailable() -> None:
    async with answering(200, b"") as url:
        pass
    client = ReplicaClient(url)
    with pytest.raises(ReplicaUnavailable, match=url):
        await client.render([])
    await client.aclose()


async def test_the_token_is_the_one_of_the_moment(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("agents old\n")
    heard: list[bytes] = []
    async with answering(503, b"", heard) as url:
        client = ReplicaClient(url, Credentials(file).make_token_source("agents"))
        for line in ("agents old\n", "agents replaced\nagents old\n"):
            file.write_text(line)
            with pytest.raises(ReplicaUnavailable):
                await client.sample(CALL)
        await client.aclose()
    assert [head.lower().count(b"authorization: bearer old") for head in heard] == [1, 0]
    assert b"bearer replaced" in heard[1].lower()


async def test_a_call_carries_the_current_span(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    with collecting() as collector:
        for name, value in collector.variables.items():
            monkeypatch.setenv(name, value)
        async with answering(503, b"", heard) as url:
            client = ReplicaClient(url)
            with tracing.exporting(TelemetryConfig(), "agents", "run"):
                with (
                    tracing.span("call", tracing.group_span("run", "g")) as call,
                    contextlib.suppress(ReplicaUnavailable),
                ):
                    await client.sample(CALL)
                with contextlib.suppress(ReplicaUnavailable):
                    await client.sample(CALL)
            await client.aclose()
    assert f"traceparent: {call.traceparent}".encode() in heard[0].lower()
    assert b"traceparent" not in heard[1].lower()
