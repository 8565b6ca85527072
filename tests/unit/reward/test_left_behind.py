"""What a call of a user's code leaves in the event loop ends that call alone, as FAILED, even if asyncio would end the loop for it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace import Environment, Sample, Score
from headrace.env import slots
from headrace.env.server import BatchScorer
from tests.support.waiting import eventually

KEPT = set[Any]()


def leave(error: BaseException) -> Callable[[], Any]:
    def left(*_: object) -> Any:
        raise error

    return left


async def soon(left: Callable[..., Any]) -> None:
    asyncio.get_running_loop().call_soon(left)


async def later(left: Callable[..., Any]) -> None:
    asyncio.get_running_loop().call_later(0.01, left)


async def when_done(left: Callable[..., Any]) -> None:
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(left)
    future.set_result(None)


async def in_a_task(left: Callable[..., Any]) -> None:
    async def task() -> None:
        left()

    KEPT.add(asyncio.create_task(task()))


async def from_a_thread(left: Callable[..., Any]) -> None:
    await asyncio.to_thread(asyncio.get_running_loop().call_soon_threadsafe, left)


async def at_a_signal(left: Callable[..., Any]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, left)
    signal.raise_signal(signal.SIGUSR1)


WAYS = [soon, later, when_done, in_a_task, from_a_thread, at_a_signal]


def scored(mine: Environment, *completions: str) -> list[Score]:
    """What becomes of these samples, in a process of the environment; every slot is free again."""

    async def main() -> list[Score]:
        scorer = BatchScorer(mine)
        scores = await scorer.score([Sample(each) for each in completions], 20)
        await eventually(lambda: not scorer.busy)
        return scores

    return slots.run(main())


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS)
def test_it_fails_its_sample_alone(
    way: Callable[[Any], Coroutine[Any, Any, None]], kind: type[BaseException], swallows: bool
) -> None:
    class Mine(Environment):
        concurrency = 2

        async def score(self, sample: Sample) -> float:
            if sample.completion == "bad":
                await way(leave(kind("mine")))
                with contextlib.suppress(asyncio.CancelledError) if swallows else contextlib.nullcontext():
                    await asyncio.Event().wait()
            return 1.0

    bad, good = scored(Mine(), "bad", "good")
    assert good.reward == 1.0
    assert (bad.status, bad.reward) == ("FAILED", None)
    assert bad.message.startswith(f"{kind.__name__}: mine ({__file__}:")
    assert "in left" in bad.traceback


def test_it_fails_a_plain_methods_sample_whose_thread_keeps_its_slot() -> None:
    ended = threading.Event()

    class Mine(Environment):
        loop: asyncio.AbstractEventLoop

        def score(self, sample: Sample) -> float:
            self.loop.call_soon_threadsafe(leave(SystemExit(3)))
            ended.wait()
            return 1.0

    async def main() -> Score:
        Mine.loop = asyncio.get_running_loop()
        scorer = BatchScorer(Mine())
        (score,) = await scorer.score([Sample("x")], 20)
        assert scorer.busy == 1
        ended.set()
        await eventually(lambda: not scorer.busy)
        return score

    score = slots.run(main())
    assert score.status == "FAILED"
    assert score.message.startswith("SystemExit: 3")


@pytest.mark.parametrize("way", WAYS)
def test_after_the_call_it_is_told_with_its_line_and_the_loop_goes_on(
    way: Callable[[Any], Coroutine[Any, Any, None]], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> Score:
        over = asyncio.Event()

        class Mine(Environment):
            async def score(self, sample: Sample) -> float:
                async def afterwards() -> None:
                    await over.wait()
                    await way(leave(SystemExit(3)))

                KEPT.add(asyncio.create_task(afterwards()))
                return 1.0

        (score,) = await BatchScorer(Mine()).score([Sample("x")], 20)
        over.set()
        await eventually(lambda: "SystemExit: 3 (" in caplog.text)
        return score

    assert slots.run(main()).reward == 1.0
    assert f"{__file__}:" in caplog.text


def test_what_belongs_to_no_call_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        contextvars.Context().run(asyncio.get_running_loop().call_soon, leave(SystemExit(3)))
        await asyncio.sleep(0.01)
        return "went on"

    assert slots.run(main()) == "went on"
    assert f"{__file__}:" in caplog.text
    assert "it goes on" in caplog.text


def test_a_signals_handler_ends_the_process_with_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    former = signal.signal(signal.SIGALRM, lambda *_: leave(SystemExit(3))())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(SystemExit):
            slots.run(asyncio.Event().wait())
    finally:
        signal.signal(signal.SIGALRM, former)
    assert f"{__file__}:" in caplog.text
    assert "the process ends" in caplog.text


def test_ctrl_c_is_nobodys_error() -> None:
    async def main() -> None:
        contextvars.Context().run(asyncio.get_running_loop().call_soon, leave(KeyboardInterrupt()))
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        slots.run(main())


def test_a_cancellation_of_everything_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Environment):
        async def score(self, sample: Sample) -> float:
            for task in asyncio.all_tasks():
                task.cancel()
            return 1.0

    with pytest.raises(asyncio.CancelledError):
        scored(Mine(), "x")
    assert "cancelled tasks that are not its own" in caplog.text
