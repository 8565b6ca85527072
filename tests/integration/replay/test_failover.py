"""A failover: the primary dies, a replica takes its place, and clients go on by themselves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from headrace.base.errors import ReplayUnavailable
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from tests.support.buffer import begin, enqueue, generate, make_trajectory, reserve, total
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer, redis_server
from tests.support.waiting import eventually

HOST = "127.0.0.1"


class Endpoint:
    """A TCP address that can be moved to another server, as a virtual IP, a proxy or a service's name is."""

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward, back = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(onward, writer))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()
    sink.close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[RedisServer, RedisServer]]:
    """A primary with the buffer's functions and a replica that follows it."""
    ports = free_port(), free_port()
    async with (
        redis_server(
            tmp_path / "primary", ports[0], "--appendonly", "yes", "--repl-diskless-sync-delay", "0"
        ) as primary,
        redis_server(tmp_path / "replica", ports[1], "--replicaof", HOST, str(ports[0])) as replica,
    ):
        async with open_redis(primary.url) as redis:
            await library.load(redis)
            await caught_up(redis)
        yield primary, replica


async def caught_up(primary: Redis) -> None:
    """Return once a replica has everything."""
    await eventually(lambda: _has_replica(primary))
    assert await primary.wait(1, 5000) == 1


async def _has_replica(primary: Redis) -> bool:
    info = await primary.info("replication")
    return info["connected_slaves"] == 1 and info["slave0"]["state"] == "online"


async def promote(replica: RedisServer) -> None:
    async with Redis.from_url(replica.url) as redis:
        await redis.replicaof("NO", "ONE")


@pytest.fixture
async def endpoint(pair: tuple[RedisServer, RedisServer]) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    server = await endpoint.listen()
    endpoint.target = pair[0].port
    yield endpoint
    server.close()


async def test_law_1_clients_follow_their_address_after_a_failover(
    pair: tuple[RedisServer, RedisServer], endpoint: Endpoint, run_id: str, limits: Limits
) -> None:
    """kill -9 of the primary, the replica promoted, the address moved: calls under way wait for it, nothing is lost."""
    primary, replica = pair
    replay = ReplayClient(open_redis(f"redis://{HOST}:{endpoint.port}/0"), run_id)
    await replay.open_run(limits)
    worker = await begin(replay, 6)
    await generate(replay, worker, most=2)
    batch = await reserve(replay, 0)
    (lease,) = await replay.lease(worker, 1)
    await replay.wait_ready(0.01)
    async with open_redis(primary.url) as redis:
        await caught_up(redis)

    primary.kill()
    calls = [asyncio.create_task(call) for call in (replay.push(lease, make_trajectory(lease, 0)), reserve(replay, 0))]
    await promote(replica)
    endpoint.target = replica.port

    assert (await asyncio.gather(*calls))[1] == batch
    assert len(await replay.read([t.key for t in batch.trajectories])) == 4
    await replay.push(lease, make_trajectory(lease, 1))
    assert await total(replay) == 6
    await replay.aclose()


async def test_a_demoted_primary_is_left_for_the_new_one(
    pair: tuple[RedisServer, RedisServer], endpoint: Endpoint, run_id: str, limits: Limits
) -> None:
    """A planned failover kills nothing: the connections still stand, to a server that takes no writes any more."""
    primary, replica = pair
    replay = ReplayClient(open_redis(f"redis://{HOST}:{endpoint.port}/0"), run_id)
    await replay.open_run(limits)
    async with open_redis(primary.url) as redis:
        await redis.execute_command("FAILOVER", "TO", HOST, replica.port)
        await eventually(lambda: _is(redis, "slave"))
    endpoint.target = replica.port
    assert await enqueue(replay, range(3)) == 3
    await replay.register("r", {})
    await replay.aclose()


async def _is(redis: Redis, role: str) -> bool:
    return bool((await redis.info("replication"))["role"] == role)


async def test_an_address_that_only_leads_to_a_replica_is_said(
    pair: tuple[RedisServer, RedisServer], run_id: str, limits: Limits
) -> None:
    replay = ReplayClient(open_redis(pair[1].url, retries=1), run_id)
    with pytest.raises(ReplayUnavailable, match="has become a replica of another"):
        await replay.open_run(limits)
    await replay.aclose()


@pytest.mark.slow
async def test_law_1_clients_follow_the_sentinels_to_the_new_primary(
    pair: tuple[RedisServer, RedisServer], tmp_path: Path, run_id: str, limits: Limits
) -> None:
    primary, replica = pair
    folder = tmp_path / "sentinel"
    folder.mkdir()
    settings = folder / "sentinel.conf"
    port = free_port()
    settings.write_text(
        f"sentinel monitor buffer {HOST} {primary.port} 1\n"
        "sentinel down-after-milliseconds buffer 500\nsentinel failover-timeout buffer 2000\n"
    )
    sentinel = RedisServer(folder, port, str(settings), "--port", str(port), "--sentinel")
    sentinel.start()
    mute = socket.create_server((HOST, 0))
    try:
        async with Redis.from_url(sentinel.url) as asked:
            await sentinel.answers(asked)
            await eventually(lambda: _knows_a_replica(asked))
        # the first sentinel is down, and the second hangs
        url = f"sentinel://{HOST}:1,{HOST}:{mute.getsockname()[1]},{HOST}:{port}/buffer"
        replay = ReplayClient(open_redis(url, retries=30), run_id)
        await replay.open_run(limits)
        worker = await begin(replay, 4)
        async with open_redis(primary.url) as redis:
            await caught_up(redis)
        primary.kill()
        await generate(replay, worker, most=2)
        assert (await reserve(replay, 0)).step == 0
        assert await total(replay) == 4
        async with open_redis(replica.url) as redis:
            assert await _is(redis, "master")
        await replay.aclose()
        joined = await ReplayClient.connect(url, run_id)
        assert (await joined.state()).next_step == 1
        await joined.aclose()
    finally:
        mute.close()
        sentinel.kill()


async def _knows_a_replica(sentinel: Redis) -> bool:
    known = await sentinel.execute_command("SENTINEL", "REPLICAS", "buffer")
    return len(known) == 1
