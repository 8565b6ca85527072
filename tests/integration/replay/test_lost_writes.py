"""What a server may lose, and that the laws hold after it: the append-only file under each setting, and an asynchronous failover.

A server loses the newest of its writes, never one from the middle: what is left is a state that the run was in before. The trainer here
is the state that a real one keeps (its ledger, its checkpoints) and the decision that a real one makes at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from pyroaring import BitMap
from redis.asyncio import Redis

from headrace.base.errors import Fenced, InvalidCall, WrongStep
from headrace.records.score import Score
from headrace.replay import Lease, Limits, ReplayClient, Reservation
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from headrace_services.trainer.control.checkpoint import CheckpointState, Ledger
from headrace_services.trainer.control.resume import restore_reason
from tests.support.buffer import contents, make_group, make_trajectory, nonce, push_all, refit
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer, redis_server
from tests.support.waiting import eventually

PROMPTS = 14


@dataclasses.dataclass
class Checkpoint:
    state: CheckpointState
    trained: list[int]


class Trainer:
    """Trains P prompts a step, saves every `save_period` versions, starts from its newest checkpoint as a real one does."""

    def __init__(self, replay: ReplayClient, save_period: int = 2) -> None:
        self.replay = replay
        self.save_period = save_period
        self.checkpoints: list[Checkpoint] = []
        self.version = 0
        self.trained: list[int] = []
        self.timeline = ""
        self.restored = False

    async def start(self) -> None:
        newest = self.checkpoints[-1] if self.checkpoints else None
        reason = restore_reason(newest.state if newest else None, await self.replay.state())
        self.version, self.trained = (newest.state.version, list(newest.trained)) if newest else (0, [])
        self.timeline, self.restored = nonce(), reason is not None
        if self.restored:
            last = max(self.trained, default=-1)
            state = await self.replay.restore(self.version, self.timeline, nonce(), last)
        else:
            state = await self.replay.rewind(self.version, self.timeline)
        if state.refill:
            missing = Ledger(self.trained).missing(state.enqueued, BitMap())
            await self.replay.enqueue([make_group(order) for order in missing], self.timeline, refill=True)
            await self.replay.end_refill(self.timeline)

    async def feed(self, end: int = PROMPTS) -> None:
        """Enqueue the prompts up to order `end` that the server does not know."""
        state = await self.replay.state()
        await self.replay.enqueue([make_group(order) for order in range(state.enqueued + 1, end)], self.timeline)

    async def reserve(self) -> None:
        batch = await self.replay.reserve(self.version, self.timeline)
        assert isinstance(batch, Reservation), "the run stands still (law 6)"
        self.batch = batch

    async def train(self) -> None:
        """Laws 2 and 3 are checked on what was handed out, law 1 on what was trained before."""
        batch = self.batch
        groups = await self.replay.read_groups(batch.groups)
        pairs = await self.replay.read([t.key for t in batch.trajectories])
        assert Counter(t.group_id for t, _ in pairs) == {group.id: group.n for group in groups}
        for trajectory, score in pairs:
            assert score.status == "SCORED"
            assert 0 <= self.version - trajectory.oldest_version <= 1
        orders = [group.order for group in groups]
        assert not set(orders) & set(self.trained)
        self.trained += orders
        self.version += 1
        if self.version % self.save_period == 0:
            await self.save()

    async def save(self) -> None:
        run = await self.replay.state()
        state = CheckpointState(
            version=self.version,
            timeline=self.timeline,
            incarnation=run.incarnation,
            cursor=max(self.trained) + 1,
            run_id=self.replay.run_id,
        )
        self.checkpoints.append(Checkpoint(state, list(self.trained)))
        await self.replay.commit(self.version, self.timeline)


async def live(trainer: Trainer, done: Callable[[int, str], Awaitable[None]]) -> list[Lease]:
    """Four steps of a run, two checkpoints; `done(step, what)` is called after each thing that happens. Returns all leases."""
    await trainer.start()
    replica, held = nonce(), []
    await trainer.replay.register(replica, {})
    for step in range(4):
        await refit(trainer.replay, step, [replica])
        await trainer.feed(6 + 2 * step)
        await done(step, "enqueue")
        leases = await trainer.replay.lease(replica, 64)
        held += leases
        await done(step, "lease")
        for lease in leases:
            await push_all(trainer.replay, lease)
            await done(step, "push")
        await score(trainer.replay)
        await done(step, "score")
        await trainer.reserve()
        await done(step, "reserve")
        await trainer.train()
        await done(step, "save")
    return held


async def score(replay: ReplayClient) -> None:
    while jobs := await replay.take_scoring({"math": 64}):
        assert not any(await replay.score_many([(job, Score("SCORED", 1.0)) for job in jobs]))


async def end_as_the_laws_want(trainer: Trainer, held: Sequence[Lease]) -> None:
    """The old trainer is refused, and the old leases change nothing; a new trainer takes every prompt to its end, once."""
    with pytest.raises(WrongStep):  # the running trainer notices
        await trainer.replay.reserve(trainer.version, trainer.timeline)
    with pytest.raises(WrongStep):  # and so does its feeder, which would leave out what was lost
        await trainer.replay.enqueue([make_group(12)], trainer.timeline)
    await trainer.start()
    before = await contents(trainer.replay)
    for lease in held:
        with contextlib.suppress(Fenced, InvalidCall):  # it may repeat what is there
            await trainer.replay.push(lease, make_trajectory(lease, 0))
    assert await contents(trainer.replay) == before
    await trainer.feed()
    replica = nonce()
    await trainer.replay.register(replica, {})
    while len(trainer.trained) < PROMPTS:
        await refit(trainer.replay, trainer.version, [replica])
        for lease in await trainer.replay.lease(replica, 64):
            await push_missing(trainer.replay, lease)
        await score(trainer.replay)
        await trainer.reserve()
        await trainer.train()
    assert sorted(trainer.trained) == list(range(PROMPTS))


async def push_missing(replay: ReplayClient, lease: Lease) -> None:
    for index in lease.missing:
        await replay.push(lease, make_trajectory(lease, index))


MOMENTS = ["enqueue", "lease", "push", "score", "reserve", "save"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("save_period", [2, 3])
async def test_laws_1_to_4_hold_after_a_failover_to_a_lagging_replica(
    tmp_path: Path, run_id: str, limits: Limits, moment: str, save_period: int
) -> None:
    """Replication is asynchronous: the replica that takes over knows nothing of what came after `moment` of the third step.

    A checkpoint of version 4 is past all that it knows; one of version 3 only if the third batch was not reserved yet.
    """
    ports = free_port(), free_port()
    async with (
        redis_server(tmp_path / "primary", ports[0], "--repl-diskless-sync-delay", "0") as primary,
        redis_server(tmp_path / "replica", ports[1], "--replicaof", "127.0.0.1", str(ports[0])) as replica,
    ):
        await opened(primary.url, run_id, limits)

        trainer = Trainer(ReplayClient(open_redis(primary.url), run_id), save_period)
        held = await live(trainer, at(moment, lambda: fall_behind(primary, replica)))
        await trainer.replay.aclose()
        primary.kill()
        trainer.replay = ReplayClient(open_redis(replica.url), run_id)
        await end_as_the_laws_want(trainer, held)
        assert trainer.restored == (save_period == 2 or moment not in ("reserve", "save"))
        await trainer.replay.aclose()


def at(moment: str, act: Callable[[], Awaitable[None]]) -> Callable[[int, str], Awaitable[None]]:
    """For `live`: `act` once, when `moment` of the third step is first reached."""
    todo = [act]

    async def done(step: int, what: str) -> None:
        if (step, what) == (2, moment) and todo:
            await todo.pop()()

    return done


async def opened(url: str, run_id: str, limits: Limits) -> None:
    async with open_redis(url) as redis:
        await library.load(redis)
        await ReplayClient(redis, run_id).open_run(limits)


async def fall_behind(primary: RedisServer, replica: RedisServer) -> None:
    """The replica has everything up to here, and nothing that comes."""
    async with Redis.from_url(primary.url) as source, Redis.from_url(replica.url) as copy:
        while (await copy.info("replication"))["master_link_status"] != "up":  # noqa: ASYNC110 - happens in the server
            await asyncio.sleep(0.01)
        await source.set("headrace:run", "marked")
        assert await source.wait(1, 5000) == 1
        await copy.replicaof("NO", "ONE")


@pytest.mark.parametrize("moment", MOMENTS)
async def test_laws_1_to_4_hold_after_a_power_cut_took_the_files_end(
    tmp_path: Path, redis_binary: str | None, run_id: str, limits: Limits, moment: str
) -> None:
    """Under `everysec` the disk may lack the last second: here it lacks all that came after `moment`."""
    folder, kept = tmp_path / "replay", tmp_path / "disk"
    server = EmbeddedServer(folder, "127.0.0.1", free_port(), "everysec", binary=redis_binary)
    await server.start()
    await opened(server.url, run_id, limits)

    async def keep() -> None:
        async with Redis.from_url(server.url) as redis:
            while (await redis.info("persistence"))["aof_buffer_length"]:  # noqa: ASYNC110 - happens in the server
                await asyncio.sleep(0.01)
        shutil.copytree(folder, kept)

    trainer = Trainer(ReplayClient(open_redis(server.url), run_id))
    held = await live(trainer, at(moment, keep))
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    shutil.rmtree(folder)
    kept.rename(folder)
    await server.start()
    await end_as_the_laws_want(trainer, held)
    await trainer.replay.aclose()
    await server.stop()


# by day with the default; `always` writes before it answers in any case
@pytest.mark.parametrize("appendfsync", ["everysec", pytest.param("always", marks=pytest.mark.nightly)])
async def test_law_1_a_killed_server_loses_nothing_that_it_answered(
    tmp_path: Path, redis_binary: str | None, run_id: str, limits: Limits, appendfsync: str
) -> None:
    """kill -9 takes the process, not what it has written: whatever appendfsync says, the file then holds every answered call. It writes
    before it answers, unless it goes by `everysec` and the last sync is still under way on a slow disk."""
    server = EmbeddedServer(tmp_path, "127.0.0.1", free_port(), appendfsync, binary=redis_binary)
    await server.start()
    await opened(server.url, run_id, limits)
    trainer = Trainer(ReplayClient(open_redis(server.url), run_id))
    kills = 0

    async def written() -> bool:
        return (await trainer.replay.redis.info("persistence"))["aof_buffer_length"] == 0

    async def kill(step: int, what: str) -> None:
        nonlocal kills
        if step == 2:
            before = await contents(trainer.replay)
            await eventually(written)
            os.kill(server.pid, signal.SIGKILL)
            await server.wait()
            await server.start()
            assert await contents(trainer.replay) == before
            kills += 1

    await live(trainer, kill)
    assert kills >= len(MOMENTS)
    await trainer.replay.aclose()
    await server.stop()
