"""Calls a second of episodes through a gateway, beside the same calls made to the replica directly, and a runner's memory.

    python -m benchmarks.agents

One replica of the tiny model (random weights), a buffer, and a runner with its gateway in this process, as are the programs: each asks five
times, appends what it was told, and asks again; 64 are open at a time. Through the gateway a call is rendered, sampled, parsed and kept in
the buffer. Directly it is sampled alone: the contexts are those that the episodes' records hold, 64 conversations at a time, each in its
order. Then programs that wait after their first call are opened, and the memory of this process is that of its runner, its gateway and the
programs' clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.refit import Source, buffer
from headrace.config import Config
from headrace.episode import Episode, EpisodeOutcome
from headrace.replay import EnvironmentLimits, Limits, ReplayClient, Reservation
from headrace.replay.connection import open_redis
from headrace.replica_client import ReplicaClient, SampleRequest
from headrace.service import bind, serve_openly
from headrace.trajectory import EpisodeTrajectory, Group, Int32, Sampling, Score
from headrace.weights.probe import choose_token_ids
from headrace_services.agents.fleet import Fleet, RunClock
from headrace_services.agents.gateway import Gateway, build_app
from headrace_services.agents.runner import Runner
from headrace_services.trainer.control.weight_sender import WeightSender
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny

CALLS, AT_A_TIME, N = 5, 64, 16
OPEN = 1008  # whole groups of 16
NEW_TOKENS, CONTEXT = 16, 512
ENVIRONMENT = "talk"

Play = Callable[[Episode], Coroutine[Any, Any, None]]


@dataclasses.dataclass
class Programs:
    """Programs in this process, which earn nothing."""

    play: Play

    async def run(self, episode: Episode) -> EpisodeOutcome:
        await self.play(episode)
        return EpisodeOutcome(Score("SCORED", 0.0, environment=ENVIRONMENT, build="1"))


async def asks_five_times(episode: Episode) -> None:
    messages = list(episode.messages)
    for _ in range(CALLS):
        answer = await episode.chat(messages)
        messages += [answer, {"role": "user", "content": "1+1"}]


class Run:
    """A run of the buffer with one replica, which is a process of its own and holds the weights of version 0."""

    def __init__(self, config: Config, replay: ReplayClient) -> None:
        self.config = config
        self.replay = replay
        self.timeline = ""

    async def hold_weights(self, source: Source) -> None:
        """Return once the replica has been sent its weights."""
        await self.replay.rewind(0, "benchmark")
        self.timeline = "benchmark"
        while not await self.replay.replicas():
            await self.replay.wait_epoch(0.2)
        sender = WeightSender(self.config, self.replay)
        model: Any = source.model.config
        ids = choose_token_ids(model.vocab_size)
        report = await sender.refit(0, self.timeline, source, ids, source.logprobs(ids))
        await sender.aclose()
        if not report.verified:
            raise SystemExit(f"the replica refused its weights: {report.refused}")

    @contextlib.asynccontextmanager
    async def playing(self, play: Play) -> AsyncIterator[Runner]:
        """A runner that plays what the buffer has, until the context closes."""
        fleet = Fleet(ReplicaClient, RunClock())
        gateway = Gateway("policy", max_request_bytes=10**6, max_parallel_calls=64, max_requests_per_s=10**6)
        with contextlib.closing(bind("127.0.0.1", 0, "agents.port")) as sock:
            async with httpx.AsyncClient() as forward, serve_openly(build_app(gateway, forward), sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                info = {"name": gateway.name, "gateway": url}
                runner = Runner(self.config, self.replay, fleet, gateway, Programs(play), url, info)
                stop = asyncio.Event()
                running = asyncio.create_task(runner.run(stop))
                try:
                    yield runner
                finally:
                    stop.set()
                    await running
                    await fleet.aclose()

    async def through_the_gateway(self) -> tuple[float, list[EpisodeTrajectory]]:
        """Seconds from the first lease to the last episode, and what was recorded."""
        async with self.playing(asks_five_times):
            started = time.perf_counter()
            while not isinstance(batch := await self.replay.reserve(0, self.timeline), Reservation):
                await self.replay.wait_ready(1.0)
            seconds = time.perf_counter() - started
        read = await self.replay.read([one.key for one in batch.trajectories])
        return seconds, [trajectory for trajectory, _ in read if isinstance(trajectory, EpisodeTrajectory)]

    async def directly(self, episodes: Sequence[EpisodeTrajectory], eos: int) -> float:
        """Seconds for the same contexts, sampled again."""
        (replica,) = await self.replay.replicas()
        client = ReplicaClient(str(replica.info["url"]))
        places = asyncio.Semaphore(AT_A_TIME)

        async def one(episode: EpisodeTrajectory) -> None:
            async with places:
                for context in contexts(episode):
                    await client.sample(
                        SampleRequest(tuple(context), NEW_TOKENS, self.timeline, 0, stop_token_ids=(eos,))
                    )

        started = time.perf_counter()
        await asyncio.gather(*map(one, episodes))
        seconds = time.perf_counter() - started
        await client.aclose()
        return seconds

    async def memory(self) -> tuple[int, float]:
        """Episodes that are open at once, each with a call behind it, and KiB of this process for each."""
        asked, slots = 0, self.config.agents.slots
        all_asked, over = asyncio.Event(), asyncio.Event()

        async def asks_and_waits(episode: Episode) -> None:
            nonlocal asked
            await episode.chat(episode.messages)
            asked += 1
            if asked == slots:
                all_asked.set()
            await over.wait()

        process = psutil.Process()
        before = process.memory_info().rss
        async with self.playing(asks_and_waits) as runner:
            await all_asked.wait()
            opened, after = runner.episodes, process.memory_info().rss
            over.set()
        return opened, (after - before) / opened / 1024


def contexts(episode: EpisodeTrajectory) -> list[list[int]]:
    """What the policy was given in each call of a chain."""
    path: list[int] = []
    found = []
    for call in episode.calls:
        path += call.context_token_ids.tolist()
        found.append(list(path))
        path += call.completion_token_ids.tolist()
    return found


def groups(count: int, prompts: Sequence[Int32], eos: int) -> list[Group]:
    return [
        Group(
            id=f"e0-train-{order}",
            lane="train",
            order=order,
            task_name=ENVIRONMENT,
            env_name=ENVIRONMENT,
            messages=({"role": "user", "content": arithmetic.text(pair)},),
            prompt_token_ids=prompts[order],
            extra_env_info={},
            dataset_index=order,
            n=N,
            sampling=Sampling(1.0, NEW_TOKENS, stop_token_ids=(eos,)),
        )
        for order, pair in enumerate(arithmetic.held_out(2)[:count])
    ]


@contextlib.asynccontextmanager
async def run(folder: Path, redis_url: str, prompts_per_step: int, slots: int) -> AsyncIterator[tuple[Run, int]]:
    """A run whose replica is ready and whose groups are queued; and the end token."""
    model = folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    run_id = f"benchmark-{uuid.uuid4().hex[:8]}"
    settings = {
        "run": {"id": run_id, "dir": str(folder)},
        "replay": {"redis_url": redis_url},
        "grpo": {"num_prompts_per_step": prompts_per_step, "num_generations_per_prompt": N},
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": CONTEXT,
            "generation": {"max_new_tokens": NEW_TOKENS, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
        },
        "env": {ENVIRONMENT: {"attached": True, "episodes": True}},
        "agents": {"slots": slots},
    }
    config = Config.model_validate(settings)
    file = folder / f"{run_id}.yaml"
    file.write_text(yaml.safe_dump(settings))
    replay = ReplayClient(open_redis(redis_url), run_id)
    limits = Limits(
        prompts_per_step=prompts_per_step,
        generations_per_prompt=N,
        max_age=1,
        staleness_policy="ordered",
        max_attempts=2,
        max_scoring_attempts=2,
        lease_s=60.0,
        group_deadline_s=600.0,
        scoring_deadline_s=600.0,
        replica_dead_s=60.0,
        max_bytes=2**34,
        max_episode_bytes=config.agents.max_episode_bytes,
        environments={ENVIRONMENT: EnvironmentLimits(episodes=True)},
    )
    await replay.open_run(limits)
    command = [sys.executable, "-m", "headrace.cli", "rollout", "--config", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "replica.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environ)
    try:
        one = Run(config, replay)
        source = Source(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        await one.hold_weights(source)
        prompts = [
            torch.tensor(tiny.prompt_ids(tokenizer, arithmetic.text(pair)), dtype=torch.int32).numpy()
            for pair in arithmetic.held_out(2)
        ]
        await replay.enqueue(groups(prompts_per_step, prompts, tokenizer.eos_token_id), one.timeline)
        yield one, tokenizer.eos_token_id
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await replay.aclose()


async def measure(folder: Path, redis_url: str) -> None:
    console = Console(file=sys.stdout, width=120)
    table = Table(title=f"Episodes of {CALLS} calls, {AT_A_TIME} at a time")
    for column in ("", "calls", "s", "calls/s", "of direct"):
        table.add_column(column, justify="right")
    async with run(folder, redis_url, 256 // N, AT_A_TIME) as (one, eos):
        gateway_s, episodes = await one.through_the_gateway()
        direct_s = await one.directly(episodes, eos)
    calls = sum(len(episode.calls) for episode in episodes)
    for name, seconds in (("through the gateway", gateway_s), ("to the replica", direct_s)):
        table.add_row(name, f"{calls}", f"{seconds:.1f}", f"{calls / seconds:.0f}", f"{direct_s / seconds:.2f}")
    console.print(table)
    async with run(folder, redis_url, OPEN // N, OPEN) as (one, _):
        opened, kib = await one.memory()
    console.print(f"{opened} episodes open: {kib:.0f} KiB each, {opened * kib / 1024:.0f} MiB")


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name, buffer(Path(name) / "buffer") as redis_url:
        tiny.make(Path(name) / "model", warmup=False)
        asyncio.run(measure(Path(name), redis_url))


if __name__ == "__main__":
    main()
