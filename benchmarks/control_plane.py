"""How much one buffer can take: a thousand replicas, 5,000 open episodes and a hundred environments, with nothing but calls.

    python -m benchmarks.control_plane [--replicas 1000] [--episodes 5000] [--environments 100] [--steps 4] [--at-a-time 1 8 32 128]
                                       [--runs 1] [--servers 1] [--share 1.0]

Nobody generates, scores or trains here: replicas push what they have leased, runners append calls to their episodes and end them, the
scorer scores, the trainer takes a step's groups and refits the whole fleet, over and over, each with the client that its service uses,
replicas and runners with a connection of their own. Half of the environments are of single completions, half of episodes. A step takes
every trajectory and every episode that fits into the fleet once.

`at a time` is how many calls are under way. The more there are, the longer each waits; once the server, or this process, has no time left,
more of them bring no more trajectories. `a core of the server` is where the server would have none left: it runs functions one after
another, so that what it spends on a trajectory, which is measured, bounds how many it takes a second. This process spends several times as
much, on two cores it is what ends first. `--share` gives each server that part of a core only, so that the servers end first. Then
`--runs 4 --servers 1 2 4` shows what it brings to give the runs more servers: each run has its part of the fleet, at every number of them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import os
import secrets
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.buffer import describe_calls, group, limits, server, trajectory, usage
from benchmarks.fleet import PROBE
from headrace.records.score import Score
from headrace.records.trajectory import Call, EpisodeTrajectory, Span
from headrace.replay import Lease, ReplayClient, Reservation
from headrace.replay.connection import open_redis
from headrace.replay.records import EnvironmentLimits

PERIOD_S = 0.02  # in which a server has its share of a core
GENERATIONS = 4
TOKENS = 512
CALLS = 3  # of an episode
SCORED = 256
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Size:
    replicas: int
    episodes: int
    environments: int
    steps: int

    @property
    def prompts(self) -> int:
        """Groups of a step: a group for each replica, and those of all open episodes."""
        return self.replicas + self.episodes // GENERATIONS

    @property
    def runners(self) -> int:
        return max(1, self.episodes // 100)


class Load:
    """One run, with so many calls at a time."""

    def __init__(self, url: str, size: Size, at_a_time: int) -> None:
        self._url, self._size = url, size
        self._run_id = f"load-{secrets.token_hex(4)}"
        self._service = ReplayClient(open_redis(url), self._run_id)
        self._replicas = {secrets.token_hex(6): self._client() for _ in range(size.replicas)}
        self._runners = {secrets.token_hex(6): self._client() for _ in range(size.runners)}
        self._under_way = asyncio.Semaphore(at_a_time)
        self.calls: dict[str, list[float]] = defaultdict(list)
        self._timeline, self._order = "", 0

    def _client(self) -> ReplayClient:
        return ReplayClient(open_redis(self._url), self._run_id)

    async def start(self) -> None:
        """Open the run with its fleet, and take the step that is not measured."""
        size = self._size
        environments = {name: EnvironmentLimits(episodes=True) for name in self._environments(episodes=True)}
        bounds = dataclasses.replace(limits(size.prompts, GENERATIONS, max_age=1), environments=environments)
        self._timeline = (await self._service.open_run(bounds)).timeline
        await self._together(client.register(name, {}) for name, client in self._replicas.items())
        await self._together(client.register_runner(name, {}) for name, client in self._runners.items())
        await self._refit(0)
        await self._step(0)
        self.calls.clear()

    async def take_steps(self) -> None:
        for step in range(1, self._size.steps + 1):
            await self._step(step)

    async def aclose(self) -> None:
        await asyncio.gather(
            *(each.aclose() for each in (self._service, *self._replicas.values(), *self._runners.values()))
        )

    def _environments(self, *, episodes: bool) -> list[str]:
        """Return the names of one half."""
        return [f"{'game' if episodes else 'math'}{i}" for i in range((self._size.environments + 1) // 2)]

    async def _step(self, step: int) -> None:
        """From prompts to the commit of what was trained, and the refit."""
        await self._enqueue()
        left = [asyncio.ensure_future(self._replay_replica(*each)) for each in self._replicas.items()]
        left += [asyncio.ensure_future(self._replay_runner(*each)) for each in self._runners.items()]
        left.append(asyncio.ensure_future(self._score()))
        await asyncio.gather(*left)
        batch = await self._timed("reserve", self._service.reserve(step, self._timeline))
        assert isinstance(batch, Reservation), batch
        keys = [each.key for each in batch.trajectories]
        for first in range(0, len(keys), SCORED):
            await self._timed("read", self._service.read(keys[first : first + SCORED]))
        await self._timed("commit", self._service.commit(step, self._timeline))
        await self._refit(step + 1)

    async def _enqueue(self) -> None:
        of_completions = itertools.cycle(self._environments(episodes=False))
        of_episodes = itertools.cycle(self._environments(episodes=True))
        names = [next(of_completions) for _ in range(self._size.replicas)]
        names += [next(of_episodes) for _ in range(self._size.prompts - self._size.replicas)]
        prompts = [
            msgspec.structs.replace(group(self._order + i, GENERATIONS, TOKENS), env_name=name)
            for i, name in enumerate(names)
        ]
        self._order += len(prompts)
        await self._timed("enqueue", self._service.enqueue(prompts, self._timeline))

    async def _replay_replica(self, name: str, client: ReplayClient) -> None:
        """Lease a group, and push its trajectories one after the other."""
        leases: list[Lease] = []
        while not leases:
            leases = await self._timed("lease", client.lease(name, 1))
            if not leases:
                await client.wait_work(1.0)
        await self._timed("heartbeat", client.heartbeat(name, [lease.token for lease in leases]))
        for lease in leases:
            for index in range(GENERATIONS):
                await self._timed(
                    "push", client.push(lease, trajectory(lease, index, [Span(lease.version, 0, TOKENS)]))
                )

    async def _replay_runner(self, name: str, client: ReplayClient) -> None:
        """Open as many episodes as this runner has places for, play all of them at once, and end them."""
        places, leases = self._size.episodes // self._size.runners, list[Lease]()
        while len(leases) < places // GENERATIONS:
            free = places - GENERATIONS * len(leases)
            found = await self._timed("lease_episodes", client.lease_episodes(name, free))
            leases += found
            if not found:
                await client.wait_work(1.0)
        await self._timed("runner_heartbeat", client.runner_heartbeat(name, [lease.token for lease in leases]))
        await self._together(self._play(client, lease, i, name) for lease in leases for i in range(GENERATIONS))

    async def _play(self, client: ReplayClient, lease: Lease, index: int, runner: str) -> None:
        calls = [call(number, lease.version) for number in range(CALLS)]
        for number, each in enumerate(calls):
            await self._timed("append", client.append(lease, index, number, secrets.token_hex(8), each))
        ended = EpisodeTrajectory(lease.group.id, lease.attempt, index, tuple(calls), truncated=False, runner=runner)
        await self._timed("finish", client.finish(lease, index, ended, Score("SCORED", index / GENERATIONS)))

    async def _score(self) -> None:
        room = dict.fromkeys(self._environments(episodes=False), SCORED)
        left = self._size.replicas * GENERATIONS
        while left:
            jobs = await self._timed("take_scoring", self._service.take_scoring(room))
            if not jobs:
                await self._service.wait_scoring(1.0)
                continue
            scores = [(job, Score("SCORED", job.trajectory.index / GENERATIONS)) for job in jobs]
            assert not any(await self._timed("score", self._service.score_many(scores)))
            left -= len(jobs)

    async def _refit(self, version: int) -> None:
        """A whole epoch of the fleet."""
        began, epoch = time.perf_counter(), secrets.token_hex(8)
        await self._service.open_epoch(epoch, version, self._timeline, {})
        await self._together(
            self._timed("acknowledge", client.acknowledge(name, epoch)) for name, client in self._replicas.items()
        )
        await self._service.begin_epoch(epoch, {}, PROBE, 1e-3)
        await self._together(
            self._timed("verify", client.verify(name, epoch, PROBE)) for name, client in self._replicas.items()
        )
        await self._service.end_epoch(epoch, aborted=False)
        self.calls["a whole epoch"].append(time.perf_counter() - began)

    async def _timed(self, name: str, call: Awaitable[T]) -> T:
        async with self._under_way:
            began = time.perf_counter()
            answer = await call
            self.calls[name].append(time.perf_counter() - began)
        return answer

    async def _together(self, calls: Iterable[Awaitable[T]]) -> Sequence[T]:
        return await asyncio.gather(*calls)


def call(number: int, version: int) -> Call:
    """One of a chain."""
    tokens = TOKENS // CALLS
    return Call(
        parent=number - 1,
        context_token_ids=np.arange(16, dtype=np.int32),
        completion_token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        spans=(Span(version, 0, tokens),),
        finish_reason="stop",
        replica="replica",
    )


def show(size: Size, runs: int, results: dict[tuple[int, int], dict[str, Any]]) -> None:
    title = f"{size.replicas:,} replicas, {size.episodes:,} open episodes of {CALLS} calls, {size.environments} environments"
    title = f"{title}; {size.prompts:,} groups of {GENERATIONS} a step"
    table = Table(title=title if runs == 1 else f"{runs} runs, each with {title}")
    table.add_column("at a time" if runs == 1 else "servers, at a time of each run")
    for servers, at_a_time in results:
        table.add_column(str(at_a_time) if runs == 1 else f"{servers}, {at_a_time}", justify="right")
    first = next(iter(results.values()))
    for name in (name for name in first if name != "calls"):
        table.add_row(name, *(f"{result[name]:,.3g}" for result in results.values()))
    table.add_section()
    for name in sorted(first["calls"]):
        calls = [result["calls"][name] for result in results.values()]
        cells = (f"{each['p50_ms']:.1f}, {each['p99_ms']:.1f}" for each in calls)
        table.add_row(f"{name} ({calls[0]['count'] / size.steps / runs:,.0f} a step): p50, p99 in ms", *cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--episodes", type=int, default=5000, help="open at a time, of runners with 100 each")
    parser.add_argument("--environments", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4, help="that are measured, after one that is not")
    parser.add_argument(
        "--at-a-time", type=int, nargs="+", default=[1, 8, 32, 128], help="calls under way, of each run"
    )
    parser.add_argument("--runs", type=int, default=1, help="side by side, each with its part of the fleet")
    parser.add_argument("--servers", type=int, nargs="+", default=[1], help="over which the runs are spread")
    parser.add_argument("--share", type=float, default=1.0, help="of a core, which each server has")
    args = parser.parse_args()
    size = Size(args.replicas // args.runs, args.episodes // args.runs, args.environments, args.steps)
    results = {}
    for servers, at_a_time in itertools.product(args.servers, args.at_a_time):
        with ExitStack() as stack:
            buffers = [stack.enter_context(server()) for _ in range(servers)]
            stack.enter_context(slowed([buffer.pid for buffer in buffers], args.share))
            urls = [buffer.url for buffer, _ in zip(itertools.cycle(buffers), range(args.runs))]
            results[servers, at_a_time] = asyncio.run(measure(urls, size, at_a_time))
    show(size, args.runs, results)


@contextmanager
def slowed(pids: Sequence[int], share: float) -> Iterator[None]:
    """Stop these processes for all of each period but `share`."""
    ended = threading.Event()

    def stop_and_go() -> None:
        while not ended.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(PERIOD_S * share)

    slowing = threading.Thread(target=stop_and_go)
    if share < 1:
        slowing.start()
    try:
        yield
    finally:
        ended.set()
        if share < 1:
            slowing.join()


async def measure(urls: Sequence[str], size: Size, at_a_time: int) -> dict[str, Any]:
    """A run for each of `urls`, of which several may name the same server."""
    loads = [Load(url, size, at_a_time) for url in urls]
    clients = [open_redis(url) for url in dict.fromkeys(urls)]
    try:
        for load in loads:
            await load.start()
        before, began = [await usage(each) for each in clients], time.perf_counter()
        await asyncio.gather(*(load.take_steps() for load in loads))
        wall_s, after = time.perf_counter() - began, [await usage(each) for each in clients]
    finally:
        await asyncio.gather(*(load.aclose() for load in loads), *(client.aclose() for client in clients))
    trajectories = len(urls) * size.steps * size.prompts * GENERATIONS
    server_s = sum(each["cpu"] for each in after) - sum(each["cpu"] for each in before)
    names = dict.fromkeys(name for load in loads for name in load.calls)
    return {
        "trajectories/s": trajectories / wall_s,
        "each server's share of a core": server_s / wall_s / len(clients),
        "servers, CPU ms a trajectory": 1e3 * server_s / trajectories,
        "a core of a server: trajectories/s": trajectories / server_s,
        "calls": {name: describe_calls([each for load in loads for each in load.calls[name]]) for name in names},
    }


if __name__ == "__main__":
    main()
