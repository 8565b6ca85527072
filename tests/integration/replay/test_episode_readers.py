"""Whoever reads trajectories from the buffer reads episodes of several calls: the scorer, the trainer, and people."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import CodecError
from headrace.env.wire import scoring_sample
from headrace.records.score import Score
from headrace.records.trajectory import EpisodeTrajectory
from headrace.replay import Limits, ReplayClient
from headrace.run import export
from headrace.run.samples import make_sample
from headrace_services.trainer.learning.batch import check_invariants
from tests.support.buffer import begin, generate, healthy_replica, make_group, make_trajectory, reserve, tighten
from tests.support.episodes import call, episode
from tests.support.replay_service import config_of, serving

CALLS = [
    call(-1, [1, 2], [3, 4], messages=({"role": "user", "content": "47+85"},), answer={"content": "let me see"}),
    call(0, [5], [6], replica="other", messages=({"role": "tool", "content": "132"},), answer={"content": "132"}),
    call(0, [7], [8], trained=False, answer={"content": None}),
]

ARTIFACTS = {"board": [1, 2]}


async def put(replay: ReplayClient, group_id: str, index: int) -> EpisodeTrajectory:
    """Write an episode in the place of a trajectory that was pushed."""
    found = await replay.group(group_id)
    assert found is not None
    (key,) = [one["key"] for one in found["trajectories"] if one["index"] == index]
    put = msgspec.structs.replace(episode(CALLS, group_id=group_id, index=index), artifacts=ARTIFACTS)
    await replay.redis.set(key, put.encode())
    return put


async def test_an_episode_is_scored_reserved_and_trained_as_any_trajectory(replay: ReplayClient) -> None:
    leases = await replay.lease(await begin(replay, 4), 2)
    for lease in leases:
        for index in lease.missing[: lease.group.n]:
            await replay.push(lease, make_trajectory(lease, index))
    group = leases[0].group
    stored = await put(replay, group.id, 1)
    jobs = await replay.take_scoring({"math": 64})
    (job,) = [job for job in jobs if (job.group.id, job.trajectory.index) == (group.id, 1)]
    assert job.trajectory.encode() == stored.encode()
    sample = scoring_sample(job.group, job.trajectory, "run")
    assert (sample.completion, sample.completion_token_ids, sample.finish_reason) == ("", (3, 4, 6, 8), "stop")
    assert [message["content"] for message in sample.conversation] == ["47+85", "let me see", None]
    assert sample.artifacts == ARTIFACTS
    for each in jobs:
        await replay.score(each, Score("SCORED", 0.5 + each.trajectory.index, environment="math"))
    batch = await reserve(replay, 0)
    pairs = await replay.read([one.key for one in batch.trajectories])
    (place,) = [i for i, one in enumerate(batch.trajectories) if (one.group_id, one.index) == (group.id, 1)]
    trajectory, score = pairs[place]
    assert trajectory.encode() == stored.encode()
    reserved = batch.trajectories[place]
    assert check_invariants(reserved, trajectory, score, step=0, max_age=0, policy="ordered") is None
    newer = msgspec.structs.replace(stored, calls=(call(-1, [1], [2], version=1), *CALLS[1:]))
    assert "of version 1" in str(check_invariants(reserved, newer, score, step=0, max_age=0, policy="ordered"))


async def test_a_held_out_episode_is_evaluated(replay: ReplayClient) -> None:
    await replay.enqueue([make_group(0, lane="validation")], (await replay.state()).timeline)
    await generate(replay, await healthy_replica(replay))
    stored = await put(replay, "e0-validation-0", 0)
    done, failed, unknown = await replay.read_evaluated(["e0-validation-0"])
    assert (failed, unknown) == ({}, [])
    assert done[0].trajectories[0][0].encode() == stored.encode()


async def test_people_see_an_episode_while_it_waits(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=3)
    await generate(replay, await begin(replay, 4), 1)
    stored = await put(replay, "e0-train-0", 0)
    held = await replay.read_held("e0-train-0")
    assert held is not None
    said = make_sample(held.group, *held.trajectories[0]).text
    assert said.startswith("call 0 (tokens 0-2, weights 0, r0)\n")
    assert "call 1 continues call 0 (tokens 2-3, weights 0, other)\n  tool: 132\n  None: 132" in said
    lineage = await replay.lineage("e0-train-0")
    assert lineage is not None
    ranges = [(found.start, found.end, found.replica) for found in lineage.trajectories[0].ranges]
    assert ranges == [(0, 2, "r0"), (2, 3, "other")]
    (line, _) = [line async for line in export.lines(replay, ["ready"])]
    assert export.from_line(line).trajectory.encode() == stored.encode()
    with pytest.raises(CodecError, match=r"call 1.*parent 5"):
        export.from_line(line.replace('"parent": 0', '"parent": 5', 1))


async def test_people_see_what_a_program_left(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=3)
    await generate(replay, await begin(replay, 4), 1)
    stored = msgspec.structs.replace(episode(CALLS[:1], group_id="e0-train-0"), artifacts={"board": [2**64 - 1, None]})
    found = await replay.group("e0-train-0")
    assert found is not None
    await replay.redis.set(found["trajectories"][0]["key"], stored.encode())
    held = await replay.read_held("e0-train-0")
    assert held is not None
    assert make_sample(held.group, *held.trajectories[0]).artifacts == stored.artifacts
    (line, other) = [line async for line in export.lines(replay, ["ready"])]
    assert export.from_line(line).trajectory.encode() == stored.encode()
    assert "artifacts" not in other


async def test_an_episode_is_served_with_its_calls(tmp_path: Path) -> None:
    async with serving(config_of(tmp_path)) as (http, replay):
        (lease,) = await replay.lease(await begin(replay, 3), 1)
        await replay.push(lease, make_trajectory(lease, 0))
        await put(replay, lease.group.id, 0)
        found = (await http.get(f"/v1/trajectories/{lease.group.id}/0")).json()
        assert [one["parent"] for one in found["calls"]] == [-1, 0, 0]
        assert found["calls"][0]["spans"] == [{"version": 0, "start": 0, "end": 2}]
        assert found["calls"][1]["completion_token_ids"] == [6]
        assert found["artifacts"] == ARTIFACTS
        (line,) = (await http.get("/v1/export")).text.splitlines()
        assert json.loads(line)["trajectory"]["schema"] == 2
