"""Waiting for what tells nobody, because it happens in another process, in the server or in a library."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

_FIRST_PAUSE_S = 0.001


async def eventually(condition: Callable[[], Any], pause_s: float = 0.02) -> Any:
    """The first true answer of `condition`, a function or a coroutine function, which is asked again after at most `pause_s`.

    The test's own time limit ends what never comes.
    """
    pause = _FIRST_PAUSE_S
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        await asyncio.sleep(pause)
        pause = min(2 * pause, pause_s)


def wait_until(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    """`eventually` where no event loop runs. Fails if there is no true answer within this time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError(f"nothing within {within_s} s")
