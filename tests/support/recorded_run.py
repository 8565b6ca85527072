"""A run in which every function of the buffer is called, each call kept with what the server held before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from headrace.records.score import Score
from headrace.replay import EnvironmentLimits, ReplayClient
from headrace.replay.connection import BufferConnection, function_name
from tests.support.buffer import LIMITS as SMALL
from tests.support.buffer import (
    enqueue,
    generate,
    make_call,
    make_group,
    make_trajectory,
    nonce,
    push_all,
    refit,
    reserve,
    score_all,
)

Contents = list[tuple[bytes, bytes]]  # keys with their values as DUMP gives them
# What a run holds but the count of refusals, which a refused call adds to.
DIGEST = """
local parts = {}
local function add(key, values, together)
  for i = 1, #values, together do parts[#parts + 1] = table.concat({key, values[i], values[i + together - 1]}, '=') end
end
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind = redis.call('TYPE', key).ok
  if kind == 'hash' and string.sub(key, -9) ~= ':refusals' then
    local fields, kept = redis.call('HGETALL', key), {}
    for i = 1, #fields, 2 do
      -- any call may write down what the time is
      if key .. '*' ~= ARGV[1] or fields[i] ~= 'clock' and fields[i] ~= 'offset' then
        kept[#kept + 1], kept[#kept + 2] = fields[i], fields[i + 1]
      end
    end
    add(key, kept, 2)
  elseif kind == 'set' then
    add(key, redis.call('SMEMBERS', key), 1)
  elseif kind ~= 'hash' then
    parts[#parts + 1] = key .. redis.call('DUMP', key)
  end
end
table.sort(parts)
return redis.sha1hex(table.concat(parts, '\\0'))
"""
# Nothing falls due while the calls are tried: a call that finds a deadline passed acts on it, refused or not.
AGES_S = 1e7

LIMITS = dataclasses.replace(
    SMALL,
    max_age=2,
    lease_s=AGES_S,
    group_deadline_s=AGES_S,
    scoring_deadline_s=AGES_S,
    replica_dead_s=AGES_S,
    redundant=1,
    retain_steps=2,
    environments={"game": EnvironmentLimits(episodes=True)},
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that the buffer answered well, and what it held then."""

    before: Contents
    command: tuple[Any, ...]  # FCALL, the function, 1, the run's key, arguments


async def held(redis: Redis) -> Contents:
    keys = [key async for key in redis.scan_iter(count=1000)]
    pipe = redis.pipeline(transaction=False)
    for key in keys:
        pipe.dump(key)
    return list(zip(keys, await pipe.execute(), strict=True))


class Recorder(BufferConnection):
    """A connection that keeps every call of a function."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id)
        self.calls: dict[str, list[Call]] = {}

    async def command(self, *command: Any) -> Any:
        await self._keep([command])
        return await super().command(*command)

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        await self._keep(commands)
        return await super().pipeline(commands)

    async def _keep(self, commands: Sequence[tuple[Any, ...]]) -> None:
        for command in commands:
            if command[0] == "FCALL":
                self.calls.setdefault(command[1].removeprefix(function_name("")), []).append(
                    Call(await held(self.redis), command)
                )


async def record(redis: Redis, run_id: str) -> dict[str, list[Call]]:
    """The calls of a small run, by function."""
    replay = ReplayClient(redis, run_id)
    recorder = replay._connection = Recorder(redis, run_id)
    await run(replay)
    return recorder.calls


async def run(replay: ReplayClient) -> None:
    """A small run: groups in every state, two replicas, validation, a rewind and a restore."""
    timeline = (await replay.open_run(LIMITS)).timeline
    replicas = [nonce(), nonce()]
    for replica in replicas:
        await replay.register(replica, {"host": "here"})
    epoch = nonce()
    await replay.open_epoch(epoch, 0, timeline, {"address": "here"})
    await replay.acknowledge(replicas[1], epoch)
    await replay.refuse(replicas[1], epoch, "not now", interrupted=True)
    await replay.quarantine(replicas[0], timeline, "it is the only one")  # refused, also once another is HEALTHY
    await refit(replay, 0, replicas)
    await _pull(replay, timeline)
    await enqueue(replay, range(8))
    await replay.enqueue([make_group(0, lane="validation")], timeline)
    await _generate(replay, replicas)
    await _run_episodes(replay)
    await replay.read_evaluated(["e0-validation-0"])
    batch = await reserve(replay, 0)
    await replay.reject_step(0, timeline, nonce(), {batch.groups[0]: 1}, "of an old build")
    await generate(replay, replicas[0])
    await reserve(replay, 0)
    await replay.record_masked(0, timeline, 7)
    await replay.commit(1, timeline)
    await replay.drop_validation(timeline, 1, replicas)
    entries, _ = await replay.read_history(3)
    await replay.clear_history(timeline, entries[-1][0])
    await replay.make_room(1)
    await replay.append_event("looked", {"who": "here"})
    await replay.publish_metrics("train", 0, {"reward": 0.5}, timeline)
    await _look(replay)
    failures = {order: 0 for order in (await replay.read_ended()).failures}
    await replay.retry(failures)
    wanted = await replay.read_wanted()
    await replay.enqueue([make_group(order) for order in wanted], timeline, refill=True)
    await replay.close(timeline)
    await replay.disagreements(0, timeline, {replicas[0]: 1.001, replicas[1]: 2.5})
    await replay.quarantine(replicas[1], timeline, "its log-probabilities stand apart")
    await replay.deregister(replicas[1])
    again = await replay.rewind(1, nonce())
    await refit(replay, 1, replicas[:1])
    await generate(replay, replicas[0])
    await replay.restore(1, nonce(), nonce(), again.enqueued)
    state = await replay.state()
    missing = range(2, again.enqueued + 1)
    await replay.enqueue([make_group(order) for order in missing], state.timeline, refill=True)
    await replay.end_refill(state.timeline)


async def _pull(replay: ReplayClient, timeline: str) -> None:
    """A replica that pulls its weights comes, and goes."""
    replica, offer = nonce(), nonce()
    await replay.register_puller(replica, {"host": "there"})
    await replay.offer(offer, 0, timeline, {"digest": "of the list"}, [-1.0], 1e-3, 1e-3)
    await replay.offered(replica)
    await replay.parents(replica)
    await replay.unreached(replica, "refused")
    await replay.verify(replica, offer, [-1.0])
    await replay.refuse(replica, offer, "torn")
    await replay.deregister(replica)


async def _generate(replay: ReplayClient, replicas: list[str]) -> None:
    """Everything that can happen to a group on its way to `ready`."""
    validation, first, second, third, fourth, *others = await replay.lease(replicas[0], 8)
    await replay.save(second, make_trajectory(second, 0))
    await replay.heartbeat(replicas[0], [lease.token for lease in (first, second)], [1, 2])
    await replay.release(second, "drain", failed=False)
    await replay.release(third, "no memory", failed=True)
    await replay.reject(fourth, "too long")
    await replay.abandon(first, 2, "no end token")
    await push_all(replay, others[-1])  # the one that the next step needs last: what failed to be scored waits a while
    await replay.take_scoring({"math": 1})
    await replay.release_scoring()
    job, *others_taken = await replay.take_scoring({"math": 2})
    await replay.renew_scoring([job, *others_taken])
    await replay.score(job, Score("FAILED", message="the environment fell over"))
    await replay.release_scoring()
    leases = [validation, first, *others, *await replay.lease(replicas[1], 8)]
    await replay.push_many([(lease, make_trajectory(lease, index)) for lease in leases for index in lease.missing[:2]])
    await score_all(replay)


async def _run_episodes(replay: ReplayClient) -> None:
    """Everything that a runner does, for validation."""
    timeline = (await replay.state()).timeline
    await replay.enqueue([make_group(1, lane="validation", env_name="game")], timeline)
    runner, another = nonce(), nonce()
    for each in (runner, another):
        await replay.register_runner(each, {"host": "here"})
    (lease,) = await replay.lease_episodes(runner, 0, 4)
    await replay.append(lease, 0, 0, nonce(), make_call())
    await replay.append(lease, 0, 1, nonce(), make_call(0))
    await replay.runners()
    await replay.group(lease.group.id)
    lease = await replay.finish(lease, 0, None, Score("FAILED", message="the program raised")) or lease
    await replay.append(lease, 0, 0, nonce(), make_call())
    await replay.runner_heartbeat(runner, [lease.token], [1])
    await replay.finish(lease, 0, make_trajectory(lease, 0), Score("SCORED", 1.0, build="a"))
    await replay.finish(lease, 1, make_trajectory(lease, 1), Score("SCORED", 0.0, build="a"))
    await replay.deregister_runner(another)


async def _look(replay: ReplayClient) -> None:
    await replay.stats()
    await replay.read_ended()
    await replay.bias()
    await replay.epoch()
    await replay.read_held_batch(0)
    async for group, _ in replay.groups(["ready", "failed", "trained", "unused", "evaluated", "queued"]):
        await replay.group(group)
