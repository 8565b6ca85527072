"""Law 6: a deadline counts from the last progress. What is progress and what is none, and what becomes of a group whose holder was silent.
The buffer is real, its clock the test's, and the model agrees with every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from headrace.records.score import Score
from headrace.replay import Lease
from tests.properties.setting import DEADLINE_S, Setting
from tests.properties.world import World
from tests.support.buffer import make_call, make_group, make_trajectory

BEAT_MS = 5_000
# Longer than half of the deadline, so that two of them are over it.
LONG_S = 20


async def begin(world: World, groups: int = 1, setting: Setting | None = None) -> list[Lease]:
    """The groups, leased to the replica `replica`, or the runner `runner`."""
    setting = setting or Setting()
    await world.open(setting.limits())
    await world.call("enqueue", [make_group(order) for order in range(groups)], world.model.timeline, False)
    await world.call("register", "replica", {})
    await world.refit()
    if not setting.episodes:
        return await world.call("lease", "replica", groups)  # type: ignore[no-any-return]
    await world.call("register_runner", "runner", {})
    return await world.call("lease_episodes", "runner", 8, 8)  # type: ignore[no-any-return]


async def beat(world: World, leases: list[Lease], seconds: float = LONG_S, progress: int = 0) -> tuple[str, ...]:
    """Heartbeats go on for this long, none of which reports more than `progress`. Returns the tokens that were lost."""
    tokens = [lease.token for lease in leases]
    lost: set[str] = set()
    for _ in range(0, round(1000 * seconds), BEAT_MS):
        await world.pass_time(BEAT_MS)
        reply = await world.call("heartbeat", "replica", tokens, [progress] * len(tokens))
        lost |= set(reply.lost)
        if world.model.runners:
            reply = await world.call("runner_heartbeat", "runner", tokens, [progress] * len(tokens))
            lost = set(reply.lost)
    return tuple(token for token in tokens if token in lost)


Act = Callable[[World, Lease], Awaitable[None]]


async def push(world: World, lease: Lease) -> None:
    assert await world.call("push_many", [(lease, make_trajectory(lease, 0))]) == [None]


async def save(world: World, lease: Lease, length: int = 4) -> None:
    assert await world.call("save_many", [(lease, make_trajectory(lease, 1, length=length))]) == [None]


async def save_more(world: World, lease: Lease) -> None:
    await save(world, lease, 5)


async def do_without(world: World, lease: Lease) -> None:
    await world.call("abandon", lease, 2, "no")


async def report(world: World, lease: Lease) -> None:
    await world.call("heartbeat", "replica", [lease.token], [1])


async def append(world: World, lease: Lease) -> None:
    await world.call("append", lease, 0, 0, "nonce", make_call())


async def finish(world: World, lease: Lease) -> None:
    await world.call("finish", lease, 1, make_trajectory(lease, 1), Score("SCORED", 1.0))


async def start_over(world: World, lease: Lease) -> None:
    await world.call("finish", lease, 0, None, Score("FAILED", message="no"))


async def report_of_runner(world: World, lease: Lease) -> None:
    await world.call("runner_heartbeat", "runner", [lease.token], [1])


# Two indices are never pushed, so that the group stays open.
WIDE = Setting(redundant=1)
EPISODES = Setting(redundant=1, episodes=("math",))
CASES = [
    *((act, WIDE) for act in (push, save, do_without, report)),
    *((act, EPISODES) for act in (append, finish, start_over, report_of_runner)),
]


@pytest.mark.parametrize(("act", "setting"), CASES, ids=[act.__name__ for act, _ in CASES])
async def test_law_6_progress_starts_the_deadline_over_and_once(world: World, act: Act, setting: Setting) -> None:
    (lease,) = await begin(world, setting=setting)
    assert await beat(world, [lease]) == ()
    await act(world, lease)
    progress = int(act in (report, report_of_runner))
    assert await beat(world, [lease], progress=progress) == ()
    await act(world, lease)  # the same again is none
    assert await beat(world, [lease], DEADLINE_S - LONG_S, progress=progress) == (lease.token,)


async def test_law_6_only_a_longer_save_is_progress(world: World) -> None:
    (lease,) = await begin(world)
    await save(world, lease)
    assert await beat(world, [lease]) == ()
    await save_more(world, lease)
    assert await beat(world, [lease]) == ()
    await save(world, lease, 3)
    assert await beat(world, [lease], DEADLINE_S - LONG_S) == (lease.token,)


async def test_law_6_an_episode_that_could_not_start_is_no_progress(world: World) -> None:
    (lease,) = await begin(world, setting=EPISODES)
    assert await beat(world, [lease]) == ()
    await world.call("finish", lease, 0, None, Score("NOT_STARTED", message="no"))
    assert await beat(world, [lease], DEADLINE_S - LONG_S) == (lease.token,)


async def test_law_6_a_slow_group_that_progresses_has_no_deadline(world: World) -> None:
    (lease,) = await begin(world)
    for progress in range(1, 10):
        assert await beat(world, [lease], LONG_S, progress) == ()
    await push(world, lease)
    assert (await world.client.group(lease.group.id) or {})["failures"] == 0


async def test_law_6_a_silent_replica_loses_the_lease_and_nothing_else(world: World) -> None:
    """It held another group too, with which it goes on: neither is charged."""
    silent, other = await begin(world, 2)
    await push(world, silent)
    await save(world, silent)
    assert await beat(world, [silent, other]) == ()
    await world.call("heartbeat", "replica", [silent.token, other.token], [0, 1])
    assert await beat(world, [silent, other], DEADLINE_S - LONG_S) == (silent.token,)
    group = await world.client.group(silent.group.id) or {}
    assert (group["state"], group["failures"], len(group["trajectories"])) == ("open", 0, 1)
    for telling in ("replica replica", "25 s", "replay.group_deadline_s", "2 groups"):
        assert telling in group["reason"]
    assert (await world.client.stats())["requeues"] == {"deadline": 1}
    await world.call("push_many", [(other, make_trajectory(other, index)) for index in range(2)])
    (again,) = await world.call("lease", "replica", 2)  # apart
    assert (again.ticket, again.attempt, again.missing, set(again.prefixes)) == (silent.ticket, 1, (1,), {1})


async def test_law_6_a_group_that_silences_every_replica_fails(world: World) -> None:
    (lease,) = await begin(world, setting=Setting(attempts=3))
    for failures in (1, 2):
        await beat(world, [lease], DEADLINE_S)
        assert (await world.client.group(lease.group.id) or {})["failures"] == failures
        (lease,) = await world.call("lease", "replica", 1)
    await beat(world, [lease], DEADLINE_S)
    group = await world.client.group(lease.group.id) or {}
    assert group["state"] == "failed"
    assert "attempt 3 of 3" in group["reason"]


async def test_law_6_no_deadline_runs_while_a_group_waits(world: World) -> None:
    (lease,) = await begin(world)
    await push(world, lease)
    await world.call("release", lease, "leaving", False)
    await beat(world, [], 4 * DEADLINE_S)
    (again,) = await world.call("lease", "replica", 1)
    assert (again.ticket, again.missing, again.expires_in_s) == (lease.ticket, (1,), lease.expires_in_s)


async def test_law_6_a_report_that_was_overtaken_renews_nothing(world: World) -> None:
    """Its replica has said since that it came no further."""
    (lease,) = await begin(world)
    assert await beat(world, [lease]) == ()
    late = {"number": 1, "epoch": "", "tokens": [lease.token], "progress": [9]}
    await world.client._connection.call("heartbeat", replica="replica", **late)
    await world.compare([lease.group.id])
    assert await beat(world, [lease], DEADLINE_S - LONG_S) == (lease.token,)


async def test_law_6_each_lease_reports_from_the_beginning(world: World) -> None:
    (lease,) = await begin(world)
    assert await beat(world, [lease], BEAT_MS / 1000, progress=9) == ()
    await world.call("release", lease, "leaving", False)
    (again,) = await world.call("lease", "replica", 1)
    assert await beat(world, [again]) == ()
    await report(world, again)
    assert await beat(world, [again], progress=1) == ()


async def test_law_2_what_is_over_age_is_not_kept_through_silence(world: World) -> None:
    """The group is continued two steps later, with an age of 1: what was pushed and saved starts over."""
    silent, *others = await begin(world, 4, Setting(age=1, policy="drop", ahead=1, prompts=1))
    await push(world, silent)
    await save(world, silent)
    await world.call("push_many", [(other, make_trajectory(other, index)) for other in others for index in range(2)])
    for job in await world.call("take_scoring", {"math": 16}):
        await world.call("score_many", [(job, Score("SCORED", 1.0 + job.trajectory.index))])
    await beat(world, [silent], DEADLINE_S)
    for step in range(2):
        await world.call("reserve", step, world.model.timeline)
    await world.refit(2)
    (again,) = await world.call("lease", "replica", 1)
    assert (again.group.id, again.missing, again.prefixes) == (silent.group.id, (0, 1), {})
