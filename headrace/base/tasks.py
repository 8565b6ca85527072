"""Runs asyncio's tasks to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and return once all have ended, however they ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_until(work: Coroutine[Any, Any, T], end: Coroutine[Any, Any, object]) -> T | None:
    """Await `work`, and return its result; or cancel it as soon as `end` has ended, and return None. Raises the error of `work`."""
    tasks = running, _ = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        await cancel(tasks)
