"""Retries calls of the buffer while its server is away (a restart, a failover)."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.base.backoff import pause_after
from headrace.base.errors import HeadraceError, ReplayFull, ReplayUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 2.0


class BufferRetry:
    """Repeats a call while the buffer's server is away, for up to `deadline_s` from the first failure; then the error is raised. While the
    server is only full there is no deadline, because a person must give it memory.

        retry = BufferRetry(deadline_s=60.0)
        state = await retry(lambda: replay.state())

    Every call of the buffer may be repeated: if only the answer was lost, the repetition changes nothing. Pauses double from
    `first_pause_s` to `last_pause_s`. `errors` are those that may be temporary; all others are raised at once.
    """

    def __init__(
        self,
        deadline_s: float = math.inf,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        last_pause_s: float = LAST_PAUSE_S,
        errors: tuple[type[HeadraceError], ...] = (ReplayUnavailable,),
        log_level: int = logging.WARNING,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._deadline_s = deadline_s
        self._first_pause_s = first_pause_s
        self._last_pause_s = last_pause_s
        self._errors = errors
        self._log_level = log_level
        self._clock = clock
        self._sleep = sleep

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        since: float | None = None
        full = False
        tries = 0
        while True:
            try:
                return await call()
            except self._errors as error:
                now = self._clock()
                if isinstance(error, ReplayFull):
                    if not full:
                        log.log(self._log_level, "%s; waiting for it", error)
                    since, full = None, True
                elif since is None:
                    since = now
                    limit = "" if math.isinf(self._deadline_s) else f" for up to {self._deadline_s:g} s"
                    log.log(self._log_level, "%s; trying again%s", error, limit)
                if since is not None and now - since >= self._deadline_s:
                    raise
            tries += 1
            await self._sleep(pause_after(tries, self._first_pause_s, self._last_pause_s))
