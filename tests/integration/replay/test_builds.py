"""Two builds of the buffer's functions on one server: each keeps its own, and a run is of the build that opened it."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ReplayUnavailable, WrongBuild, WrongTimeline
from headrace.replay import Limits, ReplayClient
from headrace.replay.build import BUILD
from headrace.replay.connection import BufferConnection
from headrace_services.replay import library
from headrace_services.replay.library import Library
from tests.support.buffer import make_group
from tests.support.recorded_run import DIGEST


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
    assert await replay.wanted() == []
    assert await another.call("wanted") == b"of another build"
    await replay.redis.function_delete(library.built_in().name)  # a server that lost it
    await library.load(replay.redis)
    assert await replay.wanted() == []
    assert await another.call("wanted") == b"of another build"


async def test_law_4_fencing_a_call_of_another_build_than_the_one_that_opened_the_run_changes_nothing(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
    timeline = (await replay.state()).timeline
    calls = [
        another.fcall("state"),
        another.fcall("make_room", refused=1, sheds=True),
        another.fcall("register", b"{}", replica="r", incarnation="i"),
        another.fcall("close", timeline=timeline),
    ]
    before = await everything(replay)
    for call in calls:
        with pytest.raises(
            WrongBuild, match=rf"opened by build {BUILD}, and this call is of build {another.build}; restart"
        ):
            await another.command(*call)
    assert await everything(replay) == before

    await opened_by(another, replay, limits)
    assert await another.call("wanted") == b"of another build"
    before = await everything(replay)
    with pytest.raises(
        WrongBuild, match=rf"opened by build {another.build}, and this call is of build {BUILD}; restart"
    ):
        await replay.enqueue([make_group(0)], timeline)
    with pytest.raises(WrongBuild):
        await replay.state()
    # what is staged goes by itself
    assert [key async for key in replay.redis.scan_iter(f"hr:{{{replay.run_id}}}:*:g:*")] == []
    with pytest.raises(ReplayUnavailable, match=f"opened by build {another.build}"):  # it waits for the replay service
        await ReplayClient.connect(url_of(replay), replay.run_id, timeout_s=0.01)


async def test_law_4_fencing_whoever_opens_the_run_takes_it_over_and_no_late_start_takes_it_back(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
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


async def test_a_run_whose_record_names_no_build_goes_on(
    replay: ReplayClient, another: Another, limits: Limits
) -> None:
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
