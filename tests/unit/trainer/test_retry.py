"""How long a server that is away is waited for."""

from __future__ import annotations

import pytest

from headrace.errors import ReplayUnavailable, WrongTimeline
from services.trainer.control.retry import BufferRetry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_retry_outlasts_a_server_that_comes_back() -> None:
    clock, calls = Clock(), 0

    async def call() -> str:
        nonlocal calls
        calls += 1
        if clock.now < 9.0:
            raise ReplayUnavailable("away")
        return "back"

    assert await BufferRetry(10.0, clock=clock, sleep=clock.sleep)(call) == "back"
    assert calls > 3


async def test_retry_ends_at_its_deadline_and_never_covers_a_refusal() -> None:
    clock = Clock()

    async def away() -> None:
        raise ReplayUnavailable("away")

    async def refused() -> None:
        raise WrongTimeline("another")

    with pytest.raises(ReplayUnavailable):
        await BufferRetry(10.0, clock=clock, sleep=clock.sleep)(away)
    assert clock.now >= 10.0
    with pytest.raises(WrongTimeline):
        await BufferRetry(10.0, clock=clock, sleep=clock.sleep)(refused)
