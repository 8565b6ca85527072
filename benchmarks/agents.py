"""Calls a second of episodes through a gateway beside the same calls made to the replica directly, and what each costs in which process.

    python -m benchmarks.agents

One replica of the tiny model (random weights), a buffer, and a runner with its gateway in this process; the programs are in another
(`benchmarks.agents_programs`). Each asks five times, appends what it was told, and asks again; 64 are open at a time. Through the gateway a
call is rendered, sampled, parsed and kept in the buffer. Directly it is sampled alone: the same process, with the same client, sends the
requests to sample that the gateway made, with their tokens and seeds, 64 conversations at a time, each in its order. The prefix cache is
emptied in between. The two take turns, since a machine's speed changes; the first round warms up and does not count. With random weights
almost every answer has tokens that are no text, so that almost every later call has two conversations rendered: the worst case.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.buffer import limits, server
from benchmarks.processes import of_run, seconds
from benchmarks.refit import Source
from headrace.base.http_client import open_session
from headrace.config import Config
from headrace.env.episode import Episode, EpisodeOutcome
from headrace.net.replica_client import SAMPLE, ReplicaClient, Sampled, SampleRequest
from headrace.net.service import bind, serve_openly
from headrace.records.score import Score
from headrace.records.trajectory import EpisodeTrajectory, Group, Int32, Sampling
from headrace.replay import EnvironmentLimits, ReplayClient, Reservation
from headrace.replay.connection import open_redis
from headrace_services.agents.fleet import Fleet, RunClock
from headrace_services.agents.gateway import Gateway, build_app
from headrace_services.agents.runner import EpisodeRunner
from headrace_services.refit.probe import choose_token_ids
from headrace_services.refit.sender import WeightSender
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny

CALLS, AT_A_TIME, N = 5, 64, 16
EPISODES, ROUNDS = 256, 4
NEW_TOKENS, CONTEXT = 16, 512
ENVIRONMENT = "talk"


class ProgramsProcess:
    """The process of the programs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = itertools.count()
        self._done: dict[int, asyncio.Future[None]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator[ProgramsProcess]:
        command, pipe = [sys.executable, "-m", "benchmarks.agents_programs"], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        programs = cls(process)
        reading = asyncio.create_task(programs._read())
        try:
            yield programs
        finally:
            reading.cancel()
            process.terminate()
            await process.wait()

    async def do(self, **job: object) -> None:
        if self._process.returncode is not None:
            raise SystemExit("the programs have ended")
        number = next(self._ids)
        self._done[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, **job}).encode() + b"\n")
        await self._done[number]

    async def run(self, episode: Episode) -> EpisodeOutcome:
        """Play the episode, which earns nothing."""
        address, _, path = episode.base_url.partition("/s/")
        await self.do(address=address, path=f"/s/{path}/chat/completions", messages=list(episode.messages), calls=CALLS)
        return EpisodeOutcome(Score("SCORED", 0.0, environment=ENVIRONMENT, build="1"))

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._done.pop(int(line)).set_result(None)
        for future in self._done.values():
            future.set_exception(SystemExit("the programs have ended"))


class Listening(ReplicaClient):
    """Keeps what was asked and answered, in `heard`."""

    heard: list[tuple[SampleRequest, Sampled]]

    async def sample(self, request: SampleRequest) -> Sampled:
        sampled = await super().sample(request)
        self.heard.append((request, sampled))
        return sampled


@dataclasses.dataclass
class Road:
    """Some calls that went the same way: wall seconds, and CPU seconds by process."""

    seconds: float
    cpu_s: dict[str, float]


@dataclasses.dataclass
class Round:
    """The same calls on both roads, and the share of the tokens of later turns that the prefix cache had."""

    calls: int
    through: Road
    directly: Road
    cached: float

    @property
    def share(self) -> float:
        """Of the calls a second to the replica, those through the gateway."""
        return self.directly.seconds / self.through.seconds


class Run:
    """A run of the buffer with one replica, which is a process of its own."""

    def __init__(self, config: Config, replay: ReplayClient, source: Source) -> None:
        self.config = config
        self.replay = replay
        self.timeline = "benchmark"
        self.version = -1
        self.groups: list[Group] = []
        self._source = source
        self._sender = WeightSender(config, replay)

    async def aclose(self) -> None:
        await self._sender.aclose()

    async def begin(self) -> None:
        """Return once the replica has been sent its weights."""
        await self.replay.rewind(0, self.timeline)
        while not await self.replay.replicas():
            await self.replay.wait_epoch(0.2)
        await self.refit()

    async def refit(self) -> None:
        """Send the replica the weights once more; it computes nothing with what it had."""
        self.version += 1
        config: Any = self._source.model.config
        ids = choose_token_ids(config.vocab_size)
        probe = self._source.logprobs(ids)
        report = await self._sender.refit(self.version, self.timeline, self._source, ids, probe)
        if not report.verified:
            raise SystemExit(f"the replica refused its weights: {report.refused}")

    @contextlib.asynccontextmanager
    async def playing(self, programs: ProgramsProcess) -> AsyncIterator[None]:
        """Have a runner play what the buffer has, until the context closes."""
        fleet = Fleet(Listening, RunClock())
        gateway = Gateway("policy", max_request_bytes=10**6, max_parallel_calls=64, max_requests_per_s=10**6)
        with contextlib.closing(bind("127.0.0.1", 0, "agents.port")) as sock:
            async with open_session(None) as forward, serve_openly(build_app(gateway, forward), sock):
                url = f"http://127.0.0.1:{sock.getsockname()[1]}"
                info = {"name": gateway.name, "gateway": url}
                runner = EpisodeRunner(self.config, self.replay, fleet, gateway, programs, url, info)
                stop = asyncio.Event()
                running = asyncio.create_task(runner.run(stop))
                try:
                    yield
                finally:
                    stop.set()
                    await running
                    await fleet.aclose()

    async def both_roads(self, step: int, programs: ProgramsProcess) -> Round:
        """Play the groups of a step, first through the gateway."""
        heard: list[tuple[SampleRequest, Sampled]] = []
        Listening.heard = heard

        async def all_read() -> list[EpisodeTrajectory]:
            while not isinstance(batch := await self.replay.reserve(step, self.timeline), Reservation):
                await self.replay.wait_ready(1.0)
            read = await self.replay.read([one.key for one in batch.trajectories])
            return [trajectory for trajectory, _ in read if isinstance(trajectory, EpisodeTrajectory)]

        count = EPISODES // N
        await self.replay.enqueue(self.groups[step * count : (step + 1) * count], self.timeline)
        async with self.playing(programs):
            before, started = _cpu_s(), time.perf_counter()
            episodes = await all_read()
            through = Road(time.perf_counter() - started, _spent(before))
        known = set(heard_contexts := [tuple(context) for each in episodes for context in contexts(each)])
        assert {request.token_ids for request, _ in heard} == known, "the record is not what the replica was asked"
        await self.replay.commit(step + 1, self.timeline)
        await self.refit()
        (replica,) = await self.replay.replicas()
        places = asyncio.Semaphore(AT_A_TIME)
        asked: dict[tuple[int, ...], list[SampleRequest]] = defaultdict(list)
        for request, _ in heard:
            asked[request.token_ids].append(msgspec.structs.replace(request, message=False, tools=None))

        async def again(episode: EpisodeTrajectory) -> None:
            async with places:
                bodies = [msgspec.json.encode(asked[tuple(each)].pop()).decode() for each in contexts(episode)]
                await programs.do(address=str(replica.info["url"]), path=SAMPLE, bodies=bodies)

        before, started = _cpu_s(), time.perf_counter()
        await asyncio.gather(*map(again, episodes))
        directly = Road(time.perf_counter() - started, _spent(before))
        first = {tuple(contexts(each)[0]) for each in episodes}
        later = [(request, sampled) for request, sampled in heard if request.token_ids not in first]
        cached = sum(sampled.cached_tokens for _, sampled in later)
        return Round(
            len(heard_contexts), through, directly, cached / sum(len(request.token_ids) for request, _ in later)
        )


def _cpu_s() -> dict[str, float]:
    """CPU seconds so far of the processes that take part in a call."""
    return {"runner and gateway": seconds(psutil.Process()), **of_run()}


def _spent(before: dict[str, float]) -> dict[str, float]:
    return {name: used - before[name] for name, used in _cpu_s().items()}


def contexts(episode: EpisodeTrajectory) -> list[list[int]]:
    """What the policy was given in each call of a chain."""
    path: list[int] = []
    found = []
    for call in episode.calls:
        path += call.context_token_ids.tolist()
        found.append(list(path))
        path += call.completion_token_ids.tolist()
    return found


def groups(prompts: Sequence[Int32], eos: int) -> list[Group]:
    return [
        Group(
            id=f"e0-train-{order}",
            lane="train",
            order=order,
            task_name=ENVIRONMENT,
            env_name=ENVIRONMENT,
            messages=({"role": "user", "content": arithmetic.text(pair)},),
            prompt_token_ids=prompt,
            extra_env_info={},
            dataset_index=order,
            n=N,
            sampling=Sampling(1.0, NEW_TOKENS, stop_token_ids=(eos,)),
        )
        for order, (pair, prompt) in enumerate(zip(arithmetic.select_held_out(2), prompts, strict=True))
    ]


@contextlib.asynccontextmanager
async def run(folder: Path, redis_url: str) -> AsyncIterator[Run]:
    """A run whose replica is ready."""
    model = folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    run_id = f"benchmark-{uuid.uuid4().hex[:8]}"
    settings = {
        "run": {"id": run_id, "dir": str(folder)},
        "replay": {"redis_url": redis_url},
        "grpo": {"num_prompts_per_step": EPISODES // N, "num_generations_per_prompt": N},
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": CONTEXT,
            "generation": {"max_new_tokens": NEW_TOKENS, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
        },
        "env": {ENVIRONMENT: {"attached": True, "episodes": True}},
        "agents": {"slots": AT_A_TIME},
    }
    config = Config.model_validate(settings)
    file = folder / f"{run_id}.yaml"
    file.write_text(yaml.safe_dump(settings))
    replay = ReplayClient(open_redis(redis_url), run_id)
    opened = dataclasses.replace(
        limits(EPISODES // N, N, max_age=1),
        max_episode_bytes=config.agents.max_episode_bytes,
        environments={ENVIRONMENT: EnvironmentLimits(episodes=True)},
    )
    await replay.open_run(opened)
    command = [sys.executable, "-m", "headrace.cli", "rollout", "--config", str(file)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "replica.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environ)
    source = Source(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    one = Run(config, replay, source)
    try:
        await one.begin()
        prompts = [
            torch.tensor(tiny.prompt_ids(tokenizer, arithmetic.text(pair)), dtype=torch.int32).numpy()
            for pair in arithmetic.select_held_out(2)
        ]
        one.groups = groups(prompts, tokenizer.eos_token_id)
        yield one
    finally:
        await one.aclose()
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await replay.aclose()


async def measure(folder: Path, redis_url: str) -> None:
    console = Console(file=sys.stdout, width=140)
    async with ProgramsProcess.started() as programs, run(folder, redis_url) as one:
        _, *rounds = [await one.both_roads(step, programs) for step in range(1 + ROUNDS)]
    console.print(_table(rounds))
    cached = statistics.mean(each.cached for each in rounds)
    console.print(f"of the tokens that later turns continue, {cached:.2f} were in the prefix cache")


def _table(rounds: Sequence[Round]) -> Table:
    calls = sum(each.calls for each in rounds)
    table = Table(
        title=f"{len(rounds)} times {rounds[0].calls} calls, {CALLS} an episode, {AT_A_TIME} episodes at a time; CPU milliseconds of a call"
    )
    processes = list(rounds[0].through.cpu_s)
    for column in ("", "calls/s", *processes, "all"):
        table.add_column(column, justify="right")
    total = {}
    for name, roads in (
        ("through the gateway", [each.through for each in rounds]),
        ("to the replica", [each.directly for each in rounds]),
    ):
        spent = [1000 * sum(road.cpu_s[process] for road in roads) / calls for process in processes]
        total[name] = sum(spent)
        rate = calls / sum(road.seconds for road in roads)
        table.add_row(name, f"{rate:.0f}", *(f"{each:.2f}" for each in spent), f"{sum(spent):.2f}")
    through, directly = total.values()
    shares = sorted(each.share for each in rounds)
    middle = f"{statistics.median(shares):.2f} ({shares[0]:.2f}-{shares[-1]:.2f})"
    table.add_row("share", middle, *("" for _ in processes), f"{directly / through:.2f}")
    return table


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a runner's process imports no torch, whose objects each collection would scan
    with tempfile.TemporaryDirectory() as name, server() as buffer:
        tiny.make(Path(name) / "model", warmup=False)
        asyncio.run(measure(Path(name), buffer.url))
    gc.unfreeze()  # nanobind reports what is not collected at exit as leaks


if __name__ == "__main__":
    main()
