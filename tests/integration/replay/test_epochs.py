"""The fleet as the buffer knows it: membership epochs, health, leaving."""

from __future__ import annotations

import pytest

from headrace.base.errors import Fenced, InvalidCall, NotVerified, WrongTimeline
from headrace.replay import ReplayClient
from tests.support.buffer import begin, enqueue, group_of, nonce, refit, rewind


async def test_deregister_gives_back_and_leaves(replay: ReplayClient) -> None:
    replica = await begin(replay, 4)
    (lease, *_) = await replay.lease(replica, 3)
    await replay.deregister(replica)
    assert (await replay.state()).counts == {"queued": 1, "open": 3}
    assert (await replay.stats())["leases"] == 0
    assert await replay.replicas() == []
    assert (await group_of(replay, lease))["failures"] == 0
    assert (await replay.heartbeat(replica, [lease.token])).lost == (lease.token,)


async def test_epoch_from_announcement_to_done(replay: ReplayClient) -> None:
    assert await replay.epoch() is None
    timeline = (await replay.state()).timeline
    one, two, mute = "one", "two", "mute"
    for replica in (one, two, mute):
        await replay.register(replica, {"pid": 1})
    assert (await replay.heartbeat(one, [])).epoch is None
    epoch = await replay.open_epoch("e1", 4, timeline, {"port": 1, "names": ["w"]})
    assert (epoch.state, epoch.members, epoch.rendezvous) == (
        "announced",
        (mute, one, two),
        {"port": 1, "names": ["w"]},
    )
    assert await replay.open_epoch("e1", 4, timeline, {}) == epoch
    assert (await replay.heartbeat(one, [])).epoch == epoch
    for replica in (one, two, two):
        await replay.acknowledge(replica, "e1")
    with pytest.raises(InvalidCall, match="not begun"):
        await replay.end_epoch("e1", aborted=False)
    epoch = await replay.begin_epoch("e1", {"port": 2}, [0.0], 1e-3)
    assert (epoch.state, epoch.members, epoch.acknowledged) == ("transfer", (one, two), (one, two))
    assert await replay.begin_epoch("e1", {"port": 3}, [0.0], 1e-3) == epoch
    assert (await replay.heartbeat(one, [])).epoch == epoch
    with pytest.raises(Fenced):
        await replay.acknowledge(mute, "e1")
    with pytest.raises(Fenced):
        await replay.verify(mute, "e1", [0.0])
    assert (await replay.verify(one, "e1", [1e-5])).verified
    await replay.refuse(two, "e1", "out of memory")
    epoch = await replay.end_epoch("e1", aborted=False)
    assert (epoch.state, epoch.verified, epoch.refused) == ("done", (one,), {two: "out of memory"})
    assert await replay.end_epoch("e1", aborted=True) == epoch
    states = {replica.id: (replica.state, replica.version) for replica in await replay.replicas()}
    assert states == {one: ("HEALTHY", 4), two: ("STALE", -1), mute: ("STALE", -1)}
    with pytest.raises(Fenced):
        await replay.acknowledge(one, "e0")
    # a rewind ends the epoch and every replica's health
    await rewind(replay, 0)
    with pytest.raises(WrongTimeline):
        await replay.end_epoch("e1", aborted=True)
    assert {replica.state for replica in await replay.replicas()} == {"STALE"}


async def test_an_epoch_for_a_late_replica_leaves_the_others_alone(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    holder, late = nonce(), nonce()
    await replay.register(holder, {})
    await refit(replay, 0, [holder])
    await replay.register(late, {})
    timeline = (await replay.state()).timeline
    assert (await replay.open_epoch("late", 0, timeline, {})).members == (late,)
    assert len(await replay.lease(holder, 1)) == 1
    with pytest.raises(Fenced):
        await replay.acknowledge(holder, "late")
    await replay.acknowledge(late, "late")
    await replay.begin_epoch("late", {}, [0.0], 1e-3)
    assert len(await replay.lease(holder, 1)) == 1
    with pytest.raises(Fenced):
        await replay.refuse(holder, "late", "it is not asked")
    with pytest.raises(NotVerified):
        await replay.lease(late, 1)
    await replay.verify(late, "late", [0.0])
    assert (await replay.end_epoch("late", aborted=False)).verified == (late,)
    states = {replica.id: (replica.state, replica.version) for replica in await replay.replicas()}
    assert states == {holder: ("HEALTHY", 0), late: ("HEALTHY", 0)}
    # the same version of another timeline is another model
    await rewind(replay, 0)
    assert set((await replay.open_epoch("rewound", 0, (await replay.state()).timeline, {})).members) == {holder, late}


async def test_from_the_transfer_on_nobody_is_healthy_until_it_verifies(replay: ReplayClient) -> None:
    await enqueue(replay, range(8))
    member, absent = nonce(), nonce()
    for replica in (member, absent):
        await replay.register(replica, {})
    await refit(replay, 0, [member, absent])
    timeline = (await replay.state()).timeline
    await replay.open_epoch("next", 1, timeline, {})
    await replay.acknowledge(member, "next")
    assert len(await replay.lease(absent, 1)) == 1
    await replay.begin_epoch("next", {}, [0.0], 1e-3)
    for replica in (member, absent):
        with pytest.raises(NotVerified):
            await replay.lease(replica, 1)
    await replay.verify(member, "next", [0.0])
    assert len(await replay.lease(member, 1)) == 1
    await replay.end_epoch("next", aborted=False)
    with pytest.raises(NotVerified):
        await replay.lease(absent, 1)
