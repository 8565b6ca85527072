"""Whatever a user's code raises or returns ends its own sample as FAILED, with the reason and the place, and gives its slot back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from headrace import Environment, Episode, Sample, Score
from headrace.env.programs import Programs
from headrace.env.server import BatchScorer
from headrace.env.wire import outcome_from_wire, outcome_to_wire, score_from_wire, score_to_wire
from tests.support.user_code import ERRORS, VALUES, made


def acting(act: Callable[[Any], Any], road: str) -> Environment:
    """An environment whose methods do `act`, on one of the roads that user code is called on."""

    class Mine(Environment):
        concurrency = episodes = 2
        max_batch_size = 1

    def plain(self: Environment, given: Any) -> Any:
        return act(given)

    async def coroutine(self: Environment, given: Any) -> Any:
        return act(given)

    def returned(self: Environment, given: Any) -> Awaitable[Any]:
        return coroutine(self, given)

    method = {"plain": plain, "async": coroutine, "returned": returned}[road.partition(" ")[0]]
    setattr(Mine, road.partition(" ")[2], method)
    return Mine()


ROADS = [f"{way} {method}" for way in ("plain", "async", "returned") for method in ("score", "score_batch", "episode")]


async def ends(mine: Environment, times: int) -> list[Score]:
    """What becomes of so many samples, one after the other: more than the environment has slots. Each result crosses the wire."""
    found = []
    if mine.runs_episodes:
        programs = Programs(mine)
        for _ in range(times):
            outcome = await asyncio.wait_for(programs.run(Episode("http://127.0.0.1:1", "")), 30)
            found.append(outcome_from_wire(outcome_to_wire(outcome)).score)
        assert programs.busy == 0
        return found
    scorer = BatchScorer(mine)
    for _ in range(times):
        found += await asyncio.wait_for(scorer.score([Sample("x")], None), 30)
    assert scorer.busy == 0
    return [score_from_wire(score_to_wire(score)) for score in found]


@pytest.mark.parametrize("road", ROADS)
async def test_every_exception_fails_its_sample_and_frees_its_slot(road: str) -> None:
    errors = [made(kind) for kind in ERRORS]
    left = iter(errors)

    def act(_: Any) -> Any:
        raise next(left)

    for error, score in zip(errors, await ends(acting(act, road), times=len(errors)), strict=True):
        assert (score.status, score.reward) == ("FAILED", None), error
        assert score.message.startswith(type(error).__name__), error
        assert __file__ in score.message, error
        assert "act" in score.traceback, error


@pytest.mark.parametrize("road", ROADS)
async def test_after_an_iterator_that_was_empty_the_next_samples_are_scored(road: str) -> None:
    calls = iter(range(100))

    def act(given: Any) -> Any:
        if next(calls) < 5:
            return next(x for x in [])
        return [1.0] if isinstance(given, Sequence) else 1.0

    scores = await ends(acting(act, road), times=8)
    assert [score.status for score in scores] == ["FAILED"] * 5 + ["SCORED"] * 3


@pytest.mark.parametrize("road", ROADS)
async def test_what_is_no_reward_fails_its_sample_alone_and_frees_its_slot(road: str) -> None:
    left = iter(VALUES)

    def act(given: Any) -> Any:
        value = next(left)()
        return [value] if isinstance(given, Sequence) else value

    for number, score in enumerate(await ends(acting(act, road), times=len(VALUES))):
        assert (score.status, score.reward) == ("FAILED", None), number
        assert score.message, number


async def test_in_a_batch_what_is_no_reward_fails_alone() -> None:
    values = []
    for make in VALUES:
        with contextlib.suppress(Exception):  # a Score that can't be made is an exception of the user's code
            values.append(make())
    assert len(values) > 20

    class Mine(Environment):
        def score_batch(self, samples: Sequence[Sample]) -> list[Any]:
            return [*values, 1.0]

    scores = await BatchScorer(Mine()).score([Sample("x")] * (len(values) + 1), None)
    *bad, good = [score_from_wire(score_to_wire(score)) for score in scores]
    assert {score.status for score in bad} == {"FAILED"}
    assert (good.status, good.reward) == ("SCORED", 1.0)


@pytest.mark.parametrize("road", ROADS)
async def test_a_call_that_is_given_up_is_cancelled_and_not_failed(road: str) -> None:
    """A cancellation from outside is told from one that the user's code raises."""
    began = asyncio.Event()

    async def hang() -> None:
        began.set()
        await asyncio.Event().wait()

    mine = acting(lambda _: hang(), "plain " + road.partition(" ")[2])
    working = (
        Programs(mine).run(Episode("http://127.0.0.1:1", ""))
        if mine.runs_episodes
        else BatchScorer(mine).score([Sample("x")], None)
    )
    task = asyncio.ensure_future(working)
    await asyncio.wait_for(began.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("method", ["score", "score_batch", "episode"])
async def test_a_task_that_would_end_the_process_fails_its_sample_alone(method: str) -> None:
    for kind in (SystemExit, KeyboardInterrupt):

        async def leave(kind: type[BaseException] = kind) -> None:
            raise kind("left")

        async def wait(leave: Callable[[], Any] = leave) -> None:
            await asyncio.gather(asyncio.sleep(0), leave())

        for score in await ends(acting(lambda _, wait=wait: wait(), f"plain {method}"), times=3):
            assert (score.status, score.reward) == ("FAILED", None)
            assert score.message.startswith(f"{kind.__name__}: left ({__file__}:")
