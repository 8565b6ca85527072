"""`headrace rescore`: stored groups under another reward, with the run up and down; the run stays as it is."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace.run.history import RUN_LOCK
from tests.support.buffer import begin, contents, enqueue, generate, reserve
from tests.support.command import error_of, headrace, refused, said
from tests.support.kept_run import kept_run

REWARD = """
import headrace

class Exact(headrace.Environment):
    build = "2"

    def score(self, sample):
        assert sample.messages[0]["content"].endswith("+1")
        if sample.extra_env_info["answer"] == "2":
            return 1.0
        return {otherwise}
"""


async def fill(replay: ReplayClient) -> None:
    """Two groups of two, whose trajectories earned 1 and 2."""
    assert len(await generate(replay, await begin(replay, 2))) == 2


def held(url: str, run_id: str) -> dict[bytes, object]:
    async def look() -> dict[bytes, object]:
        replay = ReplayClient(open_redis(url), run_id)
        found = await contents(replay)
        await replay.aclose()
        return found

    return asyncio.run(look())


@pytest.mark.parametrize("up", [True, False])
def test_stored_groups_are_scored_again_and_the_run_is_left_as_it_is(tmp_path: Path, limits: Limits, up: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.format(otherwise="0.0"))
    with kept_run(tmp_path, "kept", limits, fill) as (folder, server):
        before = held(server.url, "kept")
        if not up:
            asyncio.run(server.stop())
        files = {path.name for path in folder.iterdir()}
        text = said("rescore", folder, "--env", file, columns=200)
        # the lock keeps the run from being started meanwhile
        assert {path.name for path in folder.iterdir()} - {RUN_LOCK} == files
        if up:
            assert held(server.url, "kept") == before
    lines = [line.split() for line in text.splitlines()]
    assert "4 trajectories, scored again by" in text
    assert text.splitlines()[0].endswith("mine.py: 3 rewards differ")
    assert ["as", "stored", "1.500", "0.500", "0.500", "0%"] in lines
    assert ["now", "0.500", "0.500", "0.000", "100%"] in lines
    assert lines[-3:] == [
        ["e0-train-0", "1", "2", "0", "7"],
        ["e0-train-0", "0", "1", "0", "7"],
        ["e0-train-1", "1", "2", "1", "7"],
    ]


def test_what_fails_is_no_reward(tmp_path: Path, limits: Limits) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.format(otherwise="1 / 0"))
    with kept_run(tmp_path, "kept", limits, fill) as (folder, _):
        text = said("rescore", folder, "--env", f"{file}:Exact", columns=200)
        assert "2 got no reward" in text
        assert "FAILED: ZeroDivisionError" in text
        assert ["1", "groups"] in [line.split()[:2] for line in text.splitlines()]
        file.write_text(REWARD.format(otherwise="1 / 0").replace("return 1.0", "return None"))
        done = headrace("rescore", folder, "--env", file)
        assert "0 rewards differ" in done.stdout
        assert "mine.py scored no group" in error_of(done)


def test_a_built_in_environment_scores_as_in_the_run(tmp_path: Path, limits: Limits) -> None:
    with kept_run(tmp_path, "kept", limits, fill) as (folder, _):
        text = said("rescore", folder, "--env", "math", "--set", "reward.workers=1", columns=200)
    assert "4 rewards differ" in text


async def train(replay: ReplayClient) -> None:
    """What `fill` made is trained, and a checkpoint contains it."""
    await fill(replay)
    await reserve(replay, 0)
    await replay.commit(1, (await replay.state()).timeline)


@pytest.mark.parametrize("retained", [0, 1])
def test_of_trained_steps_those_that_were_retained_are_scored(tmp_path: Path, limits: Limits, retained: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.format(otherwise="0.0"))
    limits = dataclasses.replace(limits, retain_steps=retained)
    with kept_run(tmp_path, "kept", limits, train) as (folder, _):
        done = headrace("rescore", folder, "--env", file)
    if retained:
        assert "mine.py: 3 rewards differ" in done.stdout
    else:
        assert "replay.retain_steps=N" in error_of(done)


async def nothing(replay: ReplayClient) -> None:
    await enqueue(replay, range(1))


def test_what_can_not_be_scored_again_is_refused(tmp_path: Path, limits: Limits) -> None:
    file = tmp_path / "mine.py"
    file.write_text(REWARD.format(otherwise="0.0"))
    with kept_run(tmp_path, "kept", limits, nothing) as (folder, _):
        empty = refused("rescore", folder, "--env", file)
        assert "replay.retain_steps=N" in empty
        assert "(it is 0)" in empty
        unknown = refused("rescore", folder, "--env", "exact")
        assert "environment of the run (math)" in unknown
        attached = ("--set", "env.far.attached=true")
        assert "reach env.far" in refused("rescore", folder, "--env", "far", *attached)
        gone = refused("rescore", folder, "--env", tmp_path / "gone.py")
        assert "No such file" in gone
    with kept_run(tmp_path, "other", limits, fill) as (folder, server):
        assert "environment code;" in refused("rescore", folder, "--env", file, "--of", "code")
        asyncio.run(server.stop())
        shutil.rmtree(folder / "replay")
        never = refused("rescore", folder, "--env", file)
        assert "run other is not up" in never
        assert f"{folder / 'replay'} doesn't exist" in never
