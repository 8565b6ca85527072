"""How a child process of the hub is restarted."""

from __future__ import annotations

import asyncio

import pytest

from headrace.base.errors import ServiceError
from headrace_services.reward.child_process import ChildProcess
from headrace_services.reward.scoring_worker import Specification


class Failing(ChildProcess):
    """Can't start seven times."""

    starts = 0

    @property
    def alive(self) -> bool:
        return self.starts > 7

    async def start(self) -> None:
        self.starts += 1
        if not self.alive:
            raise ServiceError(f"start {self.starts} failed")


async def test_the_pauses_between_restarts_grow_up_to_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Failing(Specification({}, [], []))
    pauses: list[float] = []
    problems: list[str | None] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        problems.append(worker.problem)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await worker.restart()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert problems == [f"start {start} failed" for start in range(1, 8)]
    assert worker.problem is None
