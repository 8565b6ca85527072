"""Groups whose episodes runners run: the laws hold for them, beside groups that replicas generate and mixed with them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from headrace.base.errors import EpisodeTooLarge, Fenced, InvalidCall, LeaseLost, Surplus, WrongTimeline
from headrace.config.agents import MOST_SLOTS
from headrace.records.score import Score, Status
from headrace.records.trajectory import Call, EpisodeTrajectory
from headrace.replay import EnvironmentLimits, Lease, Limits, ReplayClient, Waiting
from headrace.replay.connection import open_redis
from tests.support.buffer import (
    contents,
    group_of,
    healthy_replica,
    make_call,
    make_group,
    make_trajectory,
    nonce,
    payloads,
    push_all,
    refit,
    reserve,
    rewind,
    score_all,
    tighten,
)
from tests.support.waiting import eventually

GAME = {"game": EnvironmentLimits(episodes=True)}
LONG = 64
STEPS, INTERLEAVINGS = 4, 20

pytestmark = pytest.mark.limits(environments=GAME)


async def enqueue(replay: ReplayClient, kinds: str, first: int = 0) -> None:
    """Groups in this order: `e` of episodes, `g` that a replica generates."""
    envs = {"e": "game", "g": "math"}
    groups = [make_group(order, env_name=envs[kind]) for order, kind in enumerate(kinds, first)]
    await replay.enqueue(groups, (await replay.state()).timeline)


async def new_runner(replay: ReplayClient) -> str:
    runner = nonce()
    await replay.register_runner(runner, {"host": "here"})
    return runner


async def leased(replay: ReplayClient, slots: int = LONG) -> list[Lease]:
    return await replay.lease_episodes(await new_runner(replay), slots)


async def lease_episodes(replay: ReplayClient) -> Lease:
    """Of the only group."""
    await enqueue(replay, "e")
    await healthy_replica(replay)
    (lease,) = await leased(replay)
    return lease


def orders(leases: Sequence[Lease]) -> list[int]:
    return [lease.group.order for lease in leases]


async def append(replay: ReplayClient, lease: Lease, index: int, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await replay.append(lease, index, number, nonce(), make_call(number - 1, lease.version))


async def score(replay: ReplayClient, lease: Lease, index: int, reward: float = 1.0, build: str = "") -> Lease | None:
    return await replay.finish(lease, index, make_trajectory(lease, index), Score("SCORED", reward, build=build))


async def fail(replay: ReplayClient, lease: Lease, index: int, status: Status = "FAILED") -> Lease | None:
    return await replay.finish(lease, index, None, Score(status, message="the program raised"))


async def finish_all(replay: ReplayClient, leases: Sequence[Lease]) -> None:
    for lease in leases:
        for index in lease.missing:
            await score(replay, lease, index, reward=float(index))


# -- kinds


async def test_law_5_the_order_of_batches_ignores_which_kind_is_faster(replay: ReplayClient) -> None:
    await enqueue(replay, "eggege")
    replica = await healthy_replica(replay)
    fast = await replay.lease(replica, 8)
    assert orders(fast) == [1, 2]  # admission counts both kinds: two steps of two are under way
    for lease in fast:
        await push_all(replay, lease)
    await score_all(replay)
    timeline = (await replay.state()).timeline
    assert await replay.reserve(0, timeline) == Waiting(1, 2)  # for the episodes before them
    assert not await replay.lease(replica, 8)

    slow = await leased(replay)
    assert orders(slow) == [0, 3]
    assert [lease.ticket for lease in (slow[0], *fast, slow[1])] == [0, 1, 2, 3]
    await finish_all(replay, slow)
    assert (await reserve(replay, 0)).groups == ("e0-train-0", "e0-train-1")
    assert (await reserve(replay, 1)).groups == ("e0-train-2", "e0-train-3")


class Interleaving:
    """A run of both kinds, whose processes act in an order that `seed` draws, some of them a hundred times as often as others. Each group
    may be interrupted once: its replica drains, or an episode of it fails."""

    def __init__(self, replay: ReplayClient, seed: int) -> None:
        self.replay, self.random = replay, random.Random(seed)
        self.kinds = "".join(self.random.choices("eg", k=2 * STEPS))
        self.open: dict[str, list[tuple[Lease, int]]] = {"e": [], "g": []}  # trajectories that are being made
        self.unbroken = {f"e0-train-{order}" for order in range(2 * STEPS)}
        self.batches: list[tuple[str, ...]] = []

    async def run(self) -> None:
        await enqueue(self.replay, self.kinds)
        self.replica, self.runner = await healthy_replica(self.replay), await new_runner(self.replay)
        actions = [
            self.lease_groups,
            self.lease_episodes,
            self.end_generation,
            self.end_episode,
            self.score,
            self.train,
        ]
        speeds = [self.random.choice([1, 10, 100]) for _ in actions]
        while len(self.batches) < STEPS:
            (act,) = self.random.choices(actions, speeds)
            await act()
            # what has nothing to do must not be drawn a hundred times in vain
            speeds = [max(1, speed // 2) if each == act else speed for each, speed in zip(actions, speeds, strict=True)]

    async def lease_groups(self) -> None:
        for lease in await self.replay.lease(self.replica, self.random.randint(1, 4)):
            self.open["g"] += [(lease, index) for index in lease.missing]

    async def lease_episodes(self) -> None:
        slots = self.random.randint(2, 8) - len(self.open["e"])
        for lease in await self.replay.lease_episodes(self.runner, max(0, slots)):
            self.open["e"] += [(lease, index) for index in lease.missing]

    async def end_generation(self) -> None:
        if not self.open["g"]:
            return
        lease, index = self.random.choice(self.open["g"])
        if self.breaks(lease):
            await self.replay.release(lease, "the replica drains", failed=False)
            self.open["g"] = [each for each in self.open["g"] if each[0].token != lease.token]
            return
        self.open["g"].remove((lease, index))
        await self.replay.push(lease, make_trajectory(lease, index))

    async def end_episode(self) -> None:
        if not self.open["e"]:
            return
        lease, index = self.open["e"].pop(self.random.randrange(len(self.open["e"])))
        if not self.breaks(lease):
            assert await score(self.replay, lease, index, reward=float(index)) is None
        elif (again := await fail(self.replay, lease, index)) is not None:
            self.open["e"].append((again, index))

    def breaks(self, lease: Lease) -> bool:
        if lease.group.id not in self.unbroken or self.random.random() < 0.8:
            return False
        self.unbroken.remove(lease.group.id)
        return True

    async def score(self) -> None:
        await score_all(self.replay)

    async def train(self) -> None:
        step = len(self.batches)
        timeline = (await self.replay.state()).timeline
        batch = await self.replay.reserve(step, timeline)
        if not isinstance(batch, Waiting):
            self.batches.append(batch.groups)
            await self.replay.commit(step + 1, timeline)
            await refit(self.replay, step + 1, [self.replica])


async def test_law_5_the_order_of_batches_is_that_of_the_prompts(
    redis_url: str, run_id: str, limits: Limits, session_seed: int
) -> None:
    async with open_redis(redis_url) as redis:
        for seed in range(session_seed, session_seed + INTERLEAVINGS):
            replay = ReplayClient(redis, f"{run_id}-{seed}")
            await replay.open_run(limits)
            run = Interleaving(replay, seed)
            await run.run()
            expected = [(f"e0-train-{2 * step}", f"e0-train-{2 * step + 1}") for step in range(STEPS)]
            assert run.batches == expected, f"seed {seed}, kinds {run.kinds}"


async def test_law_5_what_was_passed_over_waits_in_order_after_a_rewind(replay: ReplayClient) -> None:
    await enqueue(replay, "egeg")
    replica = await healthy_replica(replay)
    assert orders(await replay.lease(replica, 8)) == [1, 3]
    await rewind(replay, 0)
    await refit(replay, 0, [replica])
    runner = await new_runner(replay)
    first = await replay.lease_episodes(runner, LONG)
    assert [(lease.group.order, lease.attempt) for lease in first] == [(0, 1), (2, 1)]
    again = await replay.lease(replica, 8)
    tickets = {lease.group.order: lease.ticket for lease in (*first, *again)}
    assert sorted(tickets) == sorted(tickets, key=lambda order: tickets[order])


async def test_law_6_what_was_passed_over_has_its_memory(replay: ReplayClient, limits: Limits) -> None:
    """Else groups behind it would take it, and wait for it to be trained before them."""
    worst = 4 * limits.max_episode_bytes
    await tighten(replay, limits, max_bytes=worst)
    await enqueue(replay, "eggg")
    replica = await healthy_replica(replay)
    assert orders(await replay.lease(replica, 8)) == []
    assert (await replay.stats())["bytes"] == worst
    await finish_all(replay, await leased(replay))
    assert orders(await replay.lease(replica, 8)) == [1, 2, 3]


async def test_law_2_what_was_passed_over_is_leased_once_admitted(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, "gge")
    replica, runner = await healthy_replica(replay), await new_runner(replay)
    leases = await replay.lease(replica, 8)
    await tighten(replay, limits, max_age=0)
    assert await replay.lease_episodes(runner, LONG) == []  # its place is in step 1
    for lease in leases:
        await push_all(replay, lease)
    await score_all(replay)
    await reserve(replay, 0)
    await refit(replay, 1, [replica])
    assert [lease.version for lease in await replay.lease_episodes(runner, LONG)] == [1]


async def test_a_runner_starts_whole_groups_only(replay: ReplayClient) -> None:
    await enqueue(replay, "eee")
    await healthy_replica(replay)
    runner = await new_runner(replay)
    assert orders(await replay.lease_episodes(runner, 1)) == []
    (first, second) = await replay.lease_episodes(runner, 5)
    assert (first.missing, second.missing) == ((0, 1), (0, 1))
    await score(replay, first, 0)
    await replay.release(first, "shutdown", failed=False)
    (again,) = await replay.lease_episodes(await new_runner(replay), 1)  # only one of it is missing
    assert (again.group.id, again.missing) == (first.group.id, (1,))


async def test_law_6_validation_and_training_have_slots_of_their_own(replay: ReplayClient) -> None:
    """What one of them has no room for keeps the other from nothing, be it new or passed on."""
    await enqueue(replay, "ee")
    held_out = [make_group(order, n=3, lane="validation", env_name="game", group_id=f"v{order}") for order in range(2)]
    await replay.enqueue(held_out, (await replay.state()).timeline, validation=0)
    await healthy_replica(replay)

    async def given(slots: int, validation_slots: int) -> tuple[list[str], list[Lease]]:
        leases = await replay.lease_episodes(await new_runner(replay), slots, validation_slots)
        return [lease.group.id for lease in leases], leases

    assert (await given(1, 2))[0] == []
    assert (await given(0, 3))[0] == ["v0"]
    names, training = await given(4, 2)
    assert names == ["e0-train-0", "e0-train-1"]
    names, validating = await given(1, 3)
    assert names == ["v1"]
    for lease in (*validating, *training):
        await replay.release(lease, "shutdown", failed=False)
    assert (await given(2, 2))[0] == ["e0-train-0"]
    assert (await given(1, 3))[0] == ["v1"]


async def test_law_2_a_lease_of_episodes_takes_the_oldest_allowed_weights(replay: ReplayClient) -> None:
    await enqueue(replay, "e")
    runner = await new_runner(replay)
    assert await replay.lease_episodes(runner, LONG) == []  # nobody can answer
    older = await healthy_replica(replay, version=0)
    state = await replay.state()
    assert (state.episodes, state.alive_runners) == (1, 1)
    (lease,) = await replay.lease_episodes(runner, LONG)
    assert lease.version == 0
    assert [replica.id for replica in await replay.replicas()] == [older]  # a runner is none
    assert [(known.id, known.alive, known.leases) for known in await replay.runners()] == [(runner, True, 1)]


async def test_law_6_the_run_says_that_episodes_wait_for_a_runner(replay: ReplayClient) -> None:
    await enqueue(replay, "ge")
    assert (await replay.state()).episodes == 0  # the first of them is for replicas
    await replay.lease(await healthy_replica(replay), 8)
    state = await replay.state()
    assert (state.episodes, state.alive_runners) == (1, 0)
    runner = await new_runner(replay)
    await replay.lease_episodes(runner, LONG)
    assert (await replay.state()).episodes == 0
    await replay.deregister_runner(runner, died=True)
    state = await replay.state()
    assert (state.episodes, state.alive_runners) == (1, 0)
    with pytest.raises(Fenced):
        await replay.lease_episodes(runner, LONG)


async def test_drop_refuses_episodes(replay: ReplayClient, limits: Limits) -> None:
    with pytest.raises(InvalidCall, match=r"game.*episodes.*staleness_policy.*drop"):
        await replay.open_run(dataclasses.replace(limits, staleness_policy="drop"))


# -- calls


async def test_law_4_a_call_is_appended_once_in_order_under_its_lease(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, "e")
    await healthy_replica(replay)
    runner = await new_runner(replay)
    (lease,) = await replay.lease_episodes(runner, LONG)
    name, call = nonce(), make_call()
    await replay.append(lease, 0, 0, name, call)
    await replay.append(lease, 0, 0, name, call)
    before = await contents(replay)

    async def refused(kind: type[Exception], index: int, number: int, call: Call) -> None:
        with pytest.raises(kind):
            await replay.append(lease, index, number, nonce(), call)
        assert await contents(replay) == before

    await refused(InvalidCall, 0, 0, call)  # another one
    await refused(InvalidCall, 0, 2, call)
    await refused(InvalidCall, 0, 1, make_call(1))
    await refused(InvalidCall, 2, 0, call)
    await refused(InvalidCall, 0, 1, make_call(0, version=1))  # weights that there are not yet
    await refused(EpisodeTooLarge, 0, 1, make_call(0, length=limits.max_episode_bytes // 8))
    await replay.release(lease, "shutdown", failed=False)
    before = await contents(replay)
    await refused(LeaseLost, 0, 1, make_call(0))
    await rewind(replay, 0)  # the group waited for another runner
    before = await contents(replay)
    await refused(WrongTimeline, 0, 1, make_call(0))
    assert await payloads(replay) == []


@pytest.mark.parametrize("how", ["finished", "failed", "returned", "rejected", "rewound", "filtered", "surplus"])
async def test_law_1_the_calls_of_an_episode_go_with_it(replay: ReplayClient, limits: Limits, how: str) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_equal=how == "filtered", redundant=int(how == "surplus")))
    lease = await lease_episodes(replay)
    for index in range(lease.count):
        await append(replay, lease, index, 2)
    assert len(await payloads(replay)) == lease.count
    begun = (await group_of(replay, lease))["begun"]
    assert [(each["index"], each["calls"]) for each in begun] == [(index, 2) for index in range(lease.count)]
    match how:
        case "finished" | "filtered" | "surplus":
            for index in range(2):
                await score(replay, lease, index, reward=0.0 if how == "filtered" else float(index))
        case "failed":
            await replay.release(lease, "no", failed=True)
        case "rejected":
            await replay.reject(lease, "no")
        case "returned":
            await replay.release(lease, "shutdown", failed=False)
            (again,) = await leased(replay)
            assert again.missing == (0, 1)
        case "rewound":
            await replay.release(lease, "shutdown", failed=False)
            await rewind(replay, 0)
    kept = 2 if how in ("finished", "surplus") else 0
    assert len(await payloads(replay)) == kept
    if how != "returned":
        held = sum([await replay.redis.strlen(key) for key in await payloads(replay)])
        assert (await replay.stats())["bytes"] == held


# -- ends


@pytest.mark.parametrize("filtered", [False, True])
async def test_law_3_finish_is_push_and_score_in_one_and_can_be_said_again(
    replay: ReplayClient, limits: Limits, filtered: bool
) -> None:
    await replay.open_run(dataclasses.replace(limits, filter_equal=True))
    lease = await lease_episodes(replay)
    for index in range(2):
        assert await score(replay, lease, index, reward=0.0 if filtered else float(index)) is None
    counts = {state: count for state, count in (await replay.state()).counts.items() if count}
    assert counts == {"filtered" if filtered else "ready": 1}
    before = await contents(replay)
    for index in range(2):
        assert await score(replay, lease, index, reward=9.0) is None
    assert await contents(replay) == before
    assert await replay.take_scoring({"game": 8}) == []


async def test_an_episode_without_a_score_waits_for_its_grader(replay: ReplayClient) -> None:
    lease = await lease_episodes(replay)
    for index in range(2):
        assert await replay.finish(lease, index, make_trajectory(lease, index), None) is None
    jobs = await replay.take_scoring({"game": 8})
    assert await replay.score_many([(job, Score("SCORED", float(job.trajectory.index))) for job in jobs]) == [None] * 2
    assert (await group_of(replay, lease))["state"] == "ready"


async def test_an_episode_of_several_calls_is_kept_byte_for_byte(replay: ReplayClient, limits: Limits) -> None:
    lease = await lease_episodes(replay)
    calls = (make_call(), make_call(0, length=9_000), make_call())
    episode = EpisodeTrajectory(lease.group.id, lease.attempt, 0, calls, False, "runner")
    await replay.finish(lease, 0, episode, Score("SCORED", 1.0))
    (trajectory,) = (await group_of(replay, lease))["trajectories"]
    assert await replay.redis.get(trajectory["key"]) == episode.encode()
    assert (trajectory["length"], trajectory["reward"]) == (9_004, 1.0)
    large = EpisodeTrajectory(
        lease.group.id, lease.attempt, 1, (make_call(length=limits.max_episode_bytes // 8), *calls[1:]), False, "runner"
    )
    with pytest.raises(EpisodeTooLarge, match="more than max_episode_bytes"):
        await replay.finish(lease, 1, large, Score("SCORED", 1.0))
    assert len(await payloads(replay)) == 1


async def test_law_6_an_episode_that_fails_is_charged_alone(replay: ReplayClient) -> None:
    lease = await lease_episodes(replay)
    await score(replay, lease, 1)
    known = lease
    for status in ("FAILED", "INTERRUPTED", "TIMED_OUT", "NOT_STARTED"):
        await append(replay, known, 0, 1)
        again = await fail(replay, known, 0, status)  # type: ignore[arg-type]
        assert again is not None
        assert await fail(replay, known, 0, status) == again  # type: ignore[arg-type]
        known = again
    assert known.tries == {0: 4}
    group = await group_of(replay, lease)
    assert (group["state"], group["failures"], group["pushed"], group["scored"]) == ("open", 0, 1, 1)

    await replay.release(known, "shutdown", failed=False)
    (known,) = await leased(replay)
    assert (known.missing, known.tries) == ((0,), {0: 4})
    assert await fail(replay, known, 0) is None  # the third that costs something
    group = await group_of(replay, lease)
    assert (group["state"], group["reason"]) == ("failed", "episode 0 failed 3 times: FAILED: the program raised")
    assert await payloads(replay) == []


async def test_law_6_an_episode_that_always_ends_its_process_is_failed(replay: ReplayClient, limits: Limits) -> None:
    """Others that were in that process are interrupted too, which costs them nothing."""
    await enqueue(replay, "e")
    await healthy_replica(replay)
    (known,) = await leased(replay)
    most = limits.max_attempts

    async def interrupted(times: int) -> None:
        nonlocal known
        for _ in range(times):
            again = await fail(replay, known, 0, "INTERRUPTED")
            assert again is not None
            known = again

    await interrupted(most)
    again = await fail(replay, known, 0, "TIMED_OUT")  # it ended by itself, and costs the first attempt
    assert again is not None
    known = again
    await interrupted(2 * most - 2)  # `most` of them cost nothing
    assert await fail(replay, known, 0, "INTERRUPTED") is None
    group = await group_of(replay, known)
    assert (group["state"], group["reason"]) == (
        "failed",
        f"episode 0 failed {most} times: INTERRUPTED: the program raised",
    )


async def test_law_6_the_group_does_without_an_episode_if_others_began(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, redundant=1, max_attempts=1))
    lease = await lease_episodes(replay)
    assert await fail(replay, lease, 0) is None
    await score(replay, lease, 1)
    await score(replay, lease, 2, reward=0.0)
    assert (await group_of(replay, lease))["state"] == "ready"


async def test_law_7_a_refused_episode_fails_its_group(replay: ReplayClient) -> None:
    lease = await lease_episodes(replay)
    await score(replay, lease, 1)
    assert await fail(replay, lease, 0, "INVALID") is None
    group = await group_of(replay, lease)
    assert (group["state"], group["reason"]) == ("failed", "episode 0 was refused: INVALID: the program raised")


async def test_law_4_what_an_episode_said_before_it_began_anew_is_refused(replay: ReplayClient) -> None:
    lease = await lease_episodes(replay)
    await append(replay, lease, 0, 1)
    again = await fail(replay, lease, 0, "INTERRUPTED")
    assert again is not None
    before = await contents(replay)
    for first_call in (append(replay, lease, 0, 1), score(replay, lease, 0)):
        with pytest.raises(LeaseLost, match="has started over"):
            await first_call
    assert await contents(replay) == before
    await append(replay, again, 0, 1)
    await score(replay, again, 0)
    assert await fail(replay, again, 0) is None  # it has ended
    with pytest.raises(Surplus):
        await append(replay, again, 0, 1, first=1)
    assert (await group_of(replay, lease))["scored"] == 1


@pytest.mark.parametrize("builds", [("", "b"), ("b", ""), ("", "")])
async def test_law_3_a_score_of_no_build_goes_with_any(replay: ReplayClient, builds: tuple[str, str]) -> None:
    """As of an episode that a limit of the run ended, which `agents.on_limit` gave its reward."""
    lease = await lease_episodes(replay)
    *others, last = lease.missing
    for index in others:
        await score(replay, lease, index, float(index), builds[0])
    await score(replay, lease, last, build=builds[1])
    group = await group_of(replay, lease)
    assert group["state"] == "ready"
    assert "rebuilt" not in group


async def test_law_3_a_score_of_no_build_stays_when_a_grader_scores_others(replay: ReplayClient) -> None:
    lease = await lease_episodes(replay)
    first, *others = lease.missing
    await score(replay, lease, first, 7.0)
    for index in others:
        await replay.finish(lease, index, make_trajectory(lease, index), None)
    for job in await replay.take_scoring({"game": LONG}):
        assert job.trajectory.index != first
        await replay.score(job, Score("SCORED", 1.0, build="b"))
    assert (await group_of(replay, lease))["state"] == "ready"
    _, kept = await replay.trajectory("e0-train-0", first)
    assert kept.reward == 7.0


async def test_law_3_a_group_scored_by_two_builds_is_generated_again(replay: ReplayClient, limits: Limits) -> None:
    await tighten(replay, limits, replica_dead_s=3600.0)  # nobody sends heartbeats, however long it takes
    await enqueue(replay, "e")
    await healthy_replica(replay)
    for again in range(9):
        (lease,) = await leased(replay)
        await score(replay, lease, 0, build="a")
        assert await score(replay, lease, 1, build="b") is None
        group = await group_of(replay, lease)
        assert (group["state"], group["failures"]) == ("queued" if again < 8 else "failed", 0)
        assert await payloads(replay) == []
    assert '"a" and then by "b"' in group["reason"]


async def test_a_runner_may_hold_a_lease_for_each_of_its_slots(replay: ReplayClient) -> None:
    await enqueue(replay, "e")
    await healthy_replica(replay)
    runner = await new_runner(replay)
    (lease,) = await replay.lease_episodes(runner, LONG)
    others = [lease.token.replace(lease.group.id, f"e0-train-{place}") for place in range(1, MOST_SLOTS)]
    reply = await replay.runner_heartbeat(runner, [lease.token, *others])
    assert (reply.alive, reply.lost) == (True, tuple(others))


async def test_surplus_episodes_are_told_by_the_heartbeat(replay: ReplayClient, limits: Limits) -> None:
    await replay.open_run(dataclasses.replace(limits, redundant=2))
    await enqueue(replay, "e")
    await healthy_replica(replay)
    runner = await new_runner(replay)
    (lease,) = await replay.lease_episodes(runner, LONG)
    reply = await replay.runner_heartbeat(runner, [lease.token])
    assert (reply.alive, reply.lost, reply.complete, reply.surplus) == (True, (), (), ())
    await score(replay, lease, 0)
    await score(replay, lease, 2, reward=0.0)
    reply = await replay.runner_heartbeat(runner, [lease.token])
    assert (reply.lost, reply.complete) == ((lease.token,), (lease.token,))
    assert reply.surplus == ((lease.token, 1), (lease.token, 3))
    with pytest.raises(Surplus):
        await score(replay, lease, 1)


# -- runners that die


async def test_law_6_a_runners_death_is_charged_to_a_group_alone_with_it(replay: ReplayClient) -> None:
    await enqueue(replay, "ee")
    await healthy_replica(replay)
    failures = {0: 0, 1: 0}
    while (await replay.state()).counts.get("failed", 0) == 0:
        runner = await new_runner(replay)
        leases = await replay.lease_episodes(runner, LONG)
        if 0 in orders(leases):
            await append(replay, leases[0], 0, 1)
            await replay.deregister_runner(runner, died=True)
        else:
            await finish_all(replay, leases)
        for order in failures:
            failures[order] = (await replay.group(f"e0-train-{order}") or {})["failures"]
    assert failures == {0: 3, 1: 0}
    assert "group alone" in (await replay.group("e0-train-0") or {})["reason"]


async def test_law_1_a_silent_runner_loses_its_leases_and_siblings_stay(replay: ReplayClient, limits: Limits) -> None:
    await enqueue(replay, "e")
    runner = await new_runner(replay)
    replica = await healthy_replica(replay)
    (lease,) = await replay.lease_episodes(runner, LONG)
    await score(replay, lease, 1)
    await append(replay, lease, 0, 2)
    await tighten(replay, limits, replica_dead_s=0.3)
    await replay.runner_heartbeat(runner, [lease.token])  # the last

    async def dead() -> bool:
        await replay.heartbeat(replica, [])
        return not (await replay.runners())[0].alive

    await eventually(dead)
    await tighten(replay, limits)
    await healthy_replica(replay)  # on a busy machine the first has died too
    assert not (await replay.runner_heartbeat(runner, [lease.token])).alive
    with pytest.raises(LeaseLost):
        await append(replay, lease, 0, 1, first=2)
    (again,) = await leased(replay)
    assert (again.group.id, again.missing, again.tries) == (lease.group.id, (0,), {})
    await append(replay, again, 0, 1)  # it begins anew
    await score(replay, again, 0, reward=0.0)
    assert (await group_of(replay, lease))["state"] == "ready"
