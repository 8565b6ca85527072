from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.replay.wire import open_redis
from services.replay.embedded import EmbeddedServer
from tests.conftest import free_port
from tests.properties import clock


@pytest.fixture(scope="session")
def clocked_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey with the buffer's functions, whose clock the test sets. Its own: the clock is the whole server's."""
    server = EmbeddedServer(tmp_path_factory.mktemp("replay"), "127.0.0.1", free_port(), appendfsync="no")

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await clock.load(redis)

    asyncio.run(start())
    yield server.url
    asyncio.run(server.stop())
