"""A server at its `maxmemory`: what fills it is refused, and everything else goes on; nobody is charged for the wait."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import ReplayFull
from headrace.records.trajectory import Trajectory
from headrace.replay import Lease, Limits, ReplayClient, Waiting
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.buffer import (
    begin,
    enqueue,
    generate,
    group_of,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    some,
    tighten,
)
from tests.support.ports import free_port
from tests.support.waiting import eventually

LIMIT = 64 << 20


@pytest.fixture
async def replay(tmp_path: Path, redis_binary: str | None, run_id: str, limits: Limits) -> AsyncIterator[ReplayClient]:
    """A run on a server of its own, whose memory ends at `LIMIT`."""
    server = EmbeddedServer(tmp_path, "127.0.0.1", free_port(), binary=redis_binary)
    await server.start()
    client = ReplayClient(open_redis(server.url), run_id)
    await library.load(client.redis)
    await client.redis.config_set("maxmemory", LIMIT)
    await client.open_run(limits)
    yield client
    await client.aclose()
    await server.stop()


async def fill(replay: ReplayClient) -> None:
    """Something that isn't the run's takes all that the server has."""
    await replay.redis.config_set("maxmemory", 0)
    await replay.redis.set("other", b"x" * LIMIT)
    await replay.redis.config_set("maxmemory", LIMIT)


async def make_free(replay: ReplayClient) -> None:
    await replay.redis.delete("other")
    await room_made(replay)


async def room_made(replay: ReplayClient) -> None:
    """As the replay service does every second."""

    async def made() -> bool:
        return await replay.make_room() == 0

    await eventually(made)


async def buffers_free(replay: ReplayClient) -> int:
    """The server's memory that counts against its limit, in bytes, once it holds no connection's buffers: those of a large call count, and
    stay for a while. What waits for the disk doesn't count."""
    await replay.redis.connection_pool.disconnect()
    memory = await replay.redis.info("memory")

    async def small() -> bool:
        nonlocal memory
        memory = await replay.redis.info("memory")
        return memory["mem_clients_normal"] < 2**18

    await eventually(small)
    return int(memory["used_memory"]) - int(memory["mem_not_counted_for_evict"])


def large(lease: Lease, index: int, nbytes: int) -> Trajectory:
    return msgspec.structs.replace(make_trajectory(lease, index), text="7" * nbytes)


async def test_law_6_at_the_memory_limit_what_does_not_fill_it_goes_on(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 8)
    await generate(replay, replica, 2)
    first, second = await replay.lease(replica, 2)
    await push_all(replay, first)
    await fill(replay)

    full = "at its maxmemory and accepts no more data; raise maxmemory .*replay.max_bytes"
    for refused in (
        replay.push(second, make_trajectory(second, 0)),
        replay.push(second, large(second, 0, 2**20)),  # its payload is staged
        replay.save(second, make_trajectory(second, 1)),
        replay.lease(replica, 1),
        enqueue(replay, [8]),
    ):
        with pytest.raises(ReplayFull, match=full):
            await refused
    assert (await replay.stats())["full"] > 2**20
    assert await replay.make_room() > 2**20

    # scores, batches, checkpoints, the fleet, refits
    assert await score_all(replay) == 2
    batch = await reserve(replay, 0)
    await replay.read([t.key for t in batch.trajectories])
    await replay.commit(1, timeline)
    await replay.publish_metrics("train", 0, {"reward": 1.0}, timeline)
    await refit(replay, 1, [replica])
    another = nonce()
    await replay.register(another, {})
    assert (await replay.heartbeat(replica, [second.token])).lost == ()
    await replay.abandon(second, 0, "no")
    await replay.drop_validation(timeline, 1)
    await replay.deregister(another)
    await replay.close(timeline)
    await rewind(replay, 1)
    state = await replay.restore(1, nonce(), nonce(), 8)
    assert state.refill

    await make_free(replay)
    assert (await replay.stats())["full"] == 0
    await replay.redis.set("other", "x")


async def test_a_replay_service_starts_again_at_the_limit(replay: ReplayClient, limits: Limits) -> None:
    await fill(replay)
    await library.load(replay.redis)
    await tighten(replay, limits, lease_s=7.0)
    assert await replay.redis.hget(f"hr:{{{replay.run_id}}}", "lease_ms") == b"7000"


async def test_payloads_of_trained_steps_go_first_when_a_push_is_refused(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    for lease in await replay.lease(replica, 2):
        await replay.push_many([(lease, large(lease, index, 2**22)) for index in range(2)])
    await score_all(replay)
    await reserve(replay, 0)
    await generate(replay, replica, 2)
    await reserve(replay, 1)  # the trainer has trained step 0, and no checkpoint holds it yet
    await refit(replay, 1, [replica])
    (lease,) = await replay.lease(replica, 1)
    await replay.redis.config_set("maxmemory", await buffers_free(replay) - 2**22)
    with pytest.raises(ReplayFull):
        await replay.push(lease, large(lease, 0, 2**20))

    async def pushed() -> bool:
        with contextlib.suppress(ReplayFull):
            await replay.push(lease, large(lease, 0, 2**20))
            return True
        return False

    await eventually(pushed)
    assert (await replay.stats())["full"] == 0
    assert (await replay.read_held_batch(0))[0] == [1]


async def test_law_6_the_highest_tickets_yield_uncharged_to_the_lowest(replay: ReplayClient, limits: Limits) -> None:
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 8)
    leases = await replay.lease(replica, 4)
    lowest, others = leases[:2], leases[2:]
    for lease in others:
        await replay.push_many([(lease, large(lease, index, 2**22)) for index in range(2)])
    await score_all(replay)
    await replay.redis.config_set("maxmemory", await buffers_free(replay) - 2**22)
    with pytest.raises(ReplayFull):
        await replay.push(lowest[0], large(lowest[0], 0, 2**21))
    await buffers_free(replay)
    assert isinstance(await replay.reserve(0, timeline), Waiting)
    await room_made(replay)
    await replay.push_many([(lease, make_trajectory(lease, index)) for lease in lowest for index in range(2)])
    await score_all(replay)
    assert (await reserve(replay, 0)).groups == tuple(lease.group.id for lease in lowest)
    states = [await group_of(replay, lease) for lease in others]
    assert [(held["state"], held["failures"]) for held in states] == [("ready", 0), ("queued", 0)]
    assert (await replay.stats())["requeues"] == {"memory": 1}
    assert some((await replay.state()).counts) == {"reserved": 2, "ready": 1, "queued": 5}
