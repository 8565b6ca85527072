"""Replicas as processes, and a trainer that only sends weights: what the tests of the service share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from headrace.config import Config
from headrace.config.inherit import merge
from headrace.records.score import Score
from headrace.records.trajectory import Sampling, Trajectory
from headrace.replay import ReplayClient, Replica, Reservation
from headrace.replay.connection import open_redis
from headrace_services.refit.sender import RefitReport, WeightSender
from tests.support.buffer import LIMITS as SMALL
from tests.support.buffer import make_group
from tests.support.forks import command, fork
from tests.support.paced_engine import pace
from tests.support.source_model import SourceModel, Weights
from tests.support.waiting import eventually

PATIENCE_S = 240.0  # for an engine to start, or a long completion to end, on a busy machine
PROMPT = (3, 7, 8, 15, 9, 6, 4)
CONTEXT = 2048
IN_FLIGHT = {
    "async_grpo": {
        "enabled": True,
        "max_trajectory_age_steps": 50,
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": True,
    }
}
LIMITS = dataclasses.replace(  # times so long that no replica counts as dead because the machine stood still
    SMALL, max_age=50, lease_s=120.0, group_deadline_s=600.0, scoring_deadline_s=600.0, replica_dead_s=120.0
)


class Policy(SourceModel):
    """Remembers what each version was."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.versions: dict[int, Weights] = {}

    def keep(self, version: int) -> None:
        self.versions[version] = self.weights()

    def logprobs_of(self, ids: np.ndarray, version: int) -> np.ndarray:
        """[len - 1] log-probabilities of tokens 1.. under the weights of `version`."""
        return self.logprobs(ids, self.versions[version])

    def difference(self, it: Trajectory, version: int) -> float:
        """Largest |log-probability difference| of the completion's tokens to those under `version`."""
        ids = np.concatenate([it.prompt_token_ids, it.completion_token_ids])
        return float(np.abs(self.logprobs_of(ids, version)[it.prompt_token_ids.size - 1 :] - it.logprobs).max())

    def difference_by_span(self, it: Trajectory) -> float:
        """Largest |log-probability difference| of the completion's tokens to those under the weights that their spans name."""
        ids = np.concatenate([it.prompt_token_ids, it.completion_token_ids])
        start = it.prompt_token_ids.size - 1
        return max(
            float(
                np.abs(
                    self.logprobs_of(ids, span.version)[start + span.start : start + span.end]
                    - it.logprobs[span.start : span.end]
                ).max()
            )
            for span in it.spans
        )


class Process:
    """`headrace rollout`."""

    def __init__(self, folder: Path, config: dict[str, Any], name: str) -> None:
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        self.log = folder / f"{name}.log"
        self.popen = fork(_rollout, str(file), log=self.log, kind="engine")
        self.replica = ""
        self.http = httpx.AsyncClient(timeout=60, verify=False)

    async def joined(self, replay: ReplayClient) -> Process:
        """Wait until it is in the fleet."""

        async def look() -> Replica | None:
            assert self.popen.poll() is None, self.log.read_text()[-4000:]
            return next((r for r in await replay.replicas() if r.info.get("pid") == self.popen.pid), None)

        it = await eventually(look)
        self.replica = it.id
        self.http = httpx.AsyncClient(base_url=it.info["url"], timeout=60, verify=False)
        return self

    async def metric(self, sample: str) -> float:
        page = (await self.http.get("/metrics", follow_redirects=True)).text
        values = [float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{sample} ")]
        return values[0] if values else 0.0

    async def sampled(self) -> float:
        """Tokens that the engine has sampled so far."""
        return await self.metric("headrace_rollout_engine_generated_tokens_total")

    async def generating(self) -> bool:
        """Whether it has requests, which the engine may not have begun."""
        return await self.metric("headrace_rollout_requests_running") > 0

    def children(self) -> list[int]:
        pids = [self.popen.pid]
        for pid in pids:
            pids += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return pids[1:]

    def engine(self) -> int:
        """Process id of vLLM's engine, the only child; it can't be told by its name, which one that was forked does not get."""
        (engine,) = self.children()
        return engine

    async def ended(self) -> int:
        return await asyncio.to_thread(self.popen.wait, 60)

    async def stop(self) -> None:
        await self.http.aclose()
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                await self.ended()
            except subprocess.TimeoutExpired:
                self.popen.kill()
                await self.ended()


def _rollout(config: str) -> None:
    pace()
    command("rollout", "--config", config)


class Fleet:
    def __init__(self, folder: Path, settings: dict[str, Any], replay: ReplayClient, policy: Policy) -> None:
        self.folder, self.settings, self.replay, self.policy = folder, settings, replay, policy
        self.timeline = "timeline-0"
        self.sender = WeightSender(Config.model_validate(settings), replay)
        self.processes: list[Process] = []
        self.orders = 0

    async def start(self, **grpo: Any) -> Process:
        config = {**self.settings, "grpo": {**self.settings["grpo"], **grpo}}
        process = Process(self.folder, config, f"rollout-{len(self.processes)}")
        self.processes.append(process)
        return await process.joined(self.replay)

    async def refit(self, version: int, wrong_by: float = 0.0) -> RefitReport:
        """Send the policy as it is, as `version`; the proof asked for is off by `wrong_by` nats."""
        self.policy.keep(version)
        probe = self.policy.logprobs(self.policy.probe_ids) - np.float32(wrong_by)
        return await self.sender.refit(version, self.timeline, self.policy, self.policy.probe_ids, probe)

    async def enqueue(self, *, tokens: int = 0, n: int = 2, prompt: tuple[int, ...] = PROMPT) -> str:
        """A group; `tokens`: greedy, which keeps clear of the end token, so many of them."""
        sampling = Sampling(temperature=0.0, max_new_tokens=tokens) if tokens else Sampling(1.0, 24)
        group = make_group(self.orders, n=n, prompt_token_ids=np.array(prompt, np.int32), sampling=sampling)
        self.orders += 1
        assert await self.replay.enqueue([group], self.timeline) == 1
        return group.id

    async def trained_step(self) -> int:
        """Have a batch written under the next step's version, score it and reserve the step: then the buffer takes newer tokens.
        Returns the former version."""
        step = (await self.replay.state()).next_step
        await self.refit(step)
        for _ in range(self.settings["grpo"]["num_prompts_per_step"]):
            await self.pushed(await self.enqueue())
        while jobs := await self.replay.take_scoring({"math": 64}):
            for job in jobs:
                await self.replay.score(job, Score("SCORED", 1.0))
        assert isinstance(await self.replay.reserve(step, self.timeline), Reservation)
        return step

    async def group(self, group_id: str, *states: str) -> dict[str, Any]:
        """The group once it is in one of `states`."""

        async def look() -> dict[str, Any] | None:
            it = await self.replay.group(group_id)
            return it if it is not None and it["state"] in states else None

        return await eventually(look)

    async def pushed(self, group_id: str, n: int = 2) -> list[Trajectory]:
        """The trajectories of a group, once all are there."""
        await self.group(group_id, "scoring")
        found = [await self.replay.trajectory(group_id, index) for index in range(n)]
        return [pair[0] for pair in found if pair is not None]

    async def aclose(self) -> None:
        for process in self.processes:
            await process.stop()
        await self.sender.aclose()
        await self.replay.aclose()


@contextlib.asynccontextmanager
async def running_fleet(folder: Path, redis_url: str, model: Path, more: dict[str, Any]) -> AsyncIterator[Fleet]:
    """A fleet without replicas, in a run of its own; `more` is merged into its configuration."""
    run_id = f"test-{secrets.token_hex(6)}"
    settings = {
        "run": {"id": run_id, "dir": str(folder)},
        "replay": {"redis_url": redis_url},
        "rollout": {"heartbeat_s": 0.5},
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 2},
        "policy": {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": CONTEXT,
            "generation": {"max_new_tokens": 64, "vllm_cfg": {"kv_cache_memory_bytes": 64 * 2**20}},
        },
        "weight_channel": {"timeout_s": 60.0, "verify_tolerance": 1e-4},
    }
    replay = ReplayClient(open_redis(redis_url), run_id)
    await replay.open_run(LIMITS)
    await replay.rewind(0, "timeline-0")
    fleet = Fleet(folder, merge(settings, more), replay, Policy(model))
    try:
        yield fleet
    finally:
        await fleet.aclose()
