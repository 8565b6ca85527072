"""Runners of `benchmarks.agents` that are registered and wait for work, in one process.

    python -m benchmarks.idle_runners CONFIG.yaml COUNT

Says an empty line once the buffer has them all; a signal ends them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import NoReturn

import yaml

from headrace.config import Config
from headrace.env.episode import Episode
from headrace.net.replica_client import ReplicaClient
from headrace.net.service import stop_on_signals
from headrace.replay import ReplayClient
from headrace.replay.connection import open_redis
from headrace_services.agents.fleet import Fleet, RunClock
from headrace_services.agents.gateway import Gateway
from headrace_services.agents.runner import EpisodeRunner


class Nobody:
    async def run(self, episode: Episode) -> NoReturn:
        raise SystemExit(f"there was to be no work: {episode}")


def runner(config: Config) -> tuple[EpisodeRunner, ReplayClient]:
    replay = ReplayClient(open_redis(str(config.replay.redis_url)), str(config.run.id))
    gateway = Gateway("policy", max_request_bytes=1024, max_parallel_calls=1, max_requests_per_s=1)
    fleet = Fleet(ReplicaClient, RunClock())
    return EpisodeRunner(config, replay, fleet, gateway, Nobody(), "http://127.0.0.1:1", {"name": gateway.name}), replay


async def main(config: Config, count: int) -> None:
    stop = stop_on_signals()
    runners = [runner(config) for _ in range(count)]
    async with asyncio.TaskGroup() as running:
        for one, _ in runners:
            running.create_task(one.run(stop))
        while len(await runners[0][1].runners()) < count:  # noqa: ASYNC110 - what the buffer has sets no event
            await asyncio.sleep(0.05)
        sys.stdout.write("\n")
        sys.stdout.flush()
    for _, replay in runners:
        await replay.aclose()


if __name__ == "__main__":
    asyncio.run(main(Config.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text())), int(sys.argv[2])))
