"""A client's wire without pool, retries and timeouts: one process can be a thousand clients, and the server is what is measured."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any
from urllib.parse import urlsplit

import hiredis
from redis.asyncio import Redis

from headrace.replay import ReplayClient
from headrace.replay.connection import BufferConnection, refusal


class _Connection(asyncio.Protocol):
    """Replies come in the order of commands."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[int, list[Any], asyncio.Future[list[Any]]]] = deque()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            count, replies, answered = self._waiting[0]
            replies.append(reply)
            if len(replies) == count:
                self._waiting.popleft()
                answered.set_result(replies)

    def connection_lost(self, error: Exception | None) -> None:
        for _, _, answered in self._waiting:
            if not answered.done():
                answered.set_exception(error or ConnectionResetError("the server has closed the connection"))

    def send(self, commands: list[tuple[Any, ...]]) -> asyncio.Future[list[Any]]:
        assert self._transport
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append((len(commands), [], answered))
        self._transport.write(b"".join(hiredis.pack_command(command) for command in commands))
        return answered

    def close(self) -> None:
        assert self._transport
        self._transport.close()


class LightConnection(BufferConnection):
    """One connection. A refusal is raised as by the wire that the services use; a lost connection ends the benchmark."""

    _connection: _Connection

    async def connect(self, url: str) -> None:
        address = urlsplit(url)
        loop = asyncio.get_running_loop()
        assert address.hostname
        assert address.port
        _, self._connection = await loop.create_connection(_Connection, address.hostname, address.port)

    async def command(self, *command: Any) -> Any:
        return (await self.pipeline([command]))[0]

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        replies = await self._connection.send(commands)
        for reply in replies:
            if isinstance(reply, hiredis.HiredisError):
                raise refusal(str(reply))
        return replies

    def hang_up(self) -> None:
        self._connection.close()


class LightClient(ReplayClient):
    """The client that the services use, on such a wire. `redis` is another connection, for what has nothing to do with the run."""

    _connection: LightConnection

    @classmethod
    async def open(cls, redis: Redis, url: str, run_id: str) -> LightClient:
        client = cls(redis, run_id)
        client._connection = LightConnection(redis, run_id)
        await client._connection.connect(url)
        return client

    def hang_up(self) -> None:
        self._connection.hang_up()
