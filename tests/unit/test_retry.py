"""Going on after the buffer's server was away: repeated until it answers, or until the deadline from the first failure."""

from __future__ import annotations

import pytest

from headrace.base.errors import InvalidCall, ReplayDenied, ReplayUnavailable, ServiceError
from headrace.replay import BufferRetry


class Server:
    """Is away for the first `away` calls; each takes `seconds` of the clock."""

    def __init__(self, away: int, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.away, self.seconds = away, seconds
        self.error = error or ReplayUnavailable("gone")
        self.now, self.calls = 0.0, 0
        self.pauses: list[float] = []

    async def call(self) -> str:
        self.now += self.seconds
        self.calls += 1
        if self.calls <= self.away:
            raise self.error
        return "here"

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)

    def retry(self, deadline_s: float, **options: float) -> BufferRetry:
        return BufferRetry(deadline_s, clock=lambda: self.now, sleep=self.sleep, **options)  # type: ignore[arg-type]


async def test_a_call_is_repeated_with_growing_pauses_until_it_is_answered() -> None:
    server = Server(away=6)
    assert await server.retry(60.0)(server.call) == "here"
    assert server.pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


async def test_the_deadline_counts_from_the_first_failure() -> None:
    server = Server(away=100, seconds=30.0)
    with pytest.raises(ReplayUnavailable, match="gone"):
        await server.retry(60.0)(server.call)
    assert server.calls == 3


async def test_each_call_has_the_whole_deadline() -> None:
    server = Server(away=3)
    retry = server.retry(1.0, first_pause_s=0.3, last_pause_s=0.3)
    assert await retry(server.call) == "here"
    server.away = server.calls + 3
    assert await retry(server.call) == "here"


async def test_without_a_deadline_it_never_gives_up() -> None:
    server = Server(away=10_000)
    assert await BufferRetry(clock=lambda: server.now, sleep=server.sleep)(server.call) == "here"
    assert set(server.pauses[10:]) == {2.0}


@pytest.mark.parametrize("error", [InvalidCall("no"), ReplayDenied("no"), ValueError("no")])
async def test_what_waiting_does_not_change_is_raised_at_once(error: Exception) -> None:
    server = Server(away=1, error=error)
    with pytest.raises(type(error)):
        await server.retry(60.0)(server.call)
    assert server.calls == 1


async def test_other_errors_that_may_pass_can_be_named() -> None:
    server = Server(away=1, error=ServiceError("the hub is away"))
    retry = BufferRetry(60.0, errors=(ServiceError,), clock=lambda: server.now, sleep=server.sleep)
    assert await retry(server.call) == "here"
