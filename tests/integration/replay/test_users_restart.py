"""A server with users keeps its run over a restart, and lets nobody in without a password, before and after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from headrace.net.credentials import REDIS_ROLES
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import acl, library
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.buffer import enqueue
from tests.support.ports import free_port

PASSWORDS = {role: f"secret-of-{role}" for role in REDIS_ROLES}


@pytest.mark.parametrize("binary", [None, "redis-server"], ids=["valkey", "redis-7.0"])
async def test_a_restart_loses_nothing_where_the_default_user_is_off(
    tmp_path: Path, limits: Limits, binary: str | None
) -> None:
    users = acl.users("guarded", PASSWORDS, own_server=True)
    program = None if binary is None else shutil.which(binary)
    server = EmbeddedServer(
        tmp_path, "127.0.0.1", free_port(), "always", program, users, f"guarded-up:{PASSWORDS['up']}"
    )
    await server.start()
    try:
        async with open_redis(server.url) as redis:
            await library.load(redis)
            client = ReplayClient(redis, "guarded")
            await client.open_run(limits)
            await client.rewind(0, "timeline-0")
            await enqueue(client, range(3))
            before = await client.state()
        await refuses_strangers(server)
        await server.stop()
        await server.start()
        async with open_redis(server.url) as redis:
            assert await ReplayClient(redis, "guarded").state() == before
        await refuses_strangers(server)
    finally:
        await server.stop()


async def refuses_strangers(server: EmbeddedServer) -> None:
    for password in (None, "", "wrong"):
        async with Redis(host=server.host, port=server.port, password=password, protocol=2) as stranger:
            with pytest.raises(RedisError, match=r"Authentication required|NOAUTH|WRONGPASS|invalid"):
                await stranger.ping()
