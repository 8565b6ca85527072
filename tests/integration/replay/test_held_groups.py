"""What the buffer tells people of the groups it holds: where they stand, who wrote which tokens, and their trajectories whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.base.errors import CodecError
from headrace.records.origin import TokenRange, trace_origin
from headrace.records.score import Score
from headrace.replay import Limits, ReplayClient
from headrace.run import export
from tests.support.buffer import begin, generate, make_trajectory, refit, reserve, rewind, score_all, some, tighten


async def states(replay: ReplayClient, *wanted: str) -> dict[str, str]:
    return {group_id: state async for group_id, state in replay.groups(wanted)}


async def test_groups_are_listed_by_state_wherever_they_are(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, retain_steps=1, max_age=3)
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 600)
    await generate(replay, replica, 6)
    await reserve(replay, 0)
    await replay.commit(1, timeline)
    await reserve(replay, 1)
    (doomed,) = await replay.lease(replica, 1)
    await replay.reject(doomed, "no")
    (opened,) = await replay.lease(replica, 1)
    everything = await states(
        replay, "queued", "open", "scoring", "ready", "reserved", "trained", "failed", "unused", "evaluated"
    )
    counts: dict[str, int] = {}
    for state in everything.values():
        counts[state] = counts.get(state, 0) + 1
    assert counts == some((await replay.state()).counts)
    assert counts == {"queued": 592, "open": 1, "ready": 2, "reserved": 2, "trained": 2, "failed": 1}
    assert await states(replay, "trained", "open") == {
        "e0-train-0": "trained",
        "e0-train-1": "trained",
        opened.group.id: "open",
    }
    assert await states(replay, "failed") == {doomed.group.id: "failed"}


async def test_a_waiting_trajectory_names_its_replica_weights_and_scorer(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=3)
    first = (await replay.state()).timeline
    replica = await begin(replay, 20)
    await generate(replay, replica, 4)
    await reserve(replay, 0)
    await reserve(replay, 1)
    await replay.commit(2, first)
    second = (await rewind(replay, 2)).timeline
    await refit(replay, 2, [replica])
    await generate(replay, replica, 2)
    await reserve(replay, 2)
    await refit(replay, 3, [replica])
    (lease,) = await replay.lease(replica, 1)
    await replay.push(lease, make_trajectory(lease, 1, [0, 2, 3]))
    (job,) = await replay.take_scoring({"math": 5})
    assert await replay.lineage("nobody") is None

    waiting = await replay.lineage(lease.group.id)
    assert waiting is not None
    assert (waiting.state, waiting.step, waiting.order, waiting.env) == ("open", None, lease.group.order, "math")
    (origin,) = waiting.trajectories
    assert (origin.index, origin.reward, origin.build) == (1, None, None)
    # version 2 was made before the rewind, version 3 after it
    assert origin.ranges == (
        TokenRange(0, 4, "replica", 0, None),
        TokenRange(4, 8, "replica", 2, first),
        TokenRange(8, 12, "replica", 3, second),
    )
    await replay.score(job, Score("SCORED", 0.5, environment="math", build="1.2"))
    scored = await replay.lineage(lease.group.id)
    assert scored is not None
    assert [(o.environment, o.build, o.reward) for o in scored.trajectories] == [("math", "1.2", 0.5)]
    reserved = await replay.lineage("e0-train-4")
    assert reserved is not None
    assert (reserved.state, reserved.step, reserved.timeline) == ("reserved", 2, second)


async def test_exported_trajectories_come_back_to_the_last_bit(replay: ReplayClient, tmp_path: Path) -> None:
    (lease,) = await replay.lease(await begin(replay, 2), 1)
    odd = msgspec.structs.replace(
        make_trajectory(lease, 0, [0, 0]),
        logprobs=np.array([-1e-30, -0.1, -3.4e38, -1 / 3, 0, -2, -1, -0.7], dtype=np.float32),
        text='line\nbreak "é" \u2028',
        turns=((0, 3), (5, 8)),
        timings={"generate": 0.1},
    )
    await replay.push(lease, odd)
    (job,) = await replay.take_scoring({"math": 1})
    metadata = {"answer": [1, {"x": None}], "ü": 0.1}
    await replay.score(job, Score("SCORED", 1 / 3, {"exact": 0.1}, metadata, environment="math", build="1"))
    await replay.push(lease, make_trajectory(lease, 1))
    held = await replay.read_held(lease.group.id)
    assert held is not None
    path = tmp_path / "out.jsonl"
    exported = [export.Exported(held.state, held.group, *pair) for pair in held.trajectories]
    lines = [export.to_line(each, trace_origin(each.trajectory, each.score)) for each in exported]
    path.write_text("".join(line + "\n" for line in lines))
    back = list(export.read(path))
    assert [each.state for each in back] == ["scoring", "scoring"]
    assert [each.group.encode() for each in back] == [lease.group.encode()] * 2
    assert [each.trajectory.encode() for each in back] == [odd.encode(), make_trajectory(lease, 1).encode()]
    assert [each.score for each in back] == [held.trajectories[0][1], None]
    assert back[0].score is not None
    assert back[0].score.metadata == metadata

    path.write_text(lines[0] + "\n" + lines[1].replace('"logprobs": [', '"logprobs": [0.5, ') + "\n")
    with pytest.raises(CodecError, match=r"out\.jsonl:2.*logprobs.*5.*4"):
        list(export.read(path))


async def test_only_batches_of_retained_steps_are_held(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, retain_steps=2, max_age=5)
    timeline = (await replay.state()).timeline
    await generate(replay, await begin(replay, 20))
    batches = [await reserve(replay, step) for step in range(5)]
    assert (await replay.read_held_batch(9)) == ([0, 1, 2, 3, 4], None)
    await replay.commit(4, timeline)
    held, batch = await replay.read_held_batch(2)
    assert held == [2, 3, 4]
    assert batch is not None
    assert (batch.groups, batch.trajectories) == (batches[2].groups, batches[2].trajectories)
    assert len(await replay.read([t.key for t in batch.trajectories])) == 4
    assert (await replay.read_held_batch(1)) == ([2, 3, 4], None)


async def test_a_step_whose_payloads_went_under_pressure_is_not_held(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=5)
    replica = await begin(replay, 20)
    await generate(replay, replica, 6)
    for step in range(3):
        await reserve(replay, step)
    await tighten(replay, limits, max_age=5, max_bytes=1)
    await replay.lease(replica, 1)
    await score_all(replay)
    assert (await replay.read_held_batch(0)) == ([2], None)
