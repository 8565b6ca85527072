from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from headrace.replay.connection import open_redis
from services.replay import library
from services.replay.embedded import EmbeddedServer
from tests.conftest import free_port

# The oldest server that is supported, and the one that comes with the package.
SERVERS = {"valkey": None, "redis-7.0": shutil.which("redis-server")}


@pytest.fixture(scope="session", params=SERVERS)
def redis_binary(request: pytest.FixtureRequest) -> str | None:
    if request.param != "valkey" and SERVERS[request.param] is None:
        pytest.skip("no redis-server is installed")
    return SERVERS[request.param]


@pytest.fixture(scope="session")
def redis_url(redis_binary: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The buffer's laws hold on both servers: every test of this folder runs on each."""
    server = EmbeddedServer(tmp_path_factory.mktemp("replay"), "127.0.0.1", free_port(), binary=redis_binary)

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await library.load(redis)

    asyncio.run(start())
    yield server.url
    asyncio.run(server.stop())
