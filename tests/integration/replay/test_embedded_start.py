"""How the embedded server is started."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import PortTaken, ServiceError
from headrace.launch import buffer, runs
from headrace.launch.buffer import open_buffer
from headrace.net.service import bind
from headrace.replay import Limits, ReplayClient, connection
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.kept_run import kept_run
from tests.support.ports import free_port

RESERVED = """
import asyncio, os, pathlib, socket, sys
from headrace.net.service import pass_sockets, reserve
from headrace_services.replay.embedded import EmbeddedServer

def steal():
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

async def main():
    server = EmbeddedServer(pathlib.Path(sys.argv[1]), "127.0.0.1", port)
    for _ in range(2):
        assert not steal()
        await server.start()
        assert not steal()
        await server.stop()
    assert not steal()

with reserve("127.0.0.1", "replay.redis_port") as sock:
    port = sock.getsockname()[1]
    os.environ |= pass_sockets([sock])
    asyncio.run(main())
"""

SCRIPT = """
import asyncio, os, pathlib, sys
from headrace_services.replay.embedded import EmbeddedServer
folder = pathlib.Path(sys.argv[1])
os.register_at_fork(after_in_child=(folder / "forked").touch)
server = EmbeddedServer(folder / "replay", "127.0.0.1", int(sys.argv[2]))
asyncio.run(server.start())
asyncio.run(server.stop())
"""


def test_nothing_runs_in_a_forked_copy_of_the_service(tmp_path: Path) -> None:
    """Whose threads of gRPC would be half there."""
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), str(free_port())], check=True, timeout=120)
    assert (tmp_path / "replay" / "appendonlydir").is_dir()
    assert not (tmp_path / "forked").exists()


def test_the_servers_port_is_reserved_before_between_and_after_starts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RESERVED, str(tmp_path)], check=True, timeout=120)


class Thieves:
    """Takes ports that were found to be free, as soon as they are free again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.loot: list[socket.socket] = []

    @contextlib.contextmanager
    def bind(self, host: str, port: int, key: str) -> Iterator[socket.socket]:
        with bind(host, port, key) as sock:
            number = sock.getsockname()[1]
            yield sock
        if len(self.loot) < self.most:
            self.loot.append(bind(host, number, key))


@pytest.mark.parametrize("most", [2, 1000])
def test_when_a_thief_takes_the_port_another_is_chosen_a_few_times(
    tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    async def fill(_: ReplayClient) -> None: ...

    async def look() -> int:
        async with open_buffer(runs.find(str(tmp_path / "kept"))) as replay:
            return (await replay.state()).next_step

    thieves = Thieves(most)
    monkeypatch.setattr(buffer, "bind", thieves.bind)
    with kept_run(tmp_path, "kept", limits, fill) as (_, server), contextlib.ExitStack() as stack:
        asyncio.run(server.stop())
        if most == 2:
            assert asyncio.run(look()) == 0
        else:
            with pytest.raises(ServiceError, match="ports"):
                asyncio.run(look())
        assert 2 <= len(thieves.loot) <= 10
        for sock in thieves.loot:
            stack.enter_context(sock)


async def test_a_failure_is_told_from_the_log_of_its_own_start(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0, "port") as thief:
        port = thief.getsockname()[1]
        with pytest.raises(PortTaken, match=f"127.0.0.1:{port}"):
            await EmbeddedServer(tmp_path, "127.0.0.1", port).start()
    with pytest.raises(ServiceError, match="one of the following: everysec") as failure:
        await EmbeddedServer(tmp_path, "127.0.0.1", free_port(), appendfsync="never").start()
    assert not isinstance(failure.value, PortTaken)


def test_a_folder_that_another_build_wrote_is_told_as_such(
    tmp_path: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(_: ReplayClient) -> None: ...

    async def look() -> None:
        async with open_buffer(runs.find(str(tmp_path / "kept"))):
            pass

    with kept_run(tmp_path, "kept", limits, fill) as (folder, server):
        asyncio.run(server.stop())
        monkeypatch.setattr(connection, "BUILD", "0123abcd")
        with pytest.raises(ServiceError, match=r"build 0123abcd.* headrace up ") as refused:
            asyncio.run(look())
    assert str(folder / "replay") in str(refused.value)
