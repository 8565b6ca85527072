"""A real buffer and runners with their real gateways; programs run in this process, replicas are toys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import openai

from headrace.base.http_client import open_session
from headrace.config import Config
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net.service import bind, serve_openly
from headrace.records.score import Score
from headrace.records.trajectory import Sampling
from headrace.replay import ReplayClient
from headrace_services.agents.fleet import Fleet, ReplicaApi, RunClock
from headrace_services.agents.gateway import Gateway, build_app
from headrace_services.agents.program_starter import ProgramApi
from headrace_services.agents.runner import EpisodeRunner
from tests.support.buffer import make_group
from tests.support.gateways import ToyReplica, plain
from tests.support.toy_policy import END
from tests.support.waiting import eventually

Play = Callable[[Episode], Awaitable[EpisodeOutcome]]
N = 2


def scored(reward: float = 1.0) -> EpisodeOutcome:
    return EpisodeOutcome(Score("SCORED", reward, build="one", environment="talk"))


async def two_turns(episode: Episode) -> EpisodeOutcome:
    async with openai.AsyncOpenAI(
        base_url=episode.base_url, api_key=episode.api_key, max_retries=0, **plain()
    ) as client:
        messages: list[Any] = list(episode.messages)
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    return scored(float(episode.index))


@dataclasses.dataclass
class Played:
    """Programs in this process. `began` are the episodes that were begun, `open` those that run."""

    play: Play
    began: list[Episode] = dataclasses.field(default_factory=list)
    open: int = 0

    async def run(self, episode: Episode) -> EpisodeOutcome:
        self.began.append(episode)
        self.open += 1
        try:
            return await self.play(episode)
        finally:
            self.open -= 1


@dataclasses.dataclass
class Stage:
    """A buffer with a replica, on which runners play. `others`: what answers at other addresses than the replica's."""

    replay: ReplayClient
    config: Config
    toy: ToyReplica
    now: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    others: dict[str, ReplicaApi] = dataclasses.field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def runner(
        self, programs: ProgramApi, **agents: Any
    ) -> AsyncIterator[tuple[EpisodeRunner, asyncio.Event, asyncio.Task[None]]]:
        config = self.config.model_copy(update={"agents": self.config.agents.model_copy(update=agents)})
        fleet = Fleet(lambda url: self.others.get(url, self.toy), RunClock(lambda: self.now[0]))
        gateway = Gateway("policy", max_request_bytes=10**6, max_parallel_calls=64, max_requests_per_s=10**6)
        with contextlib.closing(bind("127.0.0.1", 0, "agents.port")) as sock:
            async with open_session(None) as forward, serve_openly(build_app(gateway, forward), sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                reached = config.agents.advertised_url or url
                info = {"name": gateway.name, "gateway": url}
                runner = EpisodeRunner(config, self.replay, fleet, gateway, programs, reached, info)
                stop = asyncio.Event()
                running = asyncio.create_task(runner.run(stop))
                try:
                    yield runner, stop, running
                finally:
                    stop.set()
                    await asyncio.gather(running, return_exceptions=True)

    async def enqueue(self, *orders: int, n: int = N) -> None:
        groups = [
            msgspec.structs.replace(
                make_group(order, n=n, env_name="talk"), sampling=Sampling(1.0, 64, stop_token_ids=(END,))
            )
            for order in orders
        ]
        await self.replay.enqueue(groups, (await self.replay.state()).timeline)

    async def counts(self) -> dict[str, int]:
        return {state: count for state, count in (await self.replay.state()).counts.items() if count}

    async def until(self, **counts: int) -> None:
        """Return once as many groups are in these states, and none in others."""

        async def reached() -> bool:
            return await self.counts() == counts

        await eventually(reached)
