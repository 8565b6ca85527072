"""Async client of the replay buffer: each method is one call of a server-side function (`services/replay/functions/`).

The buffer's state machine and its seven laws live in Redis, so whoever calls gets the same answer; the client encodes
arguments, decodes replies and turns refusals into the types of `headrace.errors`. Payloads are values of their own, written
before the function that makes them visible: a function moves ids, never megabytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
from typing import Any

from redis.asyncio import Redis

from headrace.errors import InvalidCall, ReplayError, ReplayUnavailable
from headrace.replay.connect import shown
from headrace.replay.people import PeopleCalls
from headrace.replay.records import Limits, RunState
from headrace.replay.replies import of_lane, unpack
from headrace.replay.rollout import RolloutCalls
from headrace.replay.scoring import ScoringCalls
from headrace.replay.trainer import TrainerCalls
from headrace.replay.wire import Wire, open_redis

# Where the server keeps the id of the run it serves now.
CURRENT_RUN = "headrace:run"


class ReplayClient(TrainerCalls, RolloutCalls, ScoringCalls, PeopleCalls):
    """One connection pool to the buffer of one run. Safe for concurrent use by tasks of one event loop.

    Every method raises `ReplayUnavailable` when the server can't be reached (after redis-py's own retries), `InvalidCall` on
    arguments no correct caller sends, and the `Fenced` family (law 4) where stated.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        """A client of run `run_id` on `redis`, made if need be by `open_run`; `connect` is the ordinary way to one."""
        super().__init__(redis, run_id)

    @classmethod
    async def connect(cls, url: str, run_id: str | None = None, timeout_s: float = 30.0) -> ReplayClient:
        """Connect, waiting up to `timeout_s` for server, function library and run. `run_id` None takes the server's current run.

        Raises `ReplayUnavailable` with the remedy: unreachable, older than 7.0, no such run.
        """
        redis = open_redis(url, retries=0)
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                try:
                    return await cls._join(redis, url, run_id)
                except ReplayUnavailable as error:
                    if time.monotonic() >= deadline:
                        raise ReplayUnavailable(f"{shown(url)}: {error}") from error
                await asyncio.sleep(0.1)
        finally:
            await redis.aclose()

    @classmethod
    async def _join(cls, redis: Redis, url: str, run_id: str | None) -> ReplayClient:
        probe = Wire(redis, run_id or "none")
        version = str((await probe.command("INFO", "server"))["redis_version"])
        if int(version.split(".")[0]) < 7:
            raise InvalidCall(f"{shown(url)}: Redis {version} is too old; run Redis 7.0 or later, or Valkey")
        if run_id is None:
            current = await probe.command("GET", CURRENT_RUN)
            if current is None:
                raise ReplayUnavailable("the server holds no run; start the replay service")
            run_id = current.decode()
        client = cls(open_redis(url), run_id)
        try:
            await client.state()
        except ReplayError:
            await client.aclose()
            raise
        return client

    async def open_run(self, limits: Limits) -> RunState:
        """Make the run if it is not there, else give it these limits. Called by the replay service; makes it the current run."""
        milliseconds = {
            f"{name.removesuffix('_s')}_ms": max(1, round(getattr(limits, name) * 1000))
            for name in ("lease_s", "group_deadline_s", "scoring_deadline_s", "replica_dead_s")
        }
        low, high = limits.reward_min, limits.reward_max
        bounds = f"{-math.inf if low is None else low} {math.inf if high is None else high}"
        bounds += " components" if limits.filter_components else ""
        reply = await self._wire.call(
            "open_run",
            secrets.token_hex(16),
            secrets.token_hex(16),
            limits.prompts_per_step,
            limits.generations_per_prompt,
            limits.max_age,
            limits.max_attempts,
            limits.max_scoring_attempts,
            milliseconds["lease_ms"],
            milliseconds["group_deadline_ms"],
            milliseconds["scoring_deadline_ms"],
            milliseconds["replica_dead_ms"],
            limits.max_bytes,
            limits.max_age if limits.ahead_steps is None else limits.ahead_steps,
            limits.redundant,
            limits.max_scored_per_step,
            limits.retain_steps,
            limits.staleness_policy,
            bounds if limits.filter_equal else "",
        )
        await self._wire.command("SET", CURRENT_RUN, self.run_id)
        await self._sweep_old_incarnations()
        return self._note(reply)

    async def stats(self) -> dict[str, Any]:
        """Everything people look at: RunState fields, counts by lane and state, refusals by code, bytes, ages, replicas, scoring line."""
        stats = unpack(await self._wire.call("stats"))
        counts = stats.pop("counts") or {}
        return {
            "run_id": self.run_id,
            **stats,
            "refusals": stats["refusals"] or {},
            "requeues": stats["requeues"] or {},
            "counts": {lane: of_lane(counts, lane) for lane in ("train", "validation")},
            "replicas": [dataclasses.asdict(replica) for replica in await self.replicas()],
        }
