"""Law 6: a call that gives somebody who waits something to do, or to learn, wakes them: nobody waits for the second after which callers
ask again. Here the model looks closely at every call, for everyone who waits."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import EnvironmentBroken
from headrace.records.score import Score
from headrace.replay import Ended, Lease, Reservation
from tests.properties.setting import Setting
from tests.properties.world import World
from tests.support.buffer import make_group, make_trajectory

NO = Score("INVALID", message="no such field")
PROBE = [0.0]


@pytest.fixture
def world(world: World) -> World:
    world.look_every = 1
    return world


async def wakes(world: World, name: str, *args: Any) -> set[str]:
    """The channels that this call wakes."""
    await world.call(name, *args)
    return world.just_woken


async def enqueue(world: World, count: int, **changes: Any) -> None:
    first = world.model.enqueued + 1
    groups = [make_group(order, **changes) for order in range(first, first + count)]
    await world.call("enqueue", groups, world.model.timeline, False)


async def verified(world: World, replica: str, version: int = 0) -> None:
    epoch = f"epoch-of-{replica}-{version}"
    if replica not in world.model.members:
        await world.call("register", replica, {})
    await world.call("open_epoch", epoch, version, world.model.timeline, {})
    await world.call("acknowledge", replica, epoch)
    await world.call("begin_epoch", epoch, {}, PROBE, 1e-3)
    await world.call("verify", replica, epoch, PROBE)
    await world.call("end_epoch", epoch, False)


async def begin(world: World, setting: Setting, groups: int = 2) -> list[Lease]:
    """So many groups, leased to the replica `replica`."""
    await world.open(setting.limits())
    await enqueue(world, groups, n=setting.n)
    await verified(world, "replica")
    return await world.call("lease", "replica", groups)  # type: ignore[no-any-return]


async def push(world: World, leases: list[Lease]) -> None:
    items = [(lease, make_trajectory(lease, index)) for lease in leases for index in lease.missing]
    assert await world.call("push_many", items) == [None] * len(items)


async def score(world: World, *rewards: float) -> None:
    """What waits, the first of it with the first of these, and so on; without any, all with rewards that differ in a group."""
    jobs = await world.call("take_scoring", {"math": len(rewards) or 64})
    given = rewards or [float(job.trajectory.index) for job in jobs]
    await world.call("score_many", [(job, Score("SCORED", reward)) for job, reward in zip(jobs, given, strict=True)])


async def offer(world: World, version: int) -> None:
    await world.call("offer", f"offer-{version}", version, world.model.timeline, {}, PROBE, 1e-3, 1e-3)


async def train(world: World, step: int) -> Reservation:
    batch = await world.call("reserve", step, world.model.timeline)
    assert isinstance(batch, Reservation)
    return batch


async def live_on(world: World, *leases: Lease) -> None:
    """Ten seconds pass, and the replica lives on, with these leases."""
    for _ in range(2):
        await world.pass_time(5_000)
        await world.call("heartbeat", "replica", [lease.token for lease in leases])


async def test_law_6_members_learn_of_an_epoch_and_the_trainer_of_them(world: World) -> None:
    await world.open(Setting().limits())
    timeline = world.model.timeline
    assert "epoch" in await wakes(world, "register", "replica", {})
    assert "work" in await wakes(world, "open_epoch", "one", 0, timeline, {})
    assert "epoch" in await wakes(world, "acknowledge", "replica", "one")
    assert "work" in await wakes(world, "begin_epoch", "one", {}, PROBE, 1e-3)
    assert "epoch" in await wakes(world, "verify", "replica", "one", PROBE)
    assert "work" in await wakes(world, "end_epoch", "one", False)
    await world.call("open_epoch", "two", 1, timeline, {})
    assert "epoch" in await wakes(world, "refuse", "replica", "two", "no memory")
    assert "epoch" in await wakes(world, "deregister", "replica", False)


@pytest.mark.parametrize("how", ["quarantined", "left", "died", "silent", "stale"])
async def test_law_6_who_is_no_longer_counted_leaves_its_share(world: World, how: str) -> None:
    leases = await begin(world, Setting())
    if how == "stale":
        await world.call("register_puller", "other", {})
        await offer(world, 0)
        await world.call("verify", "other", "offer-0", PROBE)
        await offer(world, 1)
    else:
        await verified(world, "other")
    assert await world.call("lease", "other", 8) == []
    await enqueue(world, 1)
    assert await world.call("lease", "replica", 8) == []  # it is for the one that waits and holds nothing
    if how == "quarantined":
        assert {"epoch", "work"} <= await wakes(world, "quarantine", "other", world.model.timeline, "it stands apart")
    elif how == "stale":
        assert "work" in await wakes(world, "refuse", "other", "offer-1", "no memory")
    elif how == "silent":
        await live_on(world, *leases)
        await live_on(world, *leases)
        assert {"epoch", "work"} <= world.just_woken
    else:
        assert {"epoch", "work"} <= await wakes(world, "deregister", "other", how == "died")
    assert await world.call("lease", "replica", 8) != []


async def test_law_6_who_pulls_is_woken_by_an_offer(world: World) -> None:
    await world.open(Setting().limits())
    await world.call("register_puller", "replica", {})
    await offer(world, 0)
    assert "work" in world.just_woken


async def test_law_6_prompts_and_their_end_wake_who_waits_for_them(world: World) -> None:
    await begin(world, Setting())
    assert "work" in await wakes(world, "enqueue", [make_group(2)], world.model.timeline, False)
    await world.limit(Setting().limits())
    assert "work" in world.just_woken
    assert "ready" in await wakes(world, "close", world.model.timeline)


async def test_law_6_a_trajectory_wakes_scorers_and_a_score_the_trainer(world: World) -> None:
    first, second = await begin(world, Setting(prompts=1, scoring_attempts=1))
    assert "scoring" in await wakes(world, "push_many", [(first, make_trajectory(first, 0))])
    (job,) = await world.call("take_scoring", {"math": 1})
    assert "scoring" in await wakes(world, "score_many", [(job, Score("NOT_STARTED", message="it is busy"))])
    await push(world, [second])
    await score(world)
    await push(world, [first])
    await world.pass_time(1_000)
    await score(world)
    assert "ready" in world.just_woken


async def test_law_6_a_group_that_fails_wakes_those_behind_it(world: World) -> None:
    await push(world, await begin(world, Setting(), 1))
    (job, _) = await world.call("take_scoring", {"math": 2})
    assert {"ready", "work"} <= await wakes(world, "score_many", [(job, Score("UNSENDABLE", message="no"))])


async def test_law_6_a_group_that_does_without_one_wakes_its_scorer(world: World) -> None:
    """It may score whole groups, and hold the others until then."""
    (lease,) = await begin(world, Setting(n=1, redundant=1), 1)
    await world.call("push_many", [(lease, make_trajectory(lease, 0))])
    assert "scoring" in await wakes(world, "abandon", lease, 1, "it is too long")


async def test_law_6_a_filtered_group_leaves_its_place_to_others(world: World) -> None:
    await push(world, await begin(world, Setting(filter=True), 1))
    await score(world, 1.0, 1.0)
    assert {"ready", "work"} <= world.just_woken


async def test_law_6_a_group_that_leaves_the_line_wakes_the_trainer(world: World) -> None:
    """Those behind it may be the next batch."""
    slow, *rest = await begin(world, Setting(prompts=1, age=2), 3)
    await push(world, rest)
    await score(world)
    assert {"ready", "work"} <= await wakes(world, "release", slow, "the engine refused it", True)
    await train(world, 0)
    (slow,) = await world.call("lease", "replica", 1)
    assert {"ready", "work"} <= await wakes(world, "reject", slow, "it can never be generated")


async def test_law_6_a_lost_lease_wakes_who_goes_on(world: World) -> None:
    (lease,) = await begin(world, Setting(), 1)
    await verified(world, "other")
    assert await world.call("lease", "other", 8) == []
    assert "work" in await wakes(world, "release", lease, "it drains", False)


async def test_law_6_an_episode_wakes_its_grader(world: World) -> None:
    await begin(world, Setting(episodes=("math",)), 1)
    await world.call("register_runner", "runner", {})
    (lease,) = await world.call("lease_episodes", "runner", 8, 8)
    assert "scoring" in await wakes(world, "finish", lease, 0, make_trajectory(lease, 0), None)


async def test_law_6_a_breaker_wakes_all_whom_it_kept_waiting(world: World) -> None:
    await push(world, await begin(world, Setting(prompts=4, give_up=30.0), 4))
    jobs = await world.call("take_scoring", {"math": 8})
    await world.call("score_many", [(job, NO) for job in jobs])
    for _ in range(3):
        await live_on(world)
        (job,) = await world.call("take_scoring", {"math": 8})
        assert "work" in await wakes(world, "score_many", [(job, NO)])  # a new group may be the next probe
    await live_on(world)
    (job,) = await world.call("take_scoring", {"math": 8})
    assert {"work", "ready", "scoring"} <= await wakes(world, "score_many", [(job, Score("SCORED", 1.0))])
    jobs = await world.call("take_scoring", {"math": 8})
    # it has been broken all the time, and for longer than the trainer waits
    assert "ready" in await wakes(world, "score_many", [(job, NO) for job in jobs])
    assert isinstance(await world.call("reserve", 0, world.model.timeline), EnvironmentBroken)


async def test_law_6_a_refill_that_is_complete_wakes_all(world: World) -> None:
    await begin(world, Setting())
    assert {"work", "ready", "epoch"} <= await wakes(world, "restore", 0, "later", "another", 1, Ended())
    await world.call("enqueue", [make_group(0), make_group(1)], "later", True)
    assert {"work", "ready"} <= await wakes(world, "end_refill", "later")


async def test_law_6_a_trainer_that_was_replaced_learns_it(world: World) -> None:
    await begin(world, Setting())
    assert {"work", "ready", "epoch"} <= await wakes(world, "rewind", 0, "later")


async def test_law_6_a_rejected_batch_wakes_who_makes_and_takes_it(world: World) -> None:
    await push(world, await begin(world, Setting()))
    await score(world)
    first, _ = (await train(world, 0)).groups
    rejected = await wakes(world, "reject_step", 0, world.model.timeline, "nonce", {first: 1}, "law 7")
    assert {"work", "ready"} <= rejected


async def test_law_6_a_checkpoint_wakes_who_lacked_memory(world: World) -> None:
    """Payloads of its steps, which are retained, may go now."""
    setting = Setting(prompts=1, n=1, room=1, retain=2)
    await push(world, await begin(world, setting, 1))
    await score(world, 1.0)
    batch = await train(world, 0)
    await enqueue(world, 1, n=1)
    assert await world.call("lease", "replica", 1) == []
    assert "work" in await wakes(world, "commit", 1, world.model.timeline, {0: [*batch.groups]})
    assert await world.call("lease", "replica", 1) != []


async def test_law_6_the_next_step_wakes_who_lacked_memory(world: World) -> None:
    """Payloads of the step before it may go now."""
    leases = await begin(world, Setting(prompts=1, n=1), 2)
    await push(world, leases)
    await score(world, 1.0, 1.0)
    await train(world, 0)
    await enqueue(world, 1, n=1)
    await verified(world, "replica", 1)
    await world.limit(Setting(prompts=1, n=1, room=1).limits())
    assert await world.call("lease", "replica", 1) == []
    assert "work" in await wakes(world, "reserve", 1, world.model.timeline)


async def test_law_6_a_dropped_validation_sets_its_replicas_free(world: World) -> None:
    await world.open(Setting().limits())
    for replica in ("replica", "other"):
        await verified(world, replica)
    timeline = world.model.timeline
    await world.call("drop_validation", timeline, 0, ["replica"])
    await world.call("enqueue", [make_group(0, lane="validation")], timeline, False, 0)
    await enqueue(world, 1)
    assert "work" in await wakes(world, "drop_validation", timeline, 1)


async def test_law_6_a_server_that_has_room_again_wakes_who_lacked_it(world: World) -> None:
    await begin(world, Setting())
    await world.has_room(0)
    await world.call("make_room", 50, False)
    await world.has_room(None)
    assert "work" in await wakes(world, "make_room")
