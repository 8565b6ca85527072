"""Retrying calls of the buffer while its server is away (a restart, a failover)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.errors import ReplayUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 2.0


class BufferRetry:
    """`await retry(call)` repeats `call` while the server is unreachable, for up to `deadline_s`; then the error is raised.

    Every call of the buffer may be repeated: an answer lost on the way back changes nothing.
    """

    def __init__(
        self,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        since: float | None = None
        pause = FIRST_PAUSE_S
        while True:
            try:
                return await call()
            except ReplayUnavailable as error:
                now = self._clock()
                if since is None:
                    since = now
                    log.warning("the buffer is unreachable, waiting up to %g s for it: %s", self._deadline_s, error)
                if now - since >= self._deadline_s:
                    raise
            await self._sleep(pause)
            pause = min(LAST_PAUSE_S, 2 * pause)
