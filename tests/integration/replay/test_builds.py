"""Two builds of the buffer's functions on one server: each keeps its own, and a run is of the build that opened it."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from headrace.base.errors import ReplayUnavailable, WrongBuild, WrongTimeline
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.replay.build import BUILD
from headrace.replay.connection import BufferConnection, function_name
from headrace_services.replay import library
from headrace_services.replay.library import Library
from headrace_services.replay.main import _Buffer
from tests.support.buffer import (
    enqueue,
    generate,
    group_of,
    healthy_replica,
    make_group,
    make_trajectory,
    payloads,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    some,
)
from tests.support.recorded_run import DIGEST, run


class Another(BufferConnection):
    """As a client of another build calls."""

    build: str

    def fcall(self, function: str, *payloads: bytes, **arguments: Any) -> tuple[Any, ...]:
        name, named, *rest = super().fcall(function, *payloads, **arguments)
        return (name, named.replace(BUILD, self.build), *rest)


@pytest.fixture
async def another(replay: ReplayClient, tmp_path: Path) -> Another:
    """A connection of another build, whose `wanted` says so."""
    with resources.as_file(resources.files("headrace_services.replay") / "functions") as folder:
        shutil.copytree(folder, tmp_path / "functions")
    (tmp_path / "functions" / "wanted.lua").write_text(
        "-- uses: _register\nregister_reader('wanted', nil, function() return 'of another build' end)\n"
    )
    built = Library(tmp_path / "functions")
    await replay.redis.function_load(built.source(), replace=True)
    connection = Another(replay.redis, replay.run_id)
    connection.build = built.build
    return connection


async def everything(replay: ReplayClient) -> bytes:
    found: bytes = await replay.redis.eval(DIGEST, 0, f"hr:{{{replay.run_id}}}*")
    return found


async def opened_by(connection: BufferConnection, replay: ReplayClient, limits: Limits) -> None:
    own, replay._connection = replay._connection, connection
    await replay.open_run(limits)
    replay._connection = own


async def test_builds_that_share_a_server_leave_each_other_alone(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
    neighbour = ReplayClient(replay.redis, f"{replay.run_id}-neighbour")
    another.key = f"hr:{{{neighbour.run_id}}}"
    await opened_by(another, neighbour, limits)
    await library.load(replay.redis)
    assert await replay.read_wanted() == []
    assert await another.call("wanted") == b"of another build"
    await replay.redis.function_delete(library.built_in().name)  # a server that lost it
    await library.load(replay.redis)
    assert await replay.read_wanted() == []
    assert await another.call("wanted") == b"of another build"


class Shadowed(BufferConnection):
    """Before each call of a function it arrives as a client of another build makes it."""

    other: Another

    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id)
        self.functions: set[str] = set()

    async def command(self, *command: Any) -> Any:
        await self._refused([command])
        return await super().command(*command)

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        await self._refused(commands)
        return await super().pipeline(commands)

    async def _refused(self, commands: list[tuple[Any, ...]]) -> None:
        for name, function, *arguments in [command for command in commands if command[0] == "FCALL"]:
            transition = function.removeprefix(function_name(""))
            if transition == "open_run":  # takes the run over
                continue
            self.functions.add(transition)
            pipe = self.redis.pipeline(transaction=False)
            pipe.eval(DIGEST, 0, f"{self.key}*")
            pipe.execute_command(name, function.replace(BUILD, self.other.build), *arguments)
            pipe.eval(DIGEST, 0, f"{self.key}*")
            before, refusal, after = await pipe.execute(raise_on_error=False)
            assert re.match(f"HR_BUILD .*{BUILD}.*{self.other.build}", str(refusal)), f"{function}: {refusal}"
            assert after == before, function


async def test_law_4_fencing_functions_of_another_build_change_nothing(replay: ReplayClient, another: Another) -> None:
    shadowed = replay._connection = Shadowed(replay.redis, replay.run_id)
    shadowed.other = another
    await run(replay)
    assert shadowed.functions == {*library.built_in().transitions} - {"open_run"}


async def test_law_4_fencing_the_refusal_of_another_build_names_both(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
    timeline = (await replay.state()).timeline
    with pytest.raises(WrongBuild, match=rf"{BUILD}.*{another.build}.*restart"):
        await another.call("state")

    await opened_by(another, replay, limits)
    assert await another.call("wanted") == b"of another build"
    before = await everything(replay)
    with pytest.raises(WrongBuild, match=rf"{another.build}.*{BUILD}.*restart"):
        await replay.enqueue([make_group(0)], timeline)
    with pytest.raises(WrongBuild):
        await replay.state()
    assert await everything(replay) == before
    # what is staged goes by itself
    assert [key async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}:*:g:*")] == []
    with pytest.raises(ReplayUnavailable, match=f"opened by build {another.build}"):  # it waits for the replay service
        await ReplayClient.connect(url_of(replay), replay.run_id, timeout_s=0.01)


async def test_law_1_conservation_a_run_goes_on_after_an_upgrade(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
    old = ReplayClient(replay.redis, replay.run_id)
    old._connection = another
    await old.open_run(limits)
    await enqueue(old, range(6))
    replica = await healthy_replica(old)
    ready, also_ready, unscored, unfinished = leases = await old.lease(replica, 4)
    for lease in (ready, also_ready):
        await push_all(old, lease)
    await score_all(old)
    reserved = await reserve(old, 0)
    await push_all(old, unscored)
    (job,) = await old.take_scoring({"math": 1})
    complete = set(await payloads(old))
    await old.push(unfinished, make_trajectory(unfinished, 0))
    state = await old.state()
    assert some(state.counts) == {"reserved": 2, "scoring": 1, "open": 1, "queued": 2}

    assert await replay.open_run(limits) == state
    before = await everything(replay)
    for late in (
        old.push(unfinished, make_trajectory(unfinished, 1)),
        old.score(job, Score("SCORED", 1.0)),
        old.reserve(1, state.timeline),
        old.commit(1, state.timeline),
    ):
        with pytest.raises(WrongBuild):
            await late
    assert await everything(replay) == before

    # what the services of the next build do when they start
    await replay.release_scoring()
    await replay.deregister(replica)
    await rewind(replay, 0)
    replica, steps = await healthy_replica(replay), []
    for step in range(3):
        await refit(replay, step, [replica])
        await generate(replay, replica)
        steps.append([*(await reserve(replay, step)).groups])
        if step == 1:
            # only what was being generated when its replica ended is generated again
            assert [(await group_of(replay, lease))["attempt"] for lease in leases] == [1, 1, 1, 2]
            assert complete <= set(await payloads(replay))
    assert steps == [[f"e0-train-{order}" for order in pair] for pair in ((0, 1), (2, 3), (4, 5))]
    assert steps[0] == [*reserved.groups]
    await replay.commit(3, (await replay.state()).timeline)
    assert some((await replay.state()).counts) == {"trained": 6}


async def test_the_replay_service_of_a_build_that_was_replaced_ends(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
    buffer = _Buffer(replay, limits, url_of(replay))
    await buffer.prepare()
    await opened_by(another, replay, limits)
    with pytest.raises(WrongBuild, match=f"{another.build}.*{BUILD}"):
        await buffer.watch()


async def test_law_4_fencing_who_opens_the_run_keeps_it(replay: ReplayClient, another: Another, limits: Limits) -> None:
    await replay.enqueue([make_group(0)], (await replay.state()).timeline)
    sent: list[Any] = []

    class Kept(Another):
        build = another.build

        async def command(self, *command: Any) -> Any:
            sent.append(command)
            return await super().command(*command)

    await opened_by(Kept(replay.redis, replay.run_id), replay, limits)
    state = await replay.open_run(limits)
    assert state.counts["queued"] == 1
    with pytest.raises(WrongTimeline):
        await another.command(*sent[0])
    assert await replay.state() == state


async def test_a_run_whose_record_has_no_build_goes_on(replay: ReplayClient, another: Another, limits: Limits) -> None:
    """It was opened by a build that did not write it down."""
    key = f"hr:{{{replay.run_id}}}"
    await replay.redis.hdel(key, "build")
    assert await replay.enqueue([make_group(0)], (await replay.state()).timeline) == 1
    await replay.open_run(limits)
    assert await replay.redis.hget(key, "build") == BUILD.encode()
    with pytest.raises(WrongBuild):
        await another.call("wanted")


def url_of(replay: ReplayClient) -> str:
    options = replay.redis.connection_pool.connection_kwargs
    return f"redis://{options['host']}:{options['port']}/0"
