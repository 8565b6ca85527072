"""A replica that is quarantined: nobody waits for it, and nothing is lost."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from headrace.base.errors import Fenced, LeaseLost, NotVerified, WrongTimeline
from headrace.net.service import exported
from headrace.replay import ReplayClient
from headrace_services.replay.gauges import BufferGauges, LatestStats
from tests.support.buffer import (
    enqueue,
    group_of,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    some,
)

WHY = "its refit failed: no memory; 3 times in a row"


async def fleet(replay: ReplayClient) -> dict[str, tuple[str, int, str]]:
    return {replica.id: (replica.state, replica.leases, replica.reason) for replica in await replay.replicas()}


async def quarantine(replay: ReplayClient, replica: str) -> bool:
    return await replay.quarantine(replica, (await replay.state()).timeline, WHY)


async def two(replay: ReplayClient) -> tuple[str, str]:
    good, bad = "good", "bad"
    for replica in (good, bad):
        await replay.register(replica, {})
    await refit(replay, 0, [good, bad])
    return good, bad


async def test_law_6_liveness_nobody_waits_for_a_quarantined_replica(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    good, bad = await two(replay)
    begun, pushed = await replay.lease(bad, 2)
    await replay.push(begun, make_trajectory(begun, 0))
    await push_all(replay, pushed)
    assert await quarantine(replay, bad)
    assert await quarantine(replay, bad)  # the reply was lost
    assert await fleet(replay) == {good: ("HEALTHY", 0, ""), bad: ("QUARANTINED", 0, WHY)}

    told = await replay.heartbeat(bad, [begun.token])
    assert (told.state, told.reason, told.lost) == ("QUARANTINED", WHY, (begun.token,))
    with pytest.raises(NotVerified):
        await replay.lease(bad, 1)
    with pytest.raises(LeaseLost):
        await replay.push(begun, make_trajectory(begun, 1))
    # what it handed in stays, and another replica goes on with the rest, at no cost of an attempt and apart from nobody
    (again,) = await replay.lease(good, 1)
    assert (again.group.id, again.attempt, again.missing) == (begun.group.id, begun.attempt, (1,))
    assert (await group_of(replay, again))["failures"] == 0
    await push_all(replay, again)
    await score_all(replay)
    batch = await reserve(replay, 0)
    assert set(batch.groups) == {begun.group.id, pushed.group.id}

    # no epoch asks it, and none verifies it
    await refit(replay, 1, [good])
    epoch = await replay.epoch()
    assert epoch is not None
    assert epoch.members == (good,)
    with pytest.raises(Fenced):
        await replay.acknowledge(bad, epoch.id)
    # a rewind doesn't bring it back; a new name does
    await rewind(replay, 0)
    assert {id_: state for id_, (state, *_) in (await fleet(replay)).items()} == {good: "STALE", bad: "QUARANTINED"}
    await replay.register(bad, {})
    assert (await fleet(replay))[bad][0] == "QUARANTINED"
    await replay.deregister(bad)
    with pytest.raises(Fenced):
        await replay.register(bad, {})
    await replay.register("anew", {})
    await refit(replay, 0, [good, "anew"])
    assert {id_: state for id_, (state, *_) in (await fleet(replay)).items()} == {good: "HEALTHY", "anew": "HEALTHY"}


async def test_law_6_liveness_quarantine_in_a_refit_forbids_its_proof(replay: ReplayClient) -> None:
    good, bad = await two(replay)
    epoch, timeline = nonce(), (await replay.state()).timeline
    await replay.open_epoch(epoch, 1, timeline, {})
    for replica in (good, bad):
        await replay.acknowledge(replica, epoch)
    await replay.begin_epoch(epoch, {}, [0.0], 1e-3)
    assert not await quarantine(replay, bad)  # nobody is HEALTHY
    assert (await replay.verify(good, epoch, [0.0])).verified
    assert await quarantine(replay, bad)
    with pytest.raises(Fenced, match="QUARANTINED"):
        await replay.verify(bad, epoch, [0.0])


async def test_law_6_liveness_the_last_healthy_is_never_quarantined(replay: ReplayClient) -> None:
    good, bad = await two(replay)
    assert not await quarantine(replay, "nobody")
    assert await quarantine(replay, bad)
    assert not await quarantine(replay, good)
    await replay.register("stale", {})
    assert not await quarantine(replay, good)  # another is there, and not HEALTHY
    assert await quarantine(replay, "stale")
    with pytest.raises(WrongTimeline):
        await replay.quarantine(good, "another", WHY)
    assert {id_: state for id_, (state, *_) in (await fleet(replay)).items()} == {
        good: "HEALTHY",
        bad: "QUARANTINED",
        "stale": "QUARANTINED",
    }


async def test_law_6_liveness_a_quarantined_replica_gives_up_suspects(replay: ReplayClient) -> None:
    await enqueue(replay, range(4))
    good, bad = await two(replay)
    await replay.register("dying", {})
    await refit(replay, 0, [good, bad, "dying"])
    await replay.lease("dying", 2)
    await replay.deregister("dying", died=True)
    (suspect,) = await replay.lease(bad, 2)
    assert await quarantine(replay, bad)
    leases = await replay.lease(good, 4)  # empty: the other suspect comes alone, and then all else
    for lease in leases:
        await push_all(replay, lease)
    leases += await replay.lease(good, 4)
    assert suspect.group.id in {lease.group.id for lease in leases}
    assert len({lease.group.id for lease in leases}) == 4 == len(leases)
    assert some((await replay.state()).counts).get("failed", 0) == 0


async def test_the_disagreement_of_each_replica_is_kept_for_people(replay: ReplayClient) -> None:
    good, bad = await two(replay)
    timeline = (await replay.state()).timeline

    async def shown() -> dict[str, float | None]:
        return {replica.id: replica.logprob_error for replica in await replay.replicas()}

    assert await shown() == {good: None, bad: None}
    await replay.disagreements(3, timeline, {good: 1.0, bad: 2.5, "gone": 7.0})
    assert await shown() == {good: 1.0, bad: 2.5}
    await replay.disagreements(4, timeline, {bad: 1e200})
    await replay.disagreements(3, timeline, {bad: 2.5})  # late
    assert await shown() == {good: 1.0, bad: 1e200}
    with pytest.raises(WrongTimeline):
        await replay.disagreements(5, "another", {bad: 1.0})

    await replay.quarantine(bad, timeline, WHY)
    latest = LatestStats()
    latest.stats = await replay.stats()
    with exported(BufferGauges(latest)):
        metrics = generate_latest().decode()
    for line in (
        'headrace_replay_replicas{state="HEALTHY"} 1.0',
        'headrace_replay_replicas{state="QUARANTINED"} 1.0',
        'headrace_replay_replica_logprob_error{replica="good"} 1.0',
        'headrace_replay_replica_logprob_error{replica="bad"} 1e+200',
    ):
        assert line in metrics
