"""A replica that pulls its weights: which work it may do under old ones, and what proves new ones."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.base.errors import Fenced, NotVerified, WrongTimeline
from headrace.replay import EnvironmentLimits, Limits, ReplayClient, Waiting
from tests.support.buffer import (
    died,
    enqueue,
    generate,
    healthy_replica,
    make_group,
    nonce,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    tighten,
)
from tests.support.wake_ups import WakeUps

PROBE = [-1.0]


async def offer(replay: ReplayClient, version: int) -> str:
    name = nonce()
    await replay.offer(name, version, (await replay.state()).timeline, {"digest": "of a list"}, PROBE, 1e-3, 1e-3)
    return name


async def pulling(replay: ReplayClient, version: int) -> str:
    """A replica that has pulled this version."""
    replica = nonce()
    await replay.register_puller(replica, {})
    assert (await replay.verify(replica, await offer(replay, version), PROBE)).verified
    return replica


async def state_of(replay: ReplayClient, replica: str) -> tuple[str, int]:
    (found,) = (one for one in await replay.replicas() if one.id == replica)
    assert found.pulls
    return found.state, found.version


async def train(replay: ReplayClient, replica: str, steps: int) -> None:
    """So many steps, all by this replica, which is given each version."""
    for _ in range(steps):
        step = (await replay.state()).next_step
        await generate(replay, replica, 2)
        await reserve(replay, step)
        await refit(replay, step + 1, [replica])


async def test_law_2_old_weights_write_nothing_that_could_not_be_trained(replay: ReplayClient) -> None:
    await enqueue(replay, range(12))
    far, near = await pulling(replay, 0), await healthy_replica(replay)
    await train(replay, near, 1)
    assert await state_of(replay, far) == ("HEALTHY", 0)  # no epoch was for it
    (own,) = await replay.lease(far, 1)  # of step 1, which its age allows
    await push_all(replay, own)
    await score_all(replay)
    await train(replay, near, 1)
    assert await replay.lease(far, 64) == []
    (orphan, *others) = await replay.lease(near, 64)
    await replay.release(orphan, "it drains", failed=False)
    assert await replay.lease(far, 64) == []
    assert [lease.group.id for lease in await replay.lease(near, 1)] == [orphan.group.id]
    assert others
    await replay.deregister(near, died=True)  # what it held are suspects
    assert await replay.lease(far, 64) == []
    assert await replay.lease(await healthy_replica(replay, 2), 64) != []


async def test_law_6_who_may_not_write_a_suspect_does_not_drain_for_it(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(12))
    far, near = await pulling(replay, 0), await healthy_replica(replay)
    await train(replay, near, 1)
    doomed = await healthy_replica(replay, 1)
    await replay.enqueue([make_group(0, lane="validation")], timeline, validation=1)
    (validation,) = await replay.lease(doomed, 1)
    assert await replay.lease(far, 1) != []
    (own,) = await replay.lease(near, 1)
    await replay.deregister(doomed, died=True)
    assert await replay.lease(far, 64) == []
    assert await replay.lease(near, 64) == []  # it drains
    await push_all(replay, own)
    await score_all(replay)
    assert [lease.group.id for lease in await replay.lease(near, 64)] == [validation.group.id]


async def test_a_validation_is_written_by_the_weights_that_it_evaluates(replay: ReplayClient) -> None:
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(12))
    far, near = await pulling(replay, 0), await healthy_replica(replay)
    await train(replay, near, 1)
    await replay.enqueue([make_group(order, lane="validation") for order in range(2)], timeline, validation=1)
    assert [lease.group.lane for lease in await replay.lease(far, 1)] == ["train"]
    held = await replay.lease(near, 2)
    assert [lease.group.lane for lease in held] == ["validation", "validation"]
    await replay.release(held[0], "it drains", failed=False)
    assert all(lease.group.lane == "train" for lease in await replay.lease(far, 64))
    assert (await replay.verify(far, await offer(replay, 1), PROBE)).verified
    assert [lease.group.id for lease in await replay.lease(far, 1)] == [held[0].group.id]


async def test_law_6_a_runner_is_woken_by_what_a_replica_has_pulled(replay: ReplayClient, woken: WakeUps) -> None:
    async def pull(version: int) -> set[str]:
        replica = nonce()
        await replay.register_puller(replica, {})
        name = await offer(replay, version)
        await woken.take()
        assert (await replay.verify(replica, name, PROBE)).verified
        return await woken.take()

    assert "work" not in await pull(0)
    await replay.register_runner(nonce(), {})
    assert "work" in await pull(1)


@pytest.mark.limits(environments={"game": EnvironmentLimits(episodes=True)})
async def test_law_2_episodes_of_a_validation_are_of_what_it_evaluates(replay: ReplayClient) -> None:
    """Those of training may be answered by a replica that still has older weights."""
    timeline = (await replay.state()).timeline
    await enqueue(replay, range(2))
    far, near = await pulling(replay, 0), await healthy_replica(replay)
    await train(replay, near, 1)
    training = make_group(2, env_name="game")
    validation = make_group(0, lane="validation", env_name="game")
    await replay.enqueue([training], timeline)
    await replay.enqueue([validation], timeline, validation=1)
    runner = nonce()
    await replay.register_runner(runner, {})
    leases = await replay.lease_episodes(runner, 64, 64)
    assert {lease.group.id: lease.version for lease in leases} == {training.id: 0, validation.id: 1}
    for lease in leases:
        await replay.release(lease, "shutdown", failed=False)
    await replay.deregister(near)
    other = nonce()
    await replay.register_runner(other, {})
    assert [lease.group.id for lease in await replay.lease_episodes(other, 64, 64)] == [training.id]
    assert (await replay.verify(far, await offer(replay, 1), PROBE)).verified
    (lease,) = await replay.lease_episodes(other, 64, 64)
    assert (lease.group.id, lease.version) == (validation.id, 1)


async def test_law_6_who_has_no_room_takes_no_share(replay: ReplayClient) -> None:
    await enqueue(replay, range(12))
    far, near = await pulling(replay, 0), await healthy_replica(replay)
    await train(replay, near, 2)
    assert await replay.lease(far, 64) == []
    assert len(await replay.lease(near, 64)) == 4  # all that admission allows


async def test_law_6_who_gets_each_version_late_has_its_share(replay: ReplayClient, limits: Limits) -> None:
    """The other one has room for everything, is fast, and gets each version first."""
    await tighten(replay, limits, prompts_per_step=4, max_age=3)
    await enqueue(replay, range(80))
    near, far = await healthy_replica(replay), await pulling(replay, 0)
    assert len(await generate(replay, near)) == 16  # nobody waited yet
    for step in range(8):
        assert await generate(replay, far) == []
        await reserve(replay, step)
        await refit(replay, step + 1, [near])
        assert await generate(replay, near) == []
        if step == 0:  # all that the first version admits is in line
            continue
        assert (await replay.verify(far, await offer(replay, step), PROBE)).verified  # and the other has the next
        assert len(await generate(replay, far)) == 2
        others = 0
        while got := await generate(replay, near):
            others += len(got)
        assert others == 2


async def test_law_6_nobody_waits_for_one_that_is_alive_and_never_comes(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, prompts_per_step=4, max_age=3)
    near, far = await healthy_replica(replay), await pulling(replay, 0)
    assert await replay.lease(far, 64) == []  # it waits
    await enqueue(replay, range(80))
    for step in range(8):
        while isinstance(await replay.reserve(step, (await replay.state()).timeline), Waiting):
            assert len(await generate(replay, near)) > 0
        await refit(replay, step + 1, [near])
    await generate(replay, near)
    assert (await replay.state()).counts["ready"] == 16  # its weights are too old by now: it has no share any more


async def test_old_weights_hold_back_no_episodes(replay: ReplayClient, limits: Limits) -> None:
    games = {"game": EnvironmentLimits(episodes=True)}
    await replay.open_run(dataclasses.replace(limits, environments=games))
    await enqueue(replay, range(4))
    timeline = (await replay.state()).timeline
    await pulling(replay, 0)
    near = await healthy_replica(replay)
    await train(replay, near, 2)
    await replay.enqueue([make_group(order, env_name="game") for order in range(4, 6)], timeline)
    runner = nonce()
    await replay.register_runner(runner, {})
    assert [lease.version for lease in await replay.lease_episodes(runner, 64)] == [2, 2]


async def test_law_4_no_late_report_takes_the_place_of_a_later_one(replay: ReplayClient) -> None:
    await enqueue(replay, range(12))
    near = await healthy_replica(replay)
    far = nonce()
    await replay.register_puller(far, {})
    first = await offer(replay, 0)
    await replay.verify(far, first, PROBE)
    await train(replay, near, 1)
    second = await offer(replay, 1)
    await replay.verify(far, second, PROBE)
    for report in (replay.verify(far, first, PROBE), replay.refuse(far, first, "torn")):
        with pytest.raises(Fenced, match="has tried version 1"):
            await report
    assert await state_of(replay, far) == ("HEALTHY", 1)
    assert (await replay.verify(far, second, PROBE)).verified  # its answer was lost
    await replay.refuse(far, second, "torn")
    assert await state_of(replay, far) == ("STALE", -1)
    with pytest.raises(Fenced, match="it must register again"):
        await replay.verify(far, second, PROBE)
    with pytest.raises(NotVerified):
        await replay.lease(far, 1)
    again = nonce()
    await replay.register_puller(again, {})
    assert (await replay.verify(again, second, PROBE)).verified


async def test_law_4_an_offer_ends_with_its_timeline_or_is_superseded(replay: ReplayClient) -> None:
    await enqueue(replay, range(12))
    near, far = await healthy_replica(replay), nonce()
    timeline = (await replay.state()).timeline
    await replay.register_puller(far, {})
    assert await replay.offered(far) is None
    first = await offer(replay, 0)
    newest = await replay.offered(far)
    assert newest is not None
    assert (newest.id, newest.version, newest.timeline, newest.members) == (first, 0, timeline, (far,))
    assert newest.rendezvous == {"digest": "of a list"}
    await train(replay, near, 2)
    with pytest.raises(Fenced, match="newer weights have superseded it"):
        await replay.verify(far, first, PROBE)
    second = await offer(replay, 2)
    await offer(replay, 1)  # late
    newest = await replay.offered(far)
    assert newest is not None
    assert newest.id == second
    await rewind(replay, 2)
    assert await replay.offered(far) is None
    with pytest.raises(Fenced, match="a rewind has ended its timeline"):
        await replay.verify(far, second, PROBE)
    with pytest.raises(WrongTimeline):
        await replay.offer(nonce(), 3, timeline, {}, PROBE, 1e-3, 1e-3)


async def test_a_replica_that_computes_otherwise_is_stale_for_that_reason(replay: ReplayClient) -> None:
    far = nonce()
    await replay.register_puller(far, {})
    verdict = await replay.verify(far, await offer(replay, 0), [-1.1])
    assert not verdict.verified
    assert await state_of(replay, far) == ("STALE", -1)
    with pytest.raises(NotVerified):
        await replay.lease(far, 1)


async def test_an_epoch_is_not_for_it_and_does_not_end_its_work(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, max_age=3)
    far = await pulling(replay, 0)
    epoch = await replay.open_epoch(nonce(), 1, (await replay.state()).timeline, {})
    assert epoch.members == ()
    await replay.begin_epoch(epoch.id, {}, PROBE, 1e-3)
    for call in (replay.acknowledge(far, epoch.id), replay.verify(far, epoch.id, PROBE)):
        with pytest.raises(Fenced):
            await call
    assert await state_of(replay, far) == ("HEALTHY", 0)


async def test_those_that_pull_form_a_tree_in_the_order_in_which_they_came(replay: ReplayClient) -> None:
    replicas = [f"{place}-{nonce()}" for place in range(9)]
    for place, replica in enumerate(replicas):
        await replay.register_puller(replica, {"serves": f"http://10.0.0.{place}:1"})
        await replay.register_puller(replica, {})  # again
    near = await healthy_replica(replay)

    async def above(replica: str) -> list[str]:
        found = await replay.parents(replica)
        assert all(info == {"serves": f"http://10.0.0.{id_[0]}:1"} for id_, info in found)
        return [id_[0] for id_, _ in found]

    trees = [await above(replica) for replica in replicas]
    assert trees == [[], [], ["0"], ["0"], ["1"], ["1"], ["2", "0"], ["2", "0"], ["3", "0"]]
    assert await above(near) == await above(nonce()) == []
    await replay.deregister(replicas[0])
    assert [await above(replica) for replica in replicas[1:]] == [
        *([], [], ["1"], ["1"], ["2"], ["2"], ["3", "1"], ["3", "1"])
    ]
    again = f"9-{nonce()}"
    await replay.register_puller(again, {"serves": "http://10.0.0.9:1"})
    assert await above(again) == ["4", "1"]
    await replay.quarantine(replicas[1], (await replay.state()).timeline, "it computes otherwise")
    assert await above(again) == ["4"]


async def test_who_has_older_weights_is_not_asked(replay: ReplayClient) -> None:
    first, second, third = (f"{place}-{nonce()}" for place in range(3))  # of one moment: by name
    for replica in (first, second, third):
        await replay.register_puller(replica, {})
    assert [id_ for id_, _ in await replay.parents(third)] == [first]
    old, new = await offer(replay, 0), await offer(replay, 1)
    await replay.verify(first, old, PROBE)
    assert [id_ for id_, _ in await replay.parents(third)] == [first]
    await replay.verify(third, new, PROBE)
    assert [id_ for id_, _ in await replay.parents(third)] == []
    await replay.verify(first, new, PROBE)
    assert [id_ for id_, _ in await replay.parents(third)] == [first]


async def test_a_dead_replica_is_asked_for_nothing(replay: ReplayClient, limits: Limits) -> None:
    dead, *others = (f"{place}-{nonce()}" for place in range(4))
    await replay.register_puller(dead, {})
    for replica in others:
        await replay.register_puller(replica, {})

    assert [id_ for id_, _ in await replay.parents(others[1])] == [dead]
    await died(replay, limits, dead)
    assert [id_ for id_, _ in await replay.parents(others[1])] == []
    assert [id_ for id_, _ in await replay.parents(others[2])] == [others[0]]


async def test_who_was_not_reached_is_shown(replay: ReplayClient) -> None:
    far, near = nonce(), await healthy_replica(replay)
    await replay.register_puller(far, {})
    for replica in (far, near, nonce()):
        await replay.unreached(replica, "connection refused")
    assert {one.id: one.unreached for one in await replay.replicas()} == {far: "connection refused", near: ""}
