"""What the replay service checks when it starts may also fail later, for a while. Then it waits, says why, and goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from headrace.base.errors import ReplayUnavailable
from headrace.cli.app import app
from headrace.config import Config
from headrace.net import credentials
from headrace.net.credentials import REDIS_ROLES
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import acl, library
from headrace_services.replay.embedded import EmbeddedServer
from headrace_services.replay.main import _Buffer, make_limits, running
from tests.support.buffer import enqueue, nonce
from tests.support.ports import free_port
from tests.support.waiting import eventually

RUN = "outage"


@pytest.fixture
async def server(tmp_path: Path, redis_binary: str | None) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path, "127.0.0.1", free_port(), binary=redis_binary)
    await server.start()
    yield server
    await server.stop()


@contextlib.asynccontextmanager
async def watched(url: str, limits: Limits) -> AsyncIterator[tuple[_Buffer, ReplayClient]]:
    """The replay service's watch over a run whose trainer has started, and a client. The watch is still there at the end."""
    client, other = (ReplayClient(open_redis(url, retries=0), RUN) for _ in range(2))
    buffer = _Buffer(client, limits, url)
    await buffer.prepare()
    state = await client.rewind(0, nonce())  # ends the timeline that the run began with
    watching = asyncio.create_task(buffer.watch())
    try:
        await enqueue(client, range(3))
        yield buffer, other
        assert not watching.done()
        after = await client.state()
        assert (after.incarnation, after.counts) == (state.incarnation, {"queued": 3})
    finally:
        watching.cancel()
        results = await asyncio.gather(watching, return_exceptions=True)
        await client.aclose()
        await other.aclose()
    assert isinstance(results[0], asyncio.CancelledError), results


def says(buffer: _Buffer, *words: str) -> Callable[[], Awaitable[bool]]:
    async def said() -> bool:
        reason = await buffer.trouble()
        return reason is not None and all(word in reason for word in words)

    return said


async def _ready(buffer: _Buffer) -> bool:
    return await buffer.trouble() is None


async def goes_on(buffer: _Buffer) -> None:
    await eventually(lambda: _ready(buffer))


async def test_law_6_a_server_that_is_briefly_a_replica_is_waited_for(server: EmbeddedServer, limits: Limits) -> None:
    async with watched(server.url, limits) as (buffer, other):
        await other.redis.replicaof("127.0.0.1", free_port())  # type: ignore[no-untyped-call]
        await eventually(says(buffer, "replica", "sentinel://"))
        await other.redis.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
        await goes_on(buffer)


async def test_law_6_functions_that_were_flushed_are_loaded_again(
    server: EmbeddedServer, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of the run was lost, so the service must not take itself for replaced by another."""
    async with watched(server.url, limits) as (buffer, other):
        await other.redis.function_flush()

        async def loaded() -> bool:
            return bool(await other.redis.function_list())

        await eventually(loaded)
        await goes_on(buffer)
    assert "another replay service" not in caplog.text


async def test_law_6_a_server_with_too_little_memory_is_waited_for(server: EmbeddedServer, limits: Limits) -> None:
    async with watched(server.url, limits) as (buffer, other):
        await other.redis.config_set("maxmemory", limits.max_bytes)
        await other.redis.function_flush()
        await eventually(says(buffer, "CONFIG SET maxmemory"))
        await other.redis.config_set("maxmemory", 0)
        await goes_on(buffer)


@pytest.fixture
async def guarded(server: EmbeddedServer) -> AsyncIterator[tuple[Redis, str]]:
    """The server's administrator, and the address with which the services of the run log in. They may not load functions."""
    passwords = {role: f"secret-of-{role}" for role in REDIS_ROLES}
    async with open_redis(server.url) as admin:
        await library.load(admin)
        for line in acl.users(RUN, passwords)[1:]:
            await admin.execute_command("ACL", "SETUSER", *line.split()[1:])
        yield admin, server.url.replace("redis://", f"redis://{RUN}-up:{passwords['up']}@")


async def test_law_6_an_administrator_is_waited_for_to_load_functions(
    guarded: tuple[Redis, str], limits: Limits
) -> None:
    """On a shared server the service may not load them."""
    admin, url = guarded
    async with watched(url, limits) as (buffer, _):
        await admin.function_flush()
        await eventually(says(buffer, "headrace functions", "FUNCTION LOAD"))
        await library.load(admin)
        await goes_on(buffer)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [(["resetpass", ">another"], ["resetpass", ">secret-of-up"]), (["off"], ["on"])],
    ids=["another password", "switched off"],
)
async def test_law_6_a_login_that_is_refused_for_a_while_is_waited_for(
    guarded: tuple[Redis, str], limits: Limits, wrong: list[str], right: list[str]
) -> None:
    admin, url = guarded
    user = f"{RUN}-up"
    async with watched(url, limits) as (buffer, other):
        await other.state()
        await admin.execute_command("ACL", "SETUSER", user, *wrong)
        await admin.execute_command("CLIENT", "KILL", "USER", user)
        await eventually(says(buffer, f"refuses the login of user '{user}'", "headrace acl"))
        with pytest.raises(ReplayUnavailable):  # of the connection that is closed
            await other.state()
        with pytest.raises(ReplayUnavailable, match="refuses the login"):
            await other.state()
        await admin.execute_command("ACL", "SETUSER", user, *right)
        await goes_on(buffer)


@pytest.mark.parametrize("right", ["fcall", "hget", "zrange"])
async def test_law_6_a_right_that_is_taken_away_is_waited_for(
    guarded: tuple[Redis, str], limits: Limits, right: str
) -> None:
    """Of a command of the clients, or of one inside the functions."""
    admin, url = guarded
    user = f"{RUN}-up"
    async with watched(url, limits) as (buffer, other):
        await other.state()
        await admin.execute_command("ACL", "SETUSER", user, f"-{right}")
        await eventually(says(buffer, f"user '{user}'", right, "headrace acl", "(since "))
        await admin.execute_command("ACL", "SETUSER", user, f"+{right}")
        await goes_on(buffer)


async def test_law_6_a_replaced_service_says_so_once_through_an_outage(
    server: EmbeddedServer, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(server.url, limits) as (buffer, other):
        await other.open_run(limits)
        await eventually(lambda: _logged(caplog))
        for _ in range(2):
            await other.redis.function_flush()
            await eventually(says(buffer, "no functions"))
            await goes_on(buffer)
        assert caplog.text.count("another replay service") == 1


async def _logged(caplog: pytest.LogCaptureFixture) -> bool:
    return "another replay service" in caplog.text


async def test_status_says_since_when_the_run_waits_for_a_server_and_why(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    secrets = tmp_path / "credentials"
    settings = {
        "run": {"id": RUN, "dir": str(tmp_path)},
        "replay": {"port": free_port(), "redis_url": server.url},
        "security": {"credentials": str(secrets)},
    }
    config = Config.model_validate(settings)
    credentials.complete(secrets, credentials.list_roles(config, redis=False))
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(settings))

    async def status() -> str:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["status", str(file)])
        return " ".join((result.output + str(result.exception or "")).split())

    def shows(*words: str) -> Callable[[], Awaitable[bool]]:
        async def shown() -> bool:
            said = await status()
            return all(word in said for word in words)

        return shown

    stop = asyncio.Event()
    async with running(config, make_limits(config), stop) as (_, work), open_redis(server.url) as redis:
        working = asyncio.create_task(work())
        assert "buffer's server" not in await status()
        await redis.replicaof("127.0.0.1", free_port())  # type: ignore[no-untyped-call]
        await eventually(shows("waits for the buffer's server", "is a replica of", "(since "))
        await redis.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
        await eventually(shows("next step"))
        await redis.execute_command("ACL", "SETUSER", "default", "-fcall")  # for `status` too
        await eventually(shows("waits for the buffer's server", "may not run FCALL", "headrace acl", "(since "))
        await redis.execute_command("ACL", "SETUSER", "default", "+fcall")
        await eventually(shows("next step"))
        await server.stop()
        await eventually(shows("waits for the buffer's server", "can't be reached", "(since "))
        await server.start()
        stop.set()
        await working
