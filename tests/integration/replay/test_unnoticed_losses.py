"""Writes that the server lost while nobody noticed: nothing that was trained or reserved went with them. Who wrote them does so again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from headrace.config import Config
from headrace.records.trajectory import Group
from headrace.replay import BufferRetry, End, Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.run.journal import JOURNAL, Journal
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from headrace_services.replay.main import _Buffer
from headrace_services.trainer.control.feeder import Feeder
from headrace_services.trainer.control.validation import Validation
from tests.support.buffer import generate, healthy_replica, make_group, nonce, reserve, rewind
from tests.support.ports import free_port
from tests.support.waiting import eventually


class CutServer:
    """A server whose append-only file the test cuts: what came last is lost."""

    def __init__(self, folder: Path, binary: str | None) -> None:
        self.server = EmbeddedServer(folder, "127.0.0.1", free_port(), "everysec", binary=binary)
        self.folder = folder
        self._kept = 0

    @property
    def _file(self) -> Path:
        (file,) = self.folder.rglob("*.incr.aof")
        return file

    async def mark(self, replay: ReplayClient) -> None:
        """What comes from now on will be lost."""

        async def written() -> bool:
            return (await replay.redis.info("persistence"))["aof_buffer_length"] == 0

        await eventually(written)
        self._kept = self._file.stat().st_size

    async def lose(self) -> int:
        """The machine loses power; returns how many bytes are lost."""

        async def written() -> bool:  # a server that waits for the disk answers before it has written
            return self._file.stat().st_size > self._kept

        await eventually(written)
        os.kill(self.server.pid, signal.SIGKILL)
        await self.server.wait()
        lost = self._file.stat().st_size - self._kept
        os.truncate(self._file, self._kept)
        await self.server.start()
        return lost


@pytest.fixture
async def cut(tmp_path: Path, redis_binary: str | None) -> AsyncIterator[CutServer]:
    cut = CutServer(tmp_path, redis_binary)
    await cut.server.start()
    yield cut
    await cut.server.stop()


@pytest.fixture
async def replay(cut: CutServer, run_id: str, limits: Limits) -> AsyncIterator[ReplayClient]:
    client = ReplayClient(open_redis(cut.server.url), run_id)
    await library.load(client.redis)
    await client.open_run(limits)
    yield client
    await client.aclose()


class Prompts:
    def __init__(self, total: int) -> None:
        self.total = total

    def train(self, orders: Sequence[int]) -> list[Group]:
        return [make_group(order) for order in orders]


def marked(replay: ReplayClient, name: str, mark: Callable[[], Awaitable[None]]) -> None:
    """`mark` before the first call of this method."""
    method, todo = getattr(replay, name), [mark]

    async def call(*args: object) -> object:
        if todo:
            await todo.pop()()
        return await method(*args)

    setattr(replay, name, call)


def feeder_of(replay: ReplayClient, timeline: str, total: int, folder: Path) -> Feeder:
    config = Config.model_validate({"grpo": {"num_prompts_per_step": 2, "max_num_steps": 100}})
    retry = BufferRetry(first_pause_s=0.05, last_pause_s=0.05)
    return Feeder(config, replay, retry, timeline, Prompts(total), Journal(folder / JOURNAL))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def feeding(replay: ReplayClient, timeline: str, total: int, folder: Path) -> AsyncIterator[Feeder]:
    feeder = feeder_of(replay, timeline, total, folder)
    task = asyncio.create_task(feeder.run(lambda: range(total)))
    try:
        yield feeder
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_law_6_a_lost_close_is_made_good(cut: CutServer, replay: ReplayClient) -> None:
    """Else the trainer would wait for a batch that never comes."""
    marked(replay, "close", lambda: cut.mark(replay))
    timeline = (await replay.state()).timeline

    async def closed() -> bool:
        return (await replay.state()).closed

    async with feeding(replay, timeline, 1, cut.folder):
        await eventually(closed)
        assert await cut.lose() > 0
        await eventually(closed)
        assert await replay.reserve(0, timeline) == End(1)


async def test_law_6_a_lost_end_of_a_refill_is_made_good(cut: CutServer, replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await replay.enqueue([make_group(order) for order in range(4)], timeline)
    await generate(replay, await healthy_replica(replay))
    await reserve(replay, 0)
    await replay.commit(1, timeline)
    timeline = (await rewind(replay, 0)).timeline
    marked(replay, "end_refill", lambda: cut.mark(replay))

    async def complete() -> bool:
        return not (await replay.state()).refill

    # alone: a feeder that runs beside it could end the refill first, and then nothing would be written after the mark
    await feeder_of(replay, timeline, 4, cut.folder).refill(range(4))
    assert await complete()
    async with feeding(replay, timeline, 4, cut.folder):
        assert await cut.lose() > 0
        await eventually(complete)
    await reserve(replay, 0)


async def test_law_1_lost_prompts_of_a_refill_are_enqueued_before_it_ends(cut: CutServer, replay: ReplayClient) -> None:
    """Each batch of a refill is a call of its own, and nothing in a later one says that an earlier one is gone."""
    timeline = (await replay.restore(0, nonce(), nonce(), 3)).timeline
    await cut.mark(replay)

    async def lose() -> None:
        assert await cut.lose() > 0

    marked(replay, "end_refill", lose)
    assert await feeder_of(replay, timeline, 4, cut.folder).refill(range(4)) == 8
    state = await replay.state()
    assert (state.refill, state.counts["queued"]) == (False, 4)


async def test_a_lost_validation_is_enqueued_again(cut: CutServer, replay: ReplayClient) -> None:
    state = await replay.rewind(0, nonce())
    groups = [make_group(order, lane="validation") for order in range(3)]
    validation = Validation(replay, BufferRetry(10.0), state.timeline, 0)
    await cut.mark(replay)
    await validation.start(groups)
    assert await cut.lose() > 0
    assert not await validation.poll()
    assert (await replay.stats())["counts"]["validation"]["queued"] == 3
    await generate(replay, await healthy_replica(replay))
    assert await validation.poll()
    assert validation.metrics()["evaluated"] == 3
    # what was dropped on purpose does not come back
    await validation.abandon()
    assert await replay.enqueue(groups, state.timeline, validation=0) == 0


async def test_lost_limits_are_set_again_by_the_newest_replay_service(
    cut: CutServer, replay: ReplayClient, limits: Limits
) -> None:
    async def limit() -> int:
        return int(await replay.redis.hget(f"hr:{{{replay.run_id}}}", "max_attempts"))

    def service(attempts: int) -> _Buffer:
        client = ReplayClient(open_redis(cut.server.url), replay.run_id)
        return _Buffer(client, dataclasses.replace(limits, max_attempts=attempts), cut.server.url)

    earlier, newest = service(7), service(8)
    await earlier.prepare()
    await cut.mark(replay)
    await newest.prepare()
    assert await limit() == 8
    assert await cut.lose() > 0
    assert await limit() == 7
    watching = [asyncio.create_task(buffer.watch()) for buffer in (newest, earlier)]
    try:
        await eventually(partial(_equals, limit, 8))
        await newest.prepare()  # it starts again: the earlier one keeps still
        for _ in range(3):
            await eventually(partial(_looks_again, earlier, earlier.latest.stats))
            assert await limit() == 8
        assert [task.done() for task in watching] == [False, False]
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for buffer in (earlier, newest):
            await buffer._client.aclose()


async def test_law_4_fencing_an_earlier_replay_service_takes_nothing_back(
    cut: CutServer, replay: ReplayClient, limits: Limits
) -> None:
    """It was frozen until its successor had opened the run, and its functions were deleted, because it is of an earlier build."""

    def service(attempts: int) -> _Buffer:
        client = ReplayClient(open_redis(cut.server.url), replay.run_id)
        return _Buffer(client, dataclasses.replace(limits, max_attempts=attempts), cut.server.url)

    earlier, newest = service(7), service(8)
    await earlier.prepare()
    await newest.prepare()
    await replay.redis.function_delete(library.built_in().name)
    watching = asyncio.create_task(earlier.watch())
    try:
        await eventually(partial(_looks_again, earlier, None))
        assert await replay.redis.hget(f"hr:{{{replay.run_id}}}", "max_attempts") == b"8"
        # an empty server is another matter: somebody has to open the run
        await replay.redis.flushall()
        await eventually(partial(_exists, replay))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for buffer in (earlier, newest):
            await buffer._client.aclose()


async def _exists(replay: ReplayClient) -> bool:
    return bool(await replay.redis.exists(f"hr:{{{replay.run_id}}}"))


async def _equals(read: Callable[[], Awaitable[int]], value: int) -> bool:
    return await read() == value


async def _looks_again(buffer: _Buffer, stats: object) -> bool:
    return buffer.latest.stats is not stats
