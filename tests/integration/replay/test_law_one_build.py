"""Law 3, one build: the scores of a group are of one build of its environment, or the group is scored anew as a whole, at no cost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.base.errors import LeaseLost
from headrace.records.score import Score
from headrace.replay import ReplayClient, ScoringJob
from tests.support.buffer import healthy_replica, make_group, push_all, reserve, rewind
from tests.support.waiting import eventually

N = 4

# no second chance: an attempt that is charged wrongly fails the group
pytestmark = pytest.mark.limits(prompts_per_step=1, generations_per_prompt=N, max_scoring_attempts=1)


async def pushed(replay: ReplayClient, orders: Sequence[int] = (0,)) -> None:
    await replay.enqueue([make_group(order, n=N) for order in orders], (await replay.state()).timeline)
    for lease in await replay.lease(await healthy_replica(replay), len(orders)):
        await push_all(replay, lease)


async def take(replay: ReplayClient, most: int = N) -> list[ScoringJob]:
    return sorted(await replay.take_scoring({"math": most}), key=lambda job: job.trajectory.index)


def of(build: str, reward: float = 1.0) -> Score:
    return Score("SCORED", reward, environment="Math", build=build)


async def say(replay: ReplayClient, jobs: Sequence[ScoringJob], *builds: str) -> list[bool]:
    """Which of the scores count."""
    scores = [of(build, float(builds.index(build))) for build in builds]
    errors = await replay.score_many(list(zip(jobs, scores, strict=True)))
    assert all(error is None or isinstance(error, LeaseLost) for error in errors)
    return [error is None for error in errors]


async def builds_of_batch(replay: ReplayClient, step: int = 0) -> list[str]:
    batch = await reserve(replay, step)
    return [score.build for _, score in await replay.read([one.key for one in batch.trajectories])]


async def test_law_3_one_build_two_builds_scores_are_redone_by_the_later(replay: ReplayClient) -> None:
    await pushed(replay)
    jobs = await take(replay, 3)
    assert await say(replay, jobs, "old", "old", "old") == [True] * 3
    assert await say(replay, await take(replay, 1), "new") == [True]
    again = await take(replay)
    assert [(job.trajectory.index, job.scoring_attempt) for job in again] == [(job.trajectory.index, 1) for job in jobs]
    # the former scores once more: their tokens are void
    assert await say(replay, jobs, "old", "old", "old") == [False] * 3
    assert await say(replay, again, "new", "new", "new") == [True] * 3
    assert await builds_of_batch(replay) == ["new"] * N


async def test_law_3_one_build_late_scores_of_the_former_change_nothing(replay: ReplayClient) -> None:
    await pushed(replay)
    late = await take(replay, 1)
    assert await say(replay, await take(replay, 2), "new", "new") == [True, True]
    assert await say(replay, late, "old") == [False]
    rest = await take(replay)
    assert [job.scoring_attempt for job in rest] == [1, 1]
    assert {late[0].trajectory.index} < {job.trajectory.index for job in rest}
    assert await say(replay, rest, "new", "new") == [True, True]
    assert await builds_of_batch(replay) == ["new"] * N


async def test_law_3_one_build_two_builds_in_one_answer_are_told_apart(replay: ReplayClient) -> None:
    await pushed(replay)
    jobs = await take(replay)
    assert await say(replay, jobs, "old", "new", "old", "new") == [False, True, False, True]
    assert await say(replay, await take(replay), "new", "new") == [True, True]
    assert await builds_of_batch(replay) == ["new"] * N


async def test_law_3_one_build_an_edit_that_is_taken_back_counts_as_another(replay: ReplayClient) -> None:
    await pushed(replay)
    assert await say(replay, await take(replay, 1), "a") == [True]
    assert await say(replay, await take(replay, 1), "b") == [True]
    assert await say(replay, await take(replay, 1), "a") == [True]
    assert await say(replay, await take(replay), "a", "a", "a") == [True] * 3
    assert await builds_of_batch(replay) == ["a"] * N


async def test_law_3_one_build_a_restart_makes_no_difference(replay: ReplayClient) -> None:
    await pushed(replay)
    held = await take(replay)
    assert await say(replay, held[:2], "old", "old") == [True, True]
    await replay.release_scoring()
    await rewind(replay, 0)
    assert await say(replay, held[2:], "old", "old") == [False, False]
    assert await say(replay, await take(replay), "new", "new") == [True, True]
    assert await say(replay, await take(replay), "new", "new") == [True, True]
    assert await builds_of_batch(replay) == ["new"] * N


async def test_law_3_one_build_a_complete_group_keeps_its_scores(replay: ReplayClient) -> None:
    await pushed(replay, (0, 1))
    jobs = await take(replay, 2 * N)
    assert await say(replay, [job for job in jobs if job.group.order == 0], *["old"] * N) == [True] * N
    assert await say(replay, [job for job in jobs if job.group.order == 1], *["new"] * N) == [True] * N
    assert await builds_of_batch(replay, 0) == ["old"] * N
    assert await builds_of_batch(replay, 1) == ["new"] * N


async def test_law_6_builds_that_alternate_open_the_breaker_until_one_stays(replay: ReplayClient) -> None:
    await pushed(replay)
    number = 0

    async def breaker_opens() -> bool:
        nonlocal number
        for job in await take(replay, 1):
            number += 1
            await replay.score(job, of(f"build {number}"))
        (math,) = await replay.environments()
        return math.broken

    await eventually(breaker_opens)
    (math,) = await replay.environments()
    assert (math.kind, number) == ("BUILDS", 10)
    assert f'"build {number - 1}" and "build {number}"' in math.message
    probes = 0

    async def breaker_closes() -> bool:
        nonlocal probes
        for job in await take(replay):
            probes += 1
            assert job.scoring_attempt == 1
            await replay.score(job, of("the one"))
        (math,) = await replay.environments()
        return not math.broken

    await eventually(breaker_closes)
    assert probes == 2  # the first is of another build than the scores before
    assert await say(replay, await take(replay), "the one", "the one") == [True, True]
    assert await builds_of_batch(replay) == ["the one"] * N
