from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from headrace.replay.connection import open_redis
from headrace_services.replay.embedded import EmbeddedServer
from tests.properties import clock
from tests.support.ports import free_port

# The server that comes with the package, and the oldest that is supported.
SERVERS = {"valkey": None, "redis-7.0": shutil.which("redis-server")}


@pytest.fixture(scope="session", params=SERVERS)
def server_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def clocked_url(server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server with the buffer's functions, whose clock the test sets. Its own: the clock is the whole server's."""
    folder, binary = tmp_path_factory.mktemp("replay"), SERVERS[server_kind]
    server = EmbeddedServer(folder, "127.0.0.1", free_port(), appendfsync="no", binary=binary)

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await clock.load(redis)

    asyncio.run(start())
    yield server.url
    asyncio.run(server.stop())
