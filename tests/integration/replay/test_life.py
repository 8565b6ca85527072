"""The life of a group, from the queue to its end."""

from __future__ import annotations

from headrace.records.score import Score
from headrace.replay import End, ReplayClient, Waiting
from tests.support.buffer import (
    begin,
    enqueue,
    generate,
    healthy_replica,
    lease_one,
    make_group,
    make_trajectory,
    push_all,
    refit,
    reserve,
    score_all,
)


async def test_a_scorer_is_told_how_long_each_trajectory_waited(replay: ReplayClient) -> None:
    lease = await lease_one(replay)
    moments = [await replay.redis.time()]
    for index in range(2):
        await replay.push(lease, make_trajectory(lease, index))
        moments.append(await replay.redis.time())
        await replay.redis.blpop(f"nothing-{replay.run_id}", timeout=0.05)
    before = await replay.redis.time()
    jobs = await replay.take_scoring({"math": 2})
    after = await replay.redis.time()
    waited = {job.trajectory.index: job.waited_s for job in jobs}
    seconds = [whole + micros / 1e6 for whole, micros in (*moments, before, after)]
    for index in range(2):
        # the functions' clock has whole milliseconds
        assert seconds[-2] - seconds[index + 1] - 0.002 <= waited[index] <= seconds[-1] - seconds[index] + 0.002


async def test_group_goes_from_queue_to_trained(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    assert await enqueue(replay, range(4)) == 4
    assert await enqueue(replay, range(6)) == 2
    replica = await healthy_replica(replay)

    leases = await replay.lease(replica, 3)
    assert [lease.group.id for lease in leases] == ["e0-train-0", "e0-train-1", "e0-train-2"]
    assert [lease.ticket for lease in leases] == [0, 1, 2]
    assert leases[0].group.extra_env_info == {"answer": "1"}
    assert (await replay.state()).counts == {"queued": 3, "open": 3}

    assert await replay.reserve(0, timeline) == Waiting(ready=0, needed=2)
    for lease in leases:
        await push_all(replay, lease)
    assert (await replay.state()).counts["scoring"] == 3
    jobs = await replay.take_scoring({"math": 64})
    assert len(jobs) == 6
    for job in jobs:
        await replay.score(job, Score("SCORED", 0.25 * job.trajectory.index, components={"exact": 1.0}))
    assert (await replay.state()).counts["ready"] == 3

    batch = await reserve(replay, 0)
    assert batch.groups == ("e0-train-0", "e0-train-1")
    assert [(t.group_id, t.index, t.reward) for t in batch.trajectories] == [
        ("e0-train-0", 0, 0.0),
        ("e0-train-0", 1, 0.25),
        ("e0-train-1", 0, 0.0),
        ("e0-train-1", 1, 0.25),
    ]
    pairs = await replay.read([t.key for t in batch.trajectories])
    assert [trajectory.index for trajectory, _ in pairs] == [0, 1, 0, 1]
    assert pairs[1][1].components == {"exact": 1.0}
    assert [group.order for group in await replay.read_groups(batch.groups)] == [0, 1]

    await replay.commit(1, timeline)
    state = await replay.state()
    assert (state.next_step, state.committed) == (1, 1)
    assert state.counts == {"queued": 3, "open": 0, "scoring": 0, "ready": 1, "reserved": 0, "trained": 2}
    stats = await replay.stats()
    assert stats["counts"]["train"]["trained"] == 2
    assert stats["replicas"][0]["state"] == "HEALTHY"


async def test_run_ends_when_fewer_than_a_batch_is_left(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(3))
    await replay.close(timeline)
    replica = await healthy_replica(replay)
    await generate(replay, replica)
    await reserve(replay, 0)
    assert await replay.reserve(1, timeline) == End(unused=1)
    assert await replay.reserve(1, timeline) == End(unused=1)
    assert (await replay.state()).counts["unused"] == 1


async def test_validation_goes_first_and_waits_for_nobody(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    replica = await begin(replay, 8)
    full = await replay.lease(replica, 64)
    assert len(full) == 4  # (0 + 1 + 1) * 2: admission is exhausted
    groups = [make_group(i, n=1, lane="validation", group_id=f"e0-validation-v0-{i}") for i in range(3)]
    assert await replay.enqueue(groups, timeline) == 3
    leases = await replay.lease(replica, 64)
    assert [lease.ticket for lease in leases] == [-1, -1, -1]
    for lease in leases:
        await replay.push(lease, make_trajectory(lease, 0))
    ids = [group.id for group in groups]
    assert await replay.read_evaluated([*ids, "other"]) == ([], {}, ["other"])
    await score_all(replay)
    done, failed, unknown = await replay.read_evaluated(ids)
    assert (failed, unknown) == ({}, [])
    assert [item.group.id for item in done] == ids
    assert done[0].trajectories[0][1].reward == 1.0
    await replay.drop_validation(timeline, 1)
    assert (await replay.stats())["counts"]["validation"]["evaluated"] == 3


async def test_refit_admits_the_next_step(replay: ReplayClient) -> None:
    replica = await begin(replay, 8)
    assert len(await generate(replay, replica)) == 4
    await reserve(replay, 0)
    assert await replay.lease(replica, 64) == []
    await refit(replay, 1, [replica])
    assert len(await replay.lease(replica, 64)) == 2


async def test_wait_returns_at_a_wake_up(replay: ReplayClient) -> None:
    await replay.wait_work(5.0)
    await enqueue(replay, [0])
    await replay.wait_work(5.0)
    replica = await healthy_replica(replay)
    assert len(await replay.lease(replica, 1)) == 1


async def test_metrics_and_events_are_followed(replay: ReplayClient) -> None:
    await replay.publish_metrics("train", 3, {"reward": 0.5}, (await replay.state()).timeline)
    ((entry, kind, step, metrics),) = await replay.metrics()
    assert (kind, step, metrics) == ("train", 3, {"reward": 0.5})
    assert await replay.metrics(after=entry) == []
    events = await replay.events("0", 0.1)
    assert events[0][1] == {"kind": "opened"}
    assert await replay.events(events[-1][0], 0.01) == []


async def test_the_server_keeps_as_many_steps_of_metrics_as_one_call_reads(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    for step in range(1003):
        await replay.publish_metrics("train", step, {"reward": 0.5}, timeline)
    assert [step for _, _, step, _ in await replay.metrics()] == list(range(3, 1003))
    assert await replay.metrics("0", 2000) == await replay.metrics()
