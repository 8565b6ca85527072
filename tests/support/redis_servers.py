"""Redis servers with settings of their own: TLS, users, replicas, sentinels."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.base.parent import die_with_parent
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.ports import free_port

REDIS = shutil.which("redis-server")


class RedisServer:
    """One redis-server process; `words` are its settings (`--name value`)."""

    def __init__(self, folder: Path, port: int, *words: str) -> None:
        assert REDIS is not None
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"
        self.folder = folder
        self._log = folder / "server.log"
        self._command = [REDIS, *words[:1]] if words and words[0].endswith(".conf") else [REDIS]
        settings = ("--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--logfile", str(self._log))
        self._command += [*settings, *words[len(self._command) - 1 :]]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, preexec_fn=die_with_parent)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def answers(self, client: Redis) -> None:
        """Return once the server takes calls of `client`."""
        assert self._process is not None
        while True:
            with contextlib.suppress(RedisError, OSError):
                await client.ping()
                return
            assert self._process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def redis_server(folder: Path, port: int, *words: str) -> AsyncIterator[RedisServer]:
    """A server on plain TCP, ready."""
    server = RedisServer(folder, port, "--port", str(port), *words)
    server.start()
    try:
        async with Redis.from_url(server.url) as client:
            await server.answers(client)
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def buffer_server(
    folder: Path, load: Callable[[Redis], Awaitable[object]] = library.load, **settings: Any
) -> Iterator[EmbeddedServer]:
    """A server with the buffer's functions, or with what else `load` puts there."""
    server = EmbeddedServer(folder, "127.0.0.1", free_port(), **settings)

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await load(redis)

    try:
        asyncio.run(start())
        yield server
    finally:
        asyncio.run(server.stop())
