"""Waiting for what tells nobody, because it happens in another process, in the server or in a library."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

# Longer than a busy virtual machine stands still. Nothing that must happen in time has less, however little it takes.
STALL_S = 6.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.1


async def eventually(condition: Callable[[], Any], pause_s: float | None = None) -> Any:
    """The first true answer of `condition`, a function or a coroutine function, which is asked again after at most `pause_s`. By default
    that is a hundredth of a second or two, and a fiftieth of what was waited already, at most a tenth of a second.

    The test's own time limit ends what never comes.
    """
    began = time.monotonic()
    pause = _FIRST_PAUSE_S
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        await asyncio.sleep(pause)
        longest = pause_s or max(0.02, min(_LAST_PAUSE_S, (time.monotonic() - began) / 50))
        pause = min(2 * pause, longest)


def wait_until(condition: Callable[[], Any]) -> Any:
    """`eventually` where no event loop runs."""
    while not (answer := condition()):
        time.sleep(0.05)
    return answer
