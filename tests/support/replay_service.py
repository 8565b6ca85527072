"""The replay service in this process, with a server of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from headrace.config import Config
from headrace.replay import ReplayClient
from headrace_services.replay.main import make_limits, running
from tests.support.ports import free_port


def config_of(tmp_path: Path, **replay: object) -> Config:
    return Config.model_validate(
        {
            "run": {"id": "served", "dir": str(tmp_path)},
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
            "replay": {"redis_port": free_port(), "port": 0, "appendfsync": "always", **replay},
            "reward": {"port": free_port()},
        }
    )


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[httpx.AsyncClient, ReplayClient]]:
    stop = asyncio.Event()
    async with running(config, make_limits(config), stop) as (port, work):
        task = asyncio.create_task(work())
        try:
            async with (
                contextlib.aclosing(await ReplayClient.connect(config.redis_url, config.run.id)) as replay,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True, verify=False) as http,
            ):
                yield http, replay
        finally:
            stop.set()
            await task
