"""Requests to servers that say exactly what a test has them say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.base.http_client import AnswerTooLarge, HttpClient, NotReached


class Server:
    """Says the next of `answers` to each request; keeps the connection open behind it. `heard` are requests, by connection."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heard: list[list[bytes]] = []
        self.closed = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[bytes] = []
        self.heard.append(mine)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.splitlines() if line.lower().startswith(b"content-length:")]
                mine.append(head + await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0))
                answer = self.answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"the end" in answer:
                    writer.close()
            await reader.read()
        self.closed.set()
        writer.close()


@contextlib.asynccontextmanager
async def server(*answers: bytes) -> AsyncIterator[Server]:
    one = Server(*answers)
    listening = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield one


def said(body: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def post(one: Server, most: int = 100) -> tuple[int, bytes]:
    async with contextlib.aclosing(HttpClient(one.url, None, most=most)) as client:
        return await client.post("/path", {"x-name": "value"}, b"body")


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nA: b\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nthe end"


async def test_a_request_is_what_it_says() -> None:
    async with server(said(b"yes", "404 Not Found")) as one:
        assert await post(one) == (404, b"yes")
    ((heard,),) = one.heard
    assert heard.startswith(b"POST /path HTTP/1.1\r\n")
    assert b"\r\nx-name: value\r\n" in heard
    assert heard.endswith(b"\r\n\r\nbody")


async def test_no_redirection_is_followed_and_no_cookie_kept() -> None:
    answer = said(b"elsewhere", "302 Found", "Location: /other\r\nSet-Cookie: a=b\r\n")
    async with server(answer, said(b"yes")) as one, contextlib.aclosing(HttpClient(one.url, None, most=100)) as client:
        assert await client.post("/", {}, b"") == (302, b"elsewhere")
        assert await client.post("/", {}, b"") == (200, b"yes")
    assert b"a=b" not in b"".join(one.heard[0])


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (said(b""), b""),
        (CHUNKS, b"abc0123456789"),
        (TO_THE_END, b"the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + said(b"yes"), b"yes"),
    ],
)
async def test_an_answer_ends_where_it_says(answer: bytes, body: bytes) -> None:
    async with server(answer) as one:
        assert await post(one) == (200, body)


async def test_connections_are_used_again_as_long_as_they_live() -> None:
    closes = said(b"d", head="Connection: close\r\n")
    async with (
        server(said(b"a"), CHUNKS, TO_THE_END, said(b"b"), closes, said(b"e")) as one,
        contextlib.aclosing(HttpClient(one.url, None, most=100)) as client,
    ):
        for _ in range(6):
            await client.post("/", {}, b"")
    assert [len(requests) for requests in one.heard] == [3, 2, 1]


@pytest.mark.parametrize(
    "answer",
    [
        said(b"12345"),
        CHUNKS,
        b"HTTP/1.1 200 OK\r\n\r\n12345the end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n",
    ],
)
async def test_an_answer_that_is_too_large_is_refused(answer: bytes) -> None:
    async with server(answer) as one:
        with pytest.raises(AnswerTooLarge, match="more than 4 bytes"):
            await post(one, most=4)


@pytest.mark.parametrize(
    "answer",
    [
        b"hello, the end\r\n\r\n",
        b"HTTP/1.1 two\r\n\r\nthe end",
        b"HTTP/2 200\r\n\r\nthe end",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nthe end",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nthe end",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfive\r\nthe end",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nthe end",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 2**17 + b"\r\n\r\nthe end",
        b"the end",
    ],
)
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with server(answer) as one:
        with pytest.raises(ConnectionError):
            await post(one)


async def test_only_a_request_that_was_not_sent_has_not_reached_its_server() -> None:
    async with server() as one:
        gone = one.url
    async with (
        server(said(b"", "407 Proxy Authentication Required")) as refusing,
        server(b"the end") as broken,
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nso far") as silent,
    ):
        for url, proxy, reached in (
            (gone, None, False),
            ("http://server.invalid", gone, False),
            ("https://server.invalid", refusing.url.replace("//", "//user:secret@"), False),
            (broken.url, None, True),
            (silent.url, None, True),
        ):
            within_s = 0.5 if url == silent.url else None
            async with contextlib.aclosing(HttpClient(url, None, most=100, total_s=within_s, proxy=proxy)) as client:
                with pytest.raises(TimeoutError if url == silent.url else ConnectionError) as error:
                    await client.post("/", {}, b"")
            assert isinstance(error.value, NotReached) is not reached, url
            assert "secret" not in str(error.value)


async def test_to_stop_waiting_closes_the_connection() -> None:
    async with (
        server(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nso far") as one,
        contextlib.aclosing(HttpClient(one.url, None, most=100)) as client,
    ):
        asking = asyncio.create_task(client.post("/", {}, b""))
        while not one.heard or not one.heard[0]:  # noqa: ASYNC110 - what is heard sets no event
            await asyncio.sleep(0.001)
        asking.cancel()
        await one.closed.wait()
        assert asking.cancelled()
