"""What tests of the buffer do over and over: prompts, a verified replica, trajectories, scores."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.records.score import Score
from headrace.records.trajectory import Call, Group, Lane, Sampling, Span, Trajectory
from headrace.replay import Lease, Limits, ReplayClient, Reservation, RunState
from tests.support.waiting import eventually

# a small run: 2 prompts a step, 2 trajectories a group, age 1
LIMITS = Limits(
    prompts_per_step=2,
    generations_per_prompt=2,
    max_age=1,
    staleness_policy="ordered",
    max_attempts=3,
    max_scoring_attempts=3,
    lease_s=30.0,
    group_deadline_s=60.0,
    scoring_deadline_s=30.0,
    replica_dead_s=30.0,
    max_bytes=2**30,
)


def nonce() -> str:
    return secrets.token_hex(8)


def make_group(
    order: int, *, n: int = 2, lane: Lane = "train", group_id: str | None = None, env_name: str = "math", **changes: Any
) -> Group:
    group = Group(
        id=group_id or f"e0-{lane}-{order}",
        lane=lane,
        order=order,
        task_name="addition",
        env_name=env_name,
        messages=({"role": "user", "content": f"{order}+1"},),
        prompt_token_ids=np.arange(1, 5, dtype=np.int32),
        extra_env_info={"answer": str(order + 1)},
        dataset_index=order,
        n=n,
        sampling=Sampling(temperature=1.0, max_new_tokens=16),
    )
    return msgspec.structs.replace(group, **changes)


def make_trajectory(lease: Lease, index: int, versions: Sequence[int] | None = None, length: int = 4) -> Trajectory:
    """`length` tokens a weight version, of the lease's version unless told otherwise."""
    versions = [lease.version] if versions is None else versions
    total = length * len(versions)
    return Trajectory(
        group_id=lease.group.id,
        attempt=lease.attempt,
        index=index,
        prompt_token_ids=lease.group.prompt_token_ids,
        completion_token_ids=np.arange(total, dtype=np.int32),
        logprobs=np.full(total, -0.5, dtype=np.float32),
        loss_mask=np.ones(total, dtype=np.uint8),
        spans=tuple(Span(version, i * length, (i + 1) * length) for i, version in enumerate(versions)),
        finish_reason="stop",
        text="7",
        replica="replica",
    )


def make_call(parent: int = -1, version: int = 0, length: int = 2) -> Call:
    """One call of an episode."""
    return Call(
        parent=parent,
        context_token_ids=np.arange(1, 4, dtype=np.int32),
        completion_token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        spans=(Span(version, 0, length),),
        finish_reason="stop",
        replica="replica",
    )


async def enqueue(replay: ReplayClient, orders: Sequence[int], n: int = 2) -> int:
    return await replay.enqueue([make_group(order, n=n) for order in orders], (await replay.state()).timeline)


async def refill(replay: ReplayClient, orders: Iterable[int]) -> int:
    """Enqueue those of `orders` again that the buffer asks for; returns how many it took."""
    timeline = (await replay.state()).timeline
    return await replay.enqueue([make_group(order) for order in orders], timeline, refill=True)


async def refit(replay: ReplayClient, version: int, replicas: Sequence[str]) -> None:
    """A whole epoch that every one of `replicas` verifies, unless it holds the version already."""
    epoch, timeline = nonce(), (await replay.state()).timeline
    asked = set((await replay.open_epoch(epoch, version, timeline, {})).members).intersection(replicas)
    for replica in asked:
        await replay.acknowledge(replica, epoch)
    await replay.begin_epoch(epoch, {}, [0.0], 1e-3)
    for replica in asked:
        assert (await replay.verify(replica, epoch, [1e-6])).verified
    await replay.end_epoch(epoch, aborted=False)


async def healthy_replica(replay: ReplayClient, version: int = 0) -> str:
    replica = nonce()
    await replay.register(replica, {"host": "here"})
    await refit(replay, version, [replica])
    return replica


async def healthy_replicas(replay: ReplayClient, count: int) -> list[str]:
    replicas = [nonce() for _ in range(count)]
    for replica in replicas:
        await replay.register(replica, {})
    await refit(replay, 0, replicas)
    return replicas


async def keep_alive(replay: ReplayClient, replica: str) -> None:
    """Its heartbeats, until cancelled."""
    while True:
        await replay.heartbeat(replica, [])
        await asyncio.sleep(0.05)


async def begin(replay: ReplayClient, prompts: int) -> str:
    """So many prompts, and a replica that may lease them."""
    await enqueue(replay, range(prompts))
    return await healthy_replica(replay)


async def lease_one(replay: ReplayClient) -> Lease:
    """The only prompt, leased to a replica."""
    (lease,) = await replay.lease(await begin(replay, 1), 1)
    return lease


async def push_all(replay: ReplayClient, lease: Lease, versions: Sequence[int] | None = None) -> None:
    for index in lease.missing[: lease.group.n]:
        await replay.push(lease, make_trajectory(lease, index, versions))


async def score_all(replay: ReplayClient, reward: float = 1.0) -> int:
    """Score whatever waits; returns how many."""
    scored = 0
    while jobs := await replay.take_scoring({"math": 64}):
        for job in jobs:
            await replay.score(job, Score("SCORED", reward + job.trajectory.index))
        scored += len(jobs)
    return scored


async def generate(
    replay: ReplayClient, replica: str, most: int = 64, versions: Sequence[int] | None = None
) -> list[str]:
    """Lease, push and score what admission allows; returns the groups' ids."""
    leases = await replay.lease(replica, most)
    for lease in leases:
        await push_all(replay, lease, versions)
    await score_all(replay)
    return [lease.group.id for lease in leases]


async def reserve(replay: ReplayClient, step: int) -> Reservation:
    batch = await replay.reserve(step, (await replay.state()).timeline)
    assert isinstance(batch, Reservation), batch
    return batch


async def reserve_later(replay: ReplayClient, step: int) -> Reservation:
    """The step's batch, once it is there."""
    timeline = (await replay.state()).timeline

    async def ready() -> Reservation | None:
        batch = await replay.reserve(step, timeline)
        return batch if isinstance(batch, Reservation) else None

    found: Reservation = await eventually(ready)
    return found


async def rewind(replay: ReplayClient, version: int) -> RunState:
    return await replay.rewind(version, nonce())


async def total(replay: ReplayClient) -> int:
    """Groups of the train lane in all states together: law 1 keeps it equal to those enqueued."""
    return sum((await replay.state()).counts.values())


def some(counts: dict[str, int]) -> dict[str, int]:
    """Without the states that no group is in."""
    return {state: count for state, count in counts.items() if count}


async def group_of(replay: ReplayClient, lease: Lease) -> dict[str, Any]:
    """What the buffer holds of the lease's group; nothing, if that is gone."""
    return await replay.group(lease.group.id) or {}


async def tighten(replay: ReplayClient, limits: Limits, **changes: float) -> None:
    """Other limits from now on."""
    await replay.open_run(dataclasses.replace(limits, **changes))  # type: ignore[arg-type]


_NEWEST_CALL = (b"leased", b"answer", b"clock", b"offset")


async def contents(replay: ReplayClient) -> dict[bytes, object]:
    """Everything the server holds of this run but the count of refusals, which calls of a replica or client were the newest, and the time:
    what a refused call must leave as it was."""
    redis, held = replay.redis, {}
    async for key in redis.scan_iter(match=f"hr:{{{replay.run_id}}}*", count=1000):
        if key.endswith((b":refusals", b":clients")):
            continue
        match await redis.type(key):
            case b"hash":
                fields = await redis.hgetall(key)
                held[key] = {name: value for name, value in fields.items() if name not in _NEWEST_CALL}
            case b"zset":
                held[key] = await redis.zrange(key, 0, -1, withscores=True)
            case b"set":
                held[key] = await redis.smembers(key)
            case b"list":
                held[key] = await redis.lrange(key, 0, -1)
            case b"stream":
                held[key] = await redis.xlen(key)
            case _:
                held[key] = (await redis.get(key), await redis.ttl(key))
    return held


async def payloads(replay: ReplayClient) -> list[bytes]:
    """Keys of all trajectories that the server holds of this run."""
    return [key async for key in replay.redis.scan_iter(match=f"hr:{{{replay.run_id}}}:*:p:*")]


async def payload_bytes(replay: ReplayClient) -> int:
    """Bytes of all trajectories that the server holds of this run: what `bytes` must say once no lease may add to it."""
    return sum([await replay.redis.strlen(key) for key in await payloads(replay)])


async def died(replay: ReplayClient, limits: Limits, replica: str) -> None:
    """Return once the buffer counts `replica` as DEAD, soon after a last heartbeat. Others keep the time that `limits` give them: on a busy
    machine they would die, too."""
    await tighten(replay, limits, replica_dead_s=0.05)
    await replay.heartbeat(replica, [])
    await tighten(replay, limits)
    await missed(replay, replica)


async def missed(replay: ReplayClient, replica: str) -> None:
    """Return once the buffer counts `replica`, which is silent, as DEAD."""

    async def dead() -> bool:
        await replay.heartbeat("nobody", [])  # any call ends what is due
        return {known.id: known.state for known in await replay.replicas()}[replica] == "DEAD"

    await eventually(dead)


async def refusals(replay: ReplayClient) -> dict[str, int]:
    return dict((await replay.stats())["refusals"])
