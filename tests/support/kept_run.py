"""A run that no trainer made: its folder and the buffer in it, as the command line finds them while it is up, and after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from headrace.launch import runs
from headrace.replay import Limits, ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.replay import library
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.ports import free_port

CONFIG = """
run: {{id: {id}, dir: {folder}}}
policy: {{model_name: none, precision: float32}}
data:
  train: {{dataset_name: arithmetic, env_name: math}}
env:
  math: {{type: math}}
replay: {{redis_port: {port}}}
"""


@contextlib.contextmanager
def kept_run(
    parent: Path, run_id: str, limits: Limits, fill: Callable[[ReplayClient], Awaitable[None]]
) -> Iterator[tuple[Path, EmbeddedServer]]:
    """Its folder, in `parent`, and its buffer with what `fill` put into it, up; stopped in the end, if it is not yet."""
    folder, port = parent / run_id, free_port()
    folder.mkdir(parents=True)
    (folder / runs.SAVED).write_text(CONFIG.format(id=run_id, folder=parent, port=port), encoding="utf-8")
    server = EmbeddedServer(folder / "replay", "127.0.0.1", port)

    async def start() -> None:
        await server.start()
        async with open_redis(server.url) as redis:
            await library.load(redis)
        replay = ReplayClient(open_redis(server.url), run_id)
        await replay.open_run(limits)
        await fill(replay)
        await replay.aclose()

    try:
        asyncio.run(start())
        yield folder, server
    finally:
        asyncio.run(server.stop())
