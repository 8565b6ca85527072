"""What a caller of whom nothing is known can make a port keep: bounded memory, bounded time, bounded connections; others are served."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from headrace.base.tls import CertificateFiles, client_context
from headrace.cli.app import app as cli
from headrace.config import Config
from headrace.env.server import serving
from headrace.net import http_connection, rpc, service
from headrace.net.http_access import HttpAccess
from headrace.net.service import bind, create_app, most_connections, serve_http, serve_openly
from headrace.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2
from tests.support.guarded_ports import HOST, Half

ROOT = Path(__file__).parents[3]
MIB = 1024**2
SENT = 48 * MIB
MOST_GROWTH = 12 * MIB
STEP = b"a" * (256 * 1024)
HEAD = b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SIGN_IN = b"POST /session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
# what is repeated, after what
FLOODS = {
    "a header": (HEAD + b"X: ", STEP),
    "headers": (HEAD, b"X-Much: more\r\n" * 20_000),
    "an address": (b"GET /", STEP),
    "a query": (b"GET /readyz?", STEP),
    "a method": (b"", STEP),
    "a body": (b"POST /v1/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n", STEP),
    "a code": (SIGN_IN + b"Content-Length: 99999999999\r\n\r\n", STEP),
    "chunks": (SIGN_IN + b"Transfer-Encoding: chunked\r\n\r\n", b"40000\r\n" + STEP + b"\r\n"),
    "a chunk's size": (SIGN_IN + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * len(STEP)),
    "trailers": (SIGN_IN + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Much: more\r\n" * 20_000),
    "requests": (b"", (HEAD + b"\r\n") * 5_000),
    "requests of HTTP/1.0": (b"", b"GET /readyz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 5_000),
}


@dataclasses.dataclass(frozen=True)
class Ports:
    process: subprocess.Popen[str]
    http: int
    grpc: int
    certs: Path | None

    @property
    def context(self) -> ssl.SSLContext | None:
        return None if self.certs is None else client_context(str(self.certs / "ca.pem"))

    def peak(self) -> int:
        """Bytes of memory, at most, since `forget`."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    def forget(self) -> int:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak()


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    assert CliRunner().invoke(cli, ["certs", "--dir", str(folder), HOST]).exit_code == 0
    return folder


@pytest.fixture(scope="module", params=["plain", "TLS"])
def ports(request: pytest.FixtureRequest, certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    credentials = tmp_path_factory.mktemp("tokens") / "credentials"
    credentials.write_text("operator boss\nreader eye\nenvironment mine own\n")
    credentials.chmod(0o600)
    files = [f"{certs / HOST}.pem", f"{certs / HOST}.key"] if request.param == "TLS" else []
    command = [sys.executable, "-m", "tests.support.guarded_ports", str(credentials), *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        http, grpc_port = map(int, process.stdout.readline().split())
        yield Ports(process, http, grpc_port, certs if files else None)
        process.terminate()


async def served(port: int, context: ssl.SSLContext | None = None) -> bool:
    """Whether a caller with a token gets an answer from a service."""
    scheme = "http" if context is None else "https"
    headers = {"Authorization": "Bearer eye"}
    async with httpx.AsyncClient(verify=context or False, headers=headers, trust_env=False, timeout=20) as client:
        return (await client.get(f"{scheme}://{HOST}:{port}/readyz")).status_code == 200


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_stranger_who_sends_without_end_takes_no_memory(ports: Ports, flood: str) -> None:
    assert await served(ports.http, ports.context)
    before = ports.forget()
    head, step = FLOODS[flood]
    _, writer = await asyncio.open_connection(HOST, ports.http, ssl=ports.context)
    # it is refused in the middle, or what it sends is thrown away, or it isn't read
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            writer.write(head)
            for _ in range(SENT // len(step)):
                writer.write(step)
                await writer.drain()
    assert ports.peak() - before < MOST_GROWTH
    assert await served(ports.http, ports.context)
    writer.transport.abort()


async def test_messages_of_a_stranger_to_grpc_take_no_memory(ports: Ports) -> None:
    credentials = None if ports.certs is None else grpc.ssl_channel_credentials((ports.certs / "ca.pem").read_bytes())
    many = environment_pb2.EnvironmentServiceScoreRequest(
        trajectories=[trajectory_pb2.Trajectory(completion="a" * 6 * MIB)]
    )
    async with channel(ports.grpc, credentials) as stranger:
        stub = environment_pb2_grpc.EnvironmentServiceStub(stranger)
        health = health_pb2_grpc.HealthStub(stranger)
        await health.Check(health_pb2.HealthCheckRequest())
        before = ports.forget()
        answers = await asyncio.gather(*(stub.Score(many) for _ in range(32)), return_exceptions=True)
        assert {each.code() for each in answers if isinstance(each, grpc.aio.AioRpcError)} == {
            grpc.StatusCode.UNAUTHENTICATED
        }
        too_much = [("x-much", "a" * 8 * MIB)]
        with pytest.raises(grpc.aio.AioRpcError, match="metadata"):
            await health.Check(health_pb2.HealthCheckRequest(), metadata=too_much)
        # half of the 192 MiB sent: TLS and windows hold less than a third, decoded messages held 345 MiB
        assert ports.peak() - before < 2 * SENT
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1


def channel(port: int, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """One that shares its connection with no other."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    if credentials is None:
        return grpc.aio.insecure_channel(f"{HOST}:{port}", options=options)
    return grpc.aio.secure_channel(f"{HOST}:{port}", credentials, options=options)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is waited for has less time than a test."""
    for name in ("HEAD_S", "BODY_S", "READING_S"):
        monkeypatch.setattr(http_connection, name, {"HEAD_S": 0.5, "BODY_S": 0.6, "READING_S": 0.7}[name])
    shorter = {"grpc.server_handshake_timeout_ms": 500, "grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(rpc, "_STRANGERS", [(key, shorter.get(key, value)) for key, value in rpc._STRANGERS])


@contextlib.asynccontextmanager
async def serving_http(
    tmp_path: Path, certificate: CertificateFiles | None = None, app: FastAPI | None = None
) -> AsyncIterator[int]:
    credentials = tmp_path / "credentials"
    credentials.write_text("operator boss\nreader eye\n")
    credentials.chmod(0o600)

    async def ready() -> None:
        return None

    access = HttpAccess.of(Config.model_validate({"security": {"credentials": str(credentials)}}), HOST)
    sock = bind(HOST, 0, "port")
    async with serve_http(app or create_app("test", ready), sock, dataclasses.replace(access, certificate=certificate)):
        yield int(sock.getsockname()[1])


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the other end ends the connection."""
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while await reader.read(65536):
            pass
    return True


async def drip(writer: asyncio.StreamWriter, byte: bytes) -> None:
    while not writer.transport.is_closing():
        writer.write(byte)
        await asyncio.sleep(0.05)


HALVES = {
    "nothing": b"",
    "half a line": b"GET /rea",
    "half a head": HEAD + b"X: ",
    "no body": SIGN_IN + b"Content-Length: 10\r\n\r\n",
    "half a body": SIGN_IN + b"Content-Length: 10\r\n\r\n{",
    "half a chunk": SIGN_IN + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "no body of what is refused": b"POST /v1/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n",
    "a second half": HEAD + b"\r\n" + HEAD,
}
DRIPS = {
    "a head": (HEAD + b"X: ", b"a"),
    "a body": (SIGN_IN + b"Content-Length: 1000\r\n\r\n", b" "),
    "a body of what is refused": (b"POST /v1/groups HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n", b"a"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_who_never_ends_a_request_is_not_waited_for(
    soon: None, tmp_path: Path, certs: Path, encrypted: bool
) -> None:
    certificate = CertificateFiles(Path(f"{certs / HOST}.pem"), Path(f"{certs / HOST}.key"))
    context = client_context(str(certs / "ca.pem")) if encrypted else None
    async with serving_http(tmp_path, certificate if encrypted else None) as port, asyncio.TaskGroup() as drips:
        waiting, writers = [], []
        for part in HALVES.values():
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            writers.append(writer)  # one that nobody holds ends its connection itself
            writer.write(part)
            waiting.append(ends(reader))
        for head, byte in DRIPS.values():
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            writer.write(head)
            drips.create_task(drip(writer, byte))
            waiting.append(ends(reader))
        assert await served(port, context)
        assert all(await asyncio.gather(*waiting))
        assert await served(port, context)


@pytest.mark.timeout(60)
async def test_a_handshake_that_is_never_finished_is_not_waited_for(soon: None, tmp_path: Path, certs: Path) -> None:
    certificate = CertificateFiles(Path(f"{certs / HOST}.pem"), Path(f"{certs / HOST}.key"))
    async with serving_http(tmp_path, certificate) as port:
        hello = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            client_context(str(certs / "ca.pem")).wrap_bio(ssl.MemoryBIO(), hello, server_hostname=HOST).do_handshake()
        said = hello.read()
        for part in (b"", said[:20], said, said + b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(part)
            assert await ends(reader)
        assert await served(port, client_context(str(certs / "ca.pem")))


async def send_without_end(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    while True:
        await loop.sock_sendall(sock, (HEAD + b"\r\n") * 1000)


@pytest.mark.timeout(60)
async def test_who_never_reads_his_answers_is_not_waited_for(soon: None, tmp_path: Path) -> None:
    async with serving_http(tmp_path) as port:
        # a small buffer of his, and no end of requests
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (HOST, port))
            with pytest.raises(OSError, match=r"reset|pipe"):
                await send_without_end(loop, sock)
        assert await served(port)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_who_opens_connections_ends_his_own(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """Neither a request in progress nor a new caller is in his way."""
    monkeypatch.setattr(service, "most_connections", lambda: 20)
    certificate = CertificateFiles(Path(f"{certs / HOST}.pem"), Path(f"{certs / HOST}.key")) if encrypted else None
    context = client_context(str(certs / "ca.pem")) if encrypted else None
    app, begun, go = FastAPI(), asyncio.Event(), asyncio.Event()

    @app.get("/readyz")
    async def slow() -> dict[str, str]:
        begun.set()
        await go.wait()
        return {}

    async with serving_http(tmp_path, certificate, app) as port:
        good = asyncio.create_task(served(port, context))
        await begun.wait()
        # over TLS none of them says a word, so that their handshakes are counted
        opened = [await asyncio.open_connection(HOST, port) for _ in range(200)]
        ended = [asyncio.create_task(ends(reader)) for reader, _ in opened]
        await asyncio.wait(ended[:180])
        go.set()
        assert await good
        assert await served(port, context)
        assert sum(task.done() for task in ended) < len(opened)
        for task in ended:
            task.cancel()
        for _, writer in opened:
            writer.transport.abort()


async def told(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the last letter of a path, the names of all headers, and how long the body is; before it reads the
    body if the path begins with /early, and else after it."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    size, more = 0, not scope["path"].startswith("/early")
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    names = b" ".join(sorted(name for name, _ in scope["headers"]))
    answer = b"%s %s %d." % (scope["path"][-1:].encode(), names, size)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]})
    await send({"type": "http.response.body", "body": answer})


CHUNKED = b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
LAST = b"GET /z HTTP/1.1\r\n\r\n"
LIMIT = http_connection.MOST_HEAD_BYTES


def head_of(size: int) -> bytes:
    start = b"GET /a HTTP/1.1\r\nX: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


# parts of what is sent, each after the answers that are due until then; all answers; whether the connection serves on. No more is sent than
# what is read before it is refused: the kernel throws away an answer if its connection is closed with something unread.
EXCHANGES: dict[str, tuple[list[tuple[bytes, int]], list[str], bool]] = {
    "a head as long as it may be": ([(head_of(LIMIT), 0)], ["a x 0"], True),
    "a longer head": ([(head_of(LIMIT + 1)[:LIMIT], 0)], ["400 no body"], False),
    "the same in two reads": (
        [(head_of(LIMIT + 1)[:70], 0), (head_of(LIMIT + 1)[70:LIMIT], 0)],
        ["400 no body"],
        False,
    ),
    "a long body": (
        [(b"POST /a HTTP/1.1\r\nContent-Length: 300000\r\n\r\n" + b"a" * 300_000, 0)],
        ["a content-length 300000"],
        True,
    ),
    "chunks": ([(CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n", 0)], ["a transfer-encoding 50000"], True),
    "a trailer": ([(CHUNKED + b"1\r\na\r\n0\r\nX-Much: more\r\n\r\n", 0)], ["a transfer-encoding 1"], True),
    "a trailer alone": (
        [(CHUNKED + b"1\r\na\r\n0\r\nX-Much:", 0), (b" more\r\n\r\n", 0)],
        ["a transfer-encoding 1"],
        True,
    ),
    "many trailers": ([((CHUNKED + b"0\r\n" + b"X-Much: more\r\n" * LIMIT)[:LIMIT], 0)], ["400 no body"], False),
    "an extension of a chunk": ([((CHUNKED + b"1;" + b"a" * LIMIT)[:LIMIT], 0)], ["400 no body"], False),
    "lines before a request": ([(b"\r\n" * (LIMIT // 2), 0)], ["400 no body"], False),
    "a request before the answer": ([(b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n", 0)], ["a  0"], False),
    "half a request before the answer": ([(b"GET /a HTTP/1.1\r\n\r\nGET /b", 0)], ["a  0"], False),
    "no request before the answer": ([(b"GET /a HTTP/1.1\r\n\r\n\0", 0)], ["a  0"], False),
    "a request after the answer": (
        [(b"GET /a HTTP/1.1\r\n\r\n", 0), (b"GET /b HTTP/1.1\r\n\r\n", 1)],
        ["a  0", "b  0"],
        True,
    ),
    "a body after the answer": (
        [(b"POST /early/a HTTP/1.1\r\nContent-Length: 5\r\n\r\n12", 0), (b"345GET /b HTTP/1.1\r\n\r\n", 1)],
        ["a content-length 0", "b  0"],
        True,
    ),
    "no chunk": ([(CHUNKED + b"g\r\n", 0)], ["400 Invalid"], False),
    "no chunk after the answer": (
        [(b"POST /early/a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 0), (b"g\r\n", 1)],
        ["a transfer-encoding 0", "400 Invalid"],
        False,
    ),
    "an upgrade": ([(b"GET /a HTTP/1.1\r\n" + UPGRADE + b"\r\n", 0)], ["a connection upgrade 0"], True),
    "an upgrade with a body": (
        [(b"POST /a HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 2\r\n\r\n{}", 0)],
        ["400 send it without Upgrade"],
        False,
    ),
    "an upgrade with chunks": (
        [(CHUNKED[:-2] + UPGRADE + b"\r\n0\r\n\r\n", 0)],
        ["400 send it without Upgrade"],
        False,
    ),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_nothing_that_follows_a_request_is_taken_for_another(exchange: str) -> None:
    parts, expected, serves_on = EXCHANGES[exchange]
    sock = bind(HOST, 0, "port")
    async with serve_openly(told, sock):
        reader, writer = await asyncio.open_connection(HOST, sock.getsockname()[1])
        received = b""
        for part, after in [*parts, (LAST, len(expected))]:
            while received.count(b"HTTP/1.1 ") < after and (read := await reader.read(65536)):
                received += read
            with contextlib.suppress(ConnectionResetError):
                writer.write(part)
                await writer.drain()
        with contextlib.suppress(ConnectionResetError):
            while not received.endswith(b"z  0.") and (read := await reader.read(65536)):
                received += read
        answers = received.decode().split("HTTP/1.1 ")[1:]
        assert len(answers) == len(expected) + serves_on
        for answer, words in zip(answers, [*expected, "z  0"], strict=False):
            status, _, content = answer.partition("\r\n\r\n")
            assert words.removeprefix("400 ") in content
            assert status.startswith("400" if words.startswith("400") else "200")
        writer.transport.abort()


FRAMES = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
GRPC_HALVES = {
    "nothing": b"",
    "half a preface": FRAMES[:10],
    "no call": FRAMES,
    "half a frame of headers": FRAMES + b"\0\0\x10\1\0\0\0\0\1ab",
    "headers without end": FRAMES + b"\0\0\1\1\0\0\0\0\1\x83",
    "HTTP/1.1": HEAD + b"\r\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_connection_to_grpc_without_a_call_is_not_kept(soon: None, certs: Path, encrypted: bool) -> None:
    certificate = CertificateFiles(Path(f"{certs / HOST}.pem"), Path(f"{certs / HOST}.key"))
    context = client_context(str(certs / "ca.pem")) if encrypted else None
    if context is not None:
        context.set_alpn_protocols(["h2"])
    async with serving(Half(), certificate=certificate if encrypted else None) as port:
        waiting = []
        for part in GRPC_HALVES.values():
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            writer.write(part)
            waiting.append(ends(reader))
        if encrypted:
            reader, _ = await asyncio.open_connection(HOST, port)
            waiting.append(ends(reader))
        assert all(await asyncio.gather(*waiting))


@pytest.mark.timeout(60)
async def test_a_grpc_server_limits_connections_and_serves_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "most_connections", lambda: 20)
    async with serving(Half()) as port, channel(port) as good:
        stub = health_pb2_grpc.HealthStub(good)
        await stub.Check(health_pb2.HealthCheckRequest())
        opened = [await asyncio.open_connection(HOST, port) for _ in range(200)]
        ended = [asyncio.create_task(ends(reader)) for reader, _ in opened]
        while sum(task.done() for task in ended) < 180:
            await asyncio.wait([task for task in ended if not task.done()], return_when=asyncio.FIRST_COMPLETED)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        for task in ended:
            task.cancel()
        for _, writer in opened:
            writer.transport.abort()


@contextlib.contextmanager
def limited(head_s: float, *certificate: str) -> Iterator[int]:
    """The port of a server that is not Headrace's own, started as `headrace serve` starts vLLM's."""
    pytest.importorskip("uvloop", reason="uvloop is not installed: make setup")
    server = ["tests.support.unlimited_server", str(head_s), *certificate]
    command = [sys.executable, "-m", "headrace.net.limited_server", *server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()  # it would wait for its connections


@pytest.mark.timeout(120)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_another_server_ends_what_takes_too_long_or_is_too_much(certs: Path, encrypted: bool) -> None:
    context = client_context(str(certs / "ca.pem")) if encrypted else None
    with limited(3.0, *[f"{certs / HOST}.pem", f"{certs / HOST}.key"][: 2 * encrypted]) as port:
        assert await served(port, context)
        waiting, writers = [], []
        for part in (b"", HEAD + b"X: ", HEAD + b"X: " + b"a" * 2 * http_connection.MOST_HEAD_BYTES):
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
            writers.append(writer)
            writer.write(part)
            waiting.append(ends(reader))
        silent, silence = await asyncio.open_connection(HOST, port)  # over TLS, in the middle of a handshake
        assert all(await asyncio.gather(*waiting, ends(silent)))
        assert await served(port, context)
        silence.close()
        # what asks for another protocol gets an answer in this one
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        writer.write(HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.timeout(120)
async def test_another_server_has_a_most_of_connections(certs: Path) -> None:
    with limited(1e6, f"{certs / HOST}.pem", f"{certs / HOST}.key") as port:
        # none of them says a word, so that their handshakes are counted
        opened = [await asyncio.open_connection(HOST, port) for _ in range(60)]
        ended = [asyncio.create_task(ends(reader)) for reader, _ in opened]
        await asyncio.wait(ended[:40])
        assert await served(port, client_context(str(certs / "ca.pem")))
        assert not all(task.done() for task in ended)
        for task in ended:
            task.cancel()


def test_the_document_has_the_limits() -> None:
    document = (ROOT / "docs" / "security.md").read_text()
    table = document.partition("\n## Limits for strangers\n")[2].partition("\n## ")[0]
    rows = {cells[1].strip(): cells[2:4] for line in table.splitlines() if len(cells := line.split("|")) == 5}
    options: dict[str, Any] = dict(rpc._STRANGERS)
    expected = {
        "a request's head": (f"{http_connection.MOST_HEAD_BYTES // 1024} KiB", "16 KiB of metadata"),
        "time for a head": (
            f"{http_connection.HEAD_S:.0f} s",
            f"{options['grpc.server_handshake_timeout_ms'] // 1000} s",
        ),
        "time for a body": (f"{http_connection.BODY_S:.0f} s", ""),
        "time to read an answer": (f"{http_connection.READING_S:.0f} s", ""),
        "a connection without a request": (
            f"{http_connection.IDLE_S} s",
            f"{options['grpc.max_connection_idle_ms'] // 1000} s",
        ),
        "requests at a time on a connection": ("1", str(options["grpc.max_concurrent_streams"])),
    }
    for name, (http, grpc_limit) in expected.items():
        assert http in rows[name][0], name
        assert grpc_limit in rows[name][1], name
    assert all(re.search(r"1,000.*a quarter", cell) for cell in rows["connections"][:1])
    assert most_connections() <= 1000
