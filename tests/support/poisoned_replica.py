"""A small replica as a process of its own, which one prompt kills; it is started again each time it dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from tests.support.forks import keep_forked


async def keep_up(url: str, run_id: str, model: Path, poison: int, most: int, deaths: list[int], log: Path) -> None:
    """Until cancelled. Exit codes go to `deaths`, what the processes say to `log`."""
    await keep_forked(deaths, _run, url, run_id, str(model), poison, most, log=log)


def _run(url: str, run_id: str, model: str, poison: int, most: int) -> None:
    asyncio.run(_generate(url, run_id, model, poison, most))


async def _generate(url: str, run_id: str, model: str, poison: int, most: int) -> None:
    from tests.support.small_replica import SmallReplica

    async with contextlib.aclosing(ReplayClient(open_redis(url), run_id)) as replay:
        await SmallReplica(replay, Path(model), poison=poison, most=most).run()
