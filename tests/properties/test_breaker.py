"""What a broken environment costs, in a run whose clock the test sets; the model is compared all along."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.base.errors import EnvironmentBroken
from headrace.records.score import Score, Status
from headrace.replay import End, ScoringJob, Waiting
from tests.properties.setting import Setting
from tests.properties.world import World
from tests.support.buffer import make_group, make_trajectory

# The functions make no difference between the first two where they score (`INVALID` alone is told apart in `_scoring.lua`).
FAILURES = ("FAILED", pytest.param("TIMED_OUT", marks=pytest.mark.nightly), "INVALID")


@pytest.fixture
def setting() -> Setting:
    return Setting(prompts=2, n=2, age=1, scoring_attempts=1)


@pytest.fixture
async def world(world: World, setting: Setting) -> World:
    await world.open(setting.limits())
    await world.call("register", "replica", {})
    await world.refit()
    return world


async def generate(world: World, names: Sequence[str], most: int = 8) -> list[str]:
    """Enqueue a group for each of these environments, lease what is to be had, and push it; the groups."""
    first = world.model.enqueued + 1
    groups = [make_group(first + place, env_name=name) for place, name in enumerate(names)]
    await world.call("enqueue", groups, world.model.timeline, False)
    leases = await world.call("lease", "replica", most)
    for lease in leases:
        await world.call("push_many", [(lease, make_trajectory(lease, index)) for index in lease.missing])
    return [lease.group.id for lease in leases]


async def take(world: World, most: int = 8, name: str = "math") -> list[ScoringJob]:
    return await world.call("take_scoring", {name: most})


async def say(world: World, jobs: Sequence[ScoringJob], status: Status, build: str = "") -> None:
    score = Score("SCORED", 1.0, build=build) if status == "SCORED" else Score(status, message="no such field")
    assert await world.call("score_many", [(job, score) for job in jobs]) == [None] * len(jobs)


async def wait(world: World, milliseconds: int, *tokens: str) -> None:
    """The replica lives on meanwhile, and renews these leases."""
    for _ in range(0, milliseconds, 5_000):
        await world.pass_time(5_000)
        await world.call("heartbeat", "replica", list(tokens))


async def broken(world: World) -> bool:
    (math,) = [each for each in await world.client.environments() if each.name == "math"]
    return math.broken


async def breaks(world: World, names: Sequence[str] = ("math",) * 4) -> list[str]:
    groups = await generate(world, names)
    await say(world, await take(world), "INVALID")
    assert await broken(world)
    return groups


@pytest.mark.parametrize("status", FAILURES)
async def test_law_1_an_environment_that_fails_at_first_fails_no_group(world: World, status: Status) -> None:
    await generate(world, ["math"] * 4)
    await say(world, await take(world), status)
    assert await broken(world)
    for _ in range(3):  # probes: one at a time, which cost nothing
        assert await take(world) == []
        await wait(world, 10_000)
        (probe,) = await take(world)
        assert probe.scoring_attempt == 1
        assert await take(world) == []
        await say(world, [probe], status)
    await wait(world, 10_000)
    await say(world, await take(world), "SCORED")
    assert not await broken(world)
    rest = await take(world)
    assert {job.scoring_attempt for job in rest} == {1}
    await say(world, rest, "SCORED")
    assert world.model.count("train") == {"ready": 4}


@pytest.mark.parametrize("status", FAILURES)
async def test_law_7_a_trajectory_that_fails_among_others_is_its_own_fault(world: World, status: Status) -> None:
    await generate(world, ["math"] * 4)
    first, *others = await take(world)
    scores = [(first, Score(status, message="no")), *((job, Score("SCORED", 1.0)) for job in others)]
    await world.call("score_many", scores)
    assert not await broken(world)
    assert world.model.count("train") == {"ready": 3, "failed": 1}


@pytest.mark.parametrize("status", FAILURES)
async def test_law_1_an_environment_that_breaks_with_few_left_fails_none(world: World, status: Status) -> None:
    """The last two trajectories of two groups: a small share of the last results, but all that there is."""
    await generate(world, ["math"] * 2)
    jobs = await take(world)
    await say(world, [job for job in jobs if job.trajectory.index == 0], "SCORED")
    left = [job for job in jobs if job.trajectory.index == 1]
    await say(world, left, status)
    while not await broken(world):
        await wait(world, 5_000)
        await say(world, await take(world), status)
        assert world.model.count("train") == {"scoring": 2}
    await wait(world, 10_000)
    while left := await take(world):
        await say(world, left, "SCORED")
    assert world.model.count("train") == {"ready": 2}


@pytest.mark.parametrize("status", FAILURES)
async def test_law_1_what_began_before_the_break_blames_no_other(world: World, status: Status) -> None:
    await generate(world, ["math"] * 4)
    for _ in range(2):
        await wait(world, 5_000)
        before, *others = await take(world, 3)
        await say(world, others, status)
        await say(world, [before], "SCORED")
    while not await broken(world):
        await wait(world, 5_000)
        await say(world, await take(world), status)
    await wait(world, 10_000)
    while left := await take(world):
        await say(world, left, "SCORED")
        await wait(world, 5_000)
    assert world.model.count("train") == {"ready": 4}


async def test_an_environment_that_breaks_later_gives_attempts_back(world: World) -> None:
    await generate(world, ["math"] * 4)
    await say(world, await take(world), "SCORED")
    for step in range(2):
        await world.call("reserve", step, world.model.timeline)
    await world.refit(2)
    await generate(world, ["math"] * 4)
    while not await broken(world):
        await say(world, await take(world, 1), "FAILED")
        await world.pass_time(100)
    await wait(world, 10_000)
    await say(world, await take(world), "SCORED")
    assert {job.scoring_attempt for job in await take(world)} == {1}
    assert "failed" not in world.model.count("train")


async def test_law_5_order_leasing_stops_at_a_broken_environments_group(world: World) -> None:
    await breaks(world, ["math", "math"])
    assert await generate(world, ["math", "code"]) == []  # the second waits behind the first
    await wait(world, 10_000)
    await say(world, await take(world), "SCORED")
    await say(world, await take(world), "SCORED")
    assert [lease.group.order for lease in await world.call("lease", "replica", 8)] == [2, 3]


async def test_law_6_one_group_of_a_broken_environment_is_leased_alone(world: World) -> None:
    groups = await generate(world, ["math", "math", "math"], most=1)
    await say(world, await take(world), "INVALID")
    for _ in range(3):  # the only group: it fails, after which the environment is judged
        await wait(world, 10_000)
        await say(world, await take(world), "INVALID")
    assert await broken(world)
    await wait(world, 10_000)
    (probe,) = await take(world)
    await world.call("score_many", [(probe, Score("UNSENDABLE", message="no"))])
    assert world.model.groups[groups[0]].state == "failed"
    (one,) = await world.call("lease", "replica", 8)
    assert await world.call("lease", "replica", 8) == []
    await world.call("push_many", [(one, make_trajectory(one, index)) for index in range(2)])
    await say(world, await take(world), "SCORED")
    assert not await broken(world)


async def test_the_end_of_the_run_waits_for_a_broken_environment(world: World) -> None:
    await breaks(world, ["math", "math", "math"])
    await world.call("close", world.model.timeline)
    await wait(world, 10_000)
    (job,) = await take(world)
    await world.call("score_many", [(job, Score("UNSENDABLE", message="no"))])
    (other,) = await take(world)
    if other.group.id != job.group.id:
        await world.call("score_many", [(other, Score("UNSENDABLE", message="no"))])
    assert world.model.count("train")["failed"] == 2
    assert isinstance(await world.call("reserve", 0, world.model.timeline), Waiting)
    await wait(world, 10_000)
    await say(world, await take(world), "SCORED")
    await say(world, await take(world), "SCORED")
    assert isinstance(await world.call("reserve", 0, world.model.timeline), End)


async def kill(world: World, most: int) -> list[ScoringJob]:
    """The environment's process dies of what is taken, again and again; at most so often. What it last took."""
    jobs: list[ScoringJob] = []
    for _ in range(most):
        await wait(world, 15_000)
        if not (found := await take(world)):
            return jobs
        jobs = found
        await say(world, jobs, "INTERRUPTED")
    raise AssertionError(f"it still kills the environment after {most} times")


async def test_what_alone_is_left_and_kills_the_environment_ends_failed(world: World) -> None:
    await generate(world, ["math"])
    await world.call("close", world.model.timeline)
    await kill(world, 12)
    assert world.model.count("train") == {"failed": 1}
    (reason,) = await world.client.failures()
    for token in ("INTERRUPTED", "alone", "no other trajectory"):
        assert token in reason
    assert isinstance(await world.call("reserve", 0, world.model.timeline), End)


async def test_prompts_of_others_that_have_no_room_show_nothing(world: World) -> None:
    """The trainer waits for the first in order, and admission for the trainer."""
    await generate(world, ["math", *["code"] * 7])
    await world.call("close", world.model.timeline)
    await say(world, await take(world, name="code"), "SCORED")
    assert world.model.count("train") == {"scoring": 1, "ready": 3, "queued": 4}
    assert isinstance(await world.call("reserve", 0, world.model.timeline), Waiting)
    await kill(world, 12)
    assert world.model.count("train") == {"failed": 1, "ready": 3, "queued": 4}
    assert not isinstance(await world.call("reserve", 0, world.model.timeline), (Waiting, End))


async def test_what_kills_the_environment_waits_while_another_may_come(world: World) -> None:
    """It may be the environment that dies of everything: then its fault costs no prompt."""
    await generate(world, ["math"])
    with pytest.raises(AssertionError, match="still kills"):
        await kill(world, 12)
    assert world.model.count("train") == {"scoring": 1}
    await world.call("close", world.model.timeline)
    await wait(world, 15_000)
    while jobs := await take(world):  # it was repaired
        await say(world, jobs, "SCORED")
    assert world.model.count("train") == {"ready": 1}


async def test_a_suspect_that_does_not_kill_alone_is_scored_at_the_end(world: World) -> None:
    await generate(world, ["math"] * 2)
    await world.call("close", world.model.timeline)
    while "scoring" in world.model.count("train"):
        await wait(world, 15_000)
        jobs = await take(world)
        kills = len(jobs) > 1 or any(job.group.order == 0 for job in jobs)
        await say(world, jobs, "INTERRUPTED" if kills else "SCORED")
    assert world.model.count("train") == {"ready": 1, "failed": 1}


async def test_three_calls_not_begun_open_the_breaker_and_one_closes_it(world: World) -> None:
    await generate(world, ["math"] * 4)
    for _ in range(3):
        assert not await broken(world)
        await say(world, await take(world), "NOT_STARTED")
        await wait(world, 10_000)
    assert await broken(world)
    (probe,) = await take(world)
    await say(world, [probe], "FAILED")  # it begins again, and this is judged as ever
    assert not await broken(world)
    assert len(await take(world)) == 7


async def test_suspects_go_alone_and_one_alone_at_a_death_is_charged(world: World) -> None:
    await generate(world, ["math"] * 4)
    jobs = await take(world, 4)
    rest = await take(world)
    await say(world, jobs, "INTERRUPTED")
    assert await take(world) == []  # the others are still with it
    await say(world, rest, "SCORED")
    for _ in jobs[1:]:
        (alone,) = await take(world)
        assert alone.scoring_attempt == 1
        assert await take(world) == []
        await say(world, [alone], "SCORED")
    (last,) = await take(world)
    await say(world, [last], "INTERRUPTED")
    await wait(world, 10_000)
    assert [job.scoring_attempt for job in await take(world)] == [2]


async def test_what_was_scored_is_no_suspect_for_another_build(world: World) -> None:
    await generate(world, ["math"])
    await say(world, await take(world), "INTERRUPTED")
    for build in ("old", "new"):
        (alone,) = await take(world)
        await say(world, [alone], "SCORED", build)
    (again,) = await take(world)
    (math,) = [each for each in await world.client.environments() if each.name == "math"]
    assert (again.scoring_attempt, math.alone) == (1, 0)


class TestSomePromptsAlone:
    """An environment that fails on some prompts only, and is left with these alone."""

    @pytest.fixture
    def setting(self) -> Setting:
        return Setting(prompts=2, n=2, age=0, scoring_attempts=2)

    async def left_with_bad_ones(self, world: World, status: Status) -> None:
        """As many as admission lets in; probe after probe fails."""
        await generate(world, ["math"] * 6)
        await say(world, await take(world), status)
        while not await broken(world):
            await wait(world, 10_000)
            await say(world, await take(world), status)
        assert world.model.count("train") == {"scoring": 2, "queued": 4}

    async def fail_probes(self, world: World, count: int, status: Status, *tokens: str) -> None:
        for _ in range(count):
            assert await world.call("lease", "replica", 8) == []
            await wait(world, 10_000, *tokens)
            (probe,) = await take(world)
            await say(world, [probe], status)

    @pytest.mark.parametrize("status", FAILURES)
    async def test_law_6_a_new_group_that_is_scored_fails_the_others(self, world: World, status: Status) -> None:
        await self.left_with_bad_ones(world, status)
        await self.fail_probes(world, 3, status)
        (lease,) = await world.call("lease", "replica", 8)
        assert lease.group.order == 2
        await world.call("push_many", [(lease, make_trajectory(lease, index)) for index in lease.missing])
        await wait(world, 10_000)
        (probe,) = await take(world)
        assert probe.group.id == lease.group.id
        await say(world, [probe], "SCORED")
        while jobs := await take(world):
            bad = Score(status, message="no such field")
            good = Score("SCORED", 1.0)
            await world.call("score_many", [(job, good if job.group.id == lease.group.id else bad) for job in jobs])
            assert not await broken(world)
            await wait(world, 10_000)
        assert world.model.count("train") == {"ready": 1, "failed": 2, "queued": 3}

    @pytest.mark.parametrize("status", FAILURES)
    async def test_law_1_each_new_group_that_fails_doubles_the_probes(self, world: World, status: Status) -> None:
        await self.left_with_bad_ones(world, status)
        probes = 3
        await self.fail_probes(world, probes, status)
        for order in (2, 3):
            (lease,) = await world.call("lease", "replica", 8)
            assert lease.group.order == order
            await self.fail_probes(world, 2, status, lease.token)  # it is being generated
            await world.call("push_many", [(lease, make_trajectory(lease, index)) for index in lease.missing])
            assert await world.call("lease", "replica", 8) == []
            await wait(world, 10_000)
            (probe,) = await take(world)
            assert probe.group.id == lease.group.id
            await say(world, [probe], status)
            await self.fail_probes(world, probes - 3, status)
            probes *= 2
        assert world.model.count("train") == {"scoring": 4, "queued": 2}

    async def test_law_1_a_repaired_environment_fails_none_that_it_failed(self, world: World) -> None:
        """A probe that had failed is scored: the failures until then say nothing of the others, and what fails again is given back."""
        await self.left_with_bad_ones(world, "FAILED")
        await self.fail_probes(world, 1, "FAILED")
        await wait(world, 10_000)
        await say(world, await take(world), "SCORED")
        assert not await broken(world)
        for _ in range(4):
            await say(world, await take(world), "FAILED")
            await wait(world, 10_000)
        assert await broken(world)
        assert world.model.count("train") == {"scoring": 2, "queued": 4}

    async def test_law_5_admission_lets_in_what_comes_before_the_probe(self, world: World) -> None:
        await generate(world, ["math", "math", "code", "code", "math", "code"])
        await say(world, await take(world), "INVALID")
        await self.fail_probes(world, 3, "INVALID")
        leases = await world.call("lease", "replica", 8)
        assert [lease.group.order for lease in leases] == [2, 3, 4]


class TestEarlierFailures:
    @pytest.fixture
    def setting(self) -> Setting:
        return Setting(prompts=2, n=2, age=1, scoring_attempts=3)

    async def test_law_1_an_earlier_failure_is_not_lost_to_later_refusals(self, world: World) -> None:
        await generate(world, ["math"] * 4)
        flaky, *others = await take(world)
        await world.call("score_many", [(flaky, Score("FAILED", message="not now"))])
        await say(world, others, "SCORED")
        await wait(world, 10_000)
        await say(world, await take(world), "INVALID")
        assert world.model.count("train") == {"ready": 3, "scoring": 1}
        await wait(world, 10_000)
        await say(world, await take(world), "SCORED")
        assert world.model.count("train") == {"ready": 4}

    async def test_law_7_what_is_refused_again_while_others_score_fails(self, world: World) -> None:
        await generate(world, ["math"] * 3)
        wrong, *others = await take(world)
        await world.call("score_many", [(wrong, Score("FAILED", message="not now"))])
        await say(world, others, "SCORED")
        await wait(world, 1_000)
        (wrong,) = await take(world)
        await say(world, [wrong], "INVALID")
        await generate(world, ["math"])
        await say(world, await take(world), "SCORED")
        await wait(world, 10_000)
        await say(world, await take(world), "INVALID")
        assert world.model.count("train") == {"ready": 3, "failed": 1}


class TestDeadlines:
    @pytest.fixture
    def setting(self) -> Setting:
        return Setting(prompts=2, n=2, age=1, attempts=1, scoring_attempts=1)

    async def test_law_6_silence_in_a_broken_environment_is_not_charged(self, world: World) -> None:
        await world.call("enqueue", [make_group(0)], world.model.timeline, False)
        (lease,) = await world.call("lease", "replica", 1)
        await breaks(world, ["math"] * 3)
        for _ in range(5):
            await wait(world, 5_000, lease.token)
        held = world.model.groups[lease.group.id]
        assert (held.state, held.replica, held.failures) == ("open", "", 0)


class TestGivingUp:
    @pytest.fixture
    def setting(self) -> Setting:
        return Setting(prompts=2, n=2, age=1, scoring_attempts=1, give_up=30.0)

    async def test_the_run_ends_when_it_has_been_broken_for_too_long(self, world: World) -> None:
        await breaks(world)
        assert isinstance(await world.call("reserve", 0, world.model.timeline), Waiting)
        await wait(world, 30_000)
        assert isinstance(await world.call("reserve", 0, world.model.timeline), EnvironmentBroken)
