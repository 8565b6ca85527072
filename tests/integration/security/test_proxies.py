"""A proxy that the user's shell names: what runs on this machine, and Headrace's own services anywhere, are reached without it; a user's
remote target is reached through it, and the error names it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import pytest

from headrace.base.addresses import GRPC_PROXIES, HTTP_PROXIES, LOOPBACK, through_proxy, url_through_proxy
from headrace.launch.supervisor import child_environ
from headrace.net import rpc
from tests.support.waiting import wait_until

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "grpc_proxy")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The first line of each request that reaches the proxy of this environment, which answers none."""
    lines: list[str] = []
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        lines.append(connection.recv(4096).decode().partition("\r\n")[0])
                        connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        for name in VARIABLES:
            monkeypatch.setenv(name, f"http://me:secret@{LOOPBACK}:{listener.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield lines
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("proxied", [False, True])
async def test_what_is_on_this_machine_is_called_without_it(asked: list[str], proxied: bool) -> None:
    server = rpc.server()
    port = rpc.listen(server, LOOPBACK, 0, "reward.port")
    await rpc.add_health_and_reflection(server, [])
    await server.start()
    try:
        async with rpc.channel(f"{LOOPBACK}:{port}", proxied=proxied) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
    finally:
        await server.stop(None)
    assert asked == []


async def test_our_services_are_called_directly_and_targets_through_a_proxy(asked: list[str]) -> None:
    for proxied in (False, True):
        async with rpc.channel("environment.invalid:50051", proxied=proxied) as channel:
            assert channel.get_state(try_to_connect=True) == grpc.ChannelConnectivity.IDLE
            if proxied:
                await asyncio.to_thread(wait_until, lambda: asked)
            else:
                while (state := channel.get_state()) != grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    await channel.wait_for_state_change(state)
                assert asked == []
    assert asked[0] == "CONNECT environment.invalid:50051 HTTP/1.1"


def test_the_error_names_the_proxy_and_the_way_round_it(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = through_proxy("gpu-1:50051", GRPC_PROXIES)
    assert said.startswith("; through the proxy http://***@127.0.0.1:")
    assert said.endswith("; NO_PROXY=gpu-1 goes without)")
    assert "secret" not in said
    assert url_through_proxy("https://hub.example/v1").endswith("NO_PROXY=hub.example goes without)")
    assert url_through_proxy("sqlite:///runs/mlflow.db") == url_through_proxy("http://[::1]:5000") == ""
    assert through_proxy("127.0.0.1:50051", GRPC_PROXIES) == through_proxy("localhost:1", HTTP_PROXIES["http"]) == ""
    monkeypatch.setenv("no_proxy", "gpu-1")
    assert through_proxy("gpu-1:50051", GRPC_PROXIES) == ""


def test_a_program_below_up_reaches_this_machine_without_it(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "internal")
    get = "import httpx, sys, urllib.request as u; print(u.urlopen(sys.argv[1]).status, httpx.get(sys.argv[1]).status_code)"
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/"
        environ = child_environ(os.environ)
        done = subprocess.run(
            [sys.executable, "-c", get, url], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
    assert (done.stdout, done.stderr) == ("200 200\n", "")
    assert asked == []
    assert environ["NO_PROXY"].split(",")[0] == "internal"
