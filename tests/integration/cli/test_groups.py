"""`headrace groups`: what became of trajectories, in a run that is up and in the same run when it is down."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.run import export
from headrace.run.group_files import FOLDER as GROUPS
from headrace.run.lineage import FOLDER
from headrace_services.trainer.control.lineage_writer import LineageWriter
from tests.support.buffer import begin, make_group, make_trajectory
from tests.support.command import refused, said
from tests.support.group_events import events, life, write
from tests.support.kept_run import kept_run


async def fill(replay: ReplayClient) -> None:
    """A group with a scored and an unscored trajectory, one that failed, and one that waits."""
    one, two = await replay.lease(await begin(replay, 3), 2)
    await replay.push(one, make_trajectory(one, 0))
    (job,) = await replay.take_scoring({"math": 1})
    await replay.score(job, Score("SCORED", 0.25, environment="math", build="7"))
    await replay.push(one, make_trajectory(one, 1))
    await replay.reject(two, "its prompt is too long")


@pytest.mark.parametrize("up", [True, False])
def test_groups_are_shown_listed_and_exported(tmp_path: Path, limits: Limits, up: bool) -> None:
    trained = make_group(9)
    with kept_run(tmp_path, "seen", limits, fill) as (folder, server):
        LineageWriter(folder / "checkpoints" / FOLDER, "t1").write(4, [trained], {trained.id: []})
        if not up:
            asyncio.run(server.stop())
        text = said("groups", "show", "e0-train-0", "--run", folder)
        assert "group       e0-train-0 (scoring)" in text
        assert "math build 7" in text
        assert "0-4     0 (the initial model)  replica" in text
        shown = json.loads(said("groups", "show", "e0-train-0", "--run", folder, "--json"))
        assert [trajectory["reward"] for trajectory in shown["trajectories"]] == [0.25, None]
        assert "too long" in said("groups", "show", "e0-train-1", "--run", folder)
        assert "trained at  step 4, timeline t1" in said("groups", "show", "e0-train-9", "--run", folder)
        assert "no group 'nobody'" in refused("groups", "show", "nobody", "--run", folder)

        listed = said("groups", "list", "--run", folder, "--state", "queued", "--state", "failed")
        assert sorted(listed.split()) == ["e0-train-1", "e0-train-2", "failed", "queued"]
        assert "--state lost is not" in refused("groups", "list", "--run", folder, "--state", "lost")

        out = tmp_path / "out.jsonl"
        assert "2 trajectories" in said("groups", "export", "--run", folder, "-o", out)
        assert [each.trajectory.index for each in export.read(out)] == [0, 1]
        assert "can't be written" in refused("groups", "export", "--run", folder, "-o", tmp_path / "no" / "out.jsonl")


# without its own server a command starts one, and asks it the same
@pytest.mark.parametrize(
    ("which", "up"),
    [
        (("e0-train-1",), True),
        (("--reason", "too long"), True),
        (("--all",), False),
        pytest.param(("e0-train-1",), False, marks=pytest.mark.nightly),
        pytest.param(("--reason", "too long"), False, marks=pytest.mark.nightly),
        pytest.param(("--all",), True, marks=pytest.mark.nightly),
    ],
)
def test_failed_groups_are_retried(tmp_path: Path, limits: Limits, up: bool, which: tuple[str, ...]) -> None:
    with kept_run(tmp_path, "seen", limits, fill) as (folder, server):
        if not up:
            asyncio.run(server.stop())
        retry = ("groups", "retry", "--run", folder)
        assert "--reason TEXT and --all" in refused(*retry)
        assert "--reason TEXT and --all" in refused(*retry, "e0-train-1", "--all")
        assert "it is scoring" in refused(*retry, "e0-train-0")
        assert "not held" in refused(*retry, "nobody")
        assert said(*retry, "--reason", "something else").startswith("0 groups")
        assert said(*retry, *which).startswith("1 groups")
        assert said(*retry, "--all").startswith("0 groups")
        listed = said("groups", "list", "--run", folder)
        assert sorted(listed.split()) == ["e0-train-0", "e0-train-2", "queued", "scoring"]


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path} is not a run" in refused("groups", "list", "--run", tmp_path)


def test_a_group_of_any_state_is_found_and_shown(tmp_path: Path, limits: Limits) -> None:
    async def nothing(replay: ReplayClient) -> None:
        pass

    with kept_run(tmp_path, "past", limits, nothing) as (folder, server):
        asyncio.run(server.stop())
        write(folder / GROUPS, events(*life("e0-train-46", 46, ("filtered", {})), ("lost", None, {"lost": 7})))
        write(folder / GROUPS, events(*life("e0-train-3", 3, ("failed", {"reason": "\x1b[31mKeyError"})), start=5_000))
        for wanted in ("46+1", "sums.jsonl:47", "e0-train-46", "sum 47"):
            found = said("groups", "find", wanted, "--run", folder)
            assert "e0-train-46" in found, wanted
            assert "filtered" in found
            assert "e0-train-3 " not in found
            assert "7 events were lost" in found
        failed = said("groups", "find", "--run", folder, "--state", "failed", "--reason", "keyerror")
        assert "\\x1b[31mKeyError" in failed
        assert "0 of 2 groups" in said("groups", "find", "nowhere.jsonl:3", "--run", folder)
        assert "--state lost" in refused("groups", "find", "--run", folder, "--state", "lost")
        assert "reward" in refused("groups", "find", "--run", folder, "--sort", "beauty")
        shown = said("groups", "show", "e0-train-46", "--run", folder)
        assert "row 47 of /data/sums.jsonl" in shown
        assert [line.split()[2] for line in shown.splitlines()[3:11]] == [
            what for what, _, _ in life("", 0, ("filtered", {}))
        ]
        story = json.loads(said("groups", "show", "e0-train-3", "--run", folder, "--story", "--json"))
        assert story["summary"]["state"] == "failed"
        assert "no group 'nobody'" in refused("groups", "show", "nobody", "--run", folder, "--story")
        damaged = next((folder / GROUPS).glob("0_5*.parquet"))
        damaged.write_bytes(b"PAR1")
        assert "e0-train-46" in said("groups", "find", "46+1", "--run", folder)
