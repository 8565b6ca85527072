"""What benchmarks of the buffer share: a server of their own, prompts, a verified replica."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from redis.asyncio import Redis

from headrace.records.trajectory import Group, Sampling, Span, Trajectory
from headrace.replay import Lease, Limits, ReplayClient
from headrace_services.replay.embedded import EmbeddedServer
from tests.support.redis_servers import buffer_server

BYTES_A_TOKEN = 9  # id, log-probability, mask


@contextlib.contextmanager
def server() -> Iterator[EmbeddedServer]:
    """A server that holds the functions, and ends with the block."""
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder, buffer_server(Path(folder)) as one:
        yield one


def limits(
    prompts: int, generations: int, max_age: int = 0, policy: str = "ordered", ahead: int | None = None
) -> Limits:
    """Deadlines that nothing comes to while a benchmark runs."""
    return Limits(
        prompts_per_step=prompts,
        generations_per_prompt=generations,
        max_age=max_age,
        staleness_policy=policy,
        max_attempts=3,
        max_scoring_attempts=3,
        lease_s=3600.0,
        group_deadline_s=3600.0,
        scoring_deadline_s=3600.0,
        replica_dead_s=3600.0,
        max_bytes=2**36,
        ahead_steps=ahead,
    )


def group(order: int, generations: int, max_new_tokens: int) -> Group:
    return Group(
        id=f"e0-train-{order}",
        lane="train",
        order=order,
        task_name="addition",
        env_name="math",
        messages=({"role": "user", "content": "1+1"},),
        prompt_token_ids=np.arange(16, dtype=np.int32),
        extra_env_info={"answer": "2"},
        dataset_index=order,
        n=generations,
        sampling=Sampling(1.0, max_new_tokens),
    )


def trajectory(lease: Lease, index: int, spans: Sequence[Span]) -> Trajectory:
    """One whose completion is as long as its spans."""
    length = spans[-1].end
    return Trajectory(
        group_id=lease.group.id,
        attempt=lease.attempt,
        index=index,
        prompt_token_ids=lease.group.prompt_token_ids,
        completion_token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        loss_mask=np.ones(length, dtype=np.uint8),
        spans=tuple(spans),
        finish_reason="stop",
        text="",
        replica="benchmark",
    )


async def verified_replica(replay: ReplayClient) -> str:
    replica = secrets.token_hex(8)
    await replay.register(replica, {})
    await refit(replay, 0, [replica])
    return replica


async def refit(replay: ReplayClient, version: int, replicas: Sequence[str]) -> None:
    """A whole membership epoch that each of `replicas` verifies."""
    epoch = secrets.token_hex(8)
    await replay.open_epoch(epoch, version, (await replay.state()).timeline, {})
    for replica in replicas:
        await replay.acknowledge(replica, epoch)
    await replay.begin_epoch(epoch, {}, [0.0], 1e-3)
    for replica in replicas:
        await replay.verify(replica, epoch, [0.0])
    await replay.end_epoch(epoch, aborted=False)


async def usage(redis: Redis) -> dict[str, float]:
    """What the server has spent so far: seconds, commands and bytes."""
    info = await redis.info("everything")
    return {
        "cpu": float(info["used_cpu_user"]) + float(info["used_cpu_sys"]),
        "wall": time.perf_counter(),
        "calls": float(info["total_commands_processed"]),
        "in": float(info["total_net_input_bytes"]),
        "out": float(info["total_net_output_bytes"]),
    }


def describe_calls(seconds: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {"count": len(seconds), "p50_ms": float(p50), "p99_ms": float(p99)}
