"""Async client of the replay buffer: each method is one call of a server-side function (`services/replay/functions/`).

The buffer's state machine and its seven laws live in Redis, so whoever calls gets the same answer; this module encodes
arguments, decodes replies and turns refusals into the types of `headrace.errors`. Payloads are values of their own, written
before the function that makes them visible: a function moves ids, never megabytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgpack
from redis.asyncio import Redis

from headrace.errors import CodecError, InvalidCall, LeaseLost, ReplayError, ReplayUnavailable
from headrace.replay_records import (
    End,
    Epoch,
    Evaluated,
    GroupState,
    HeartbeatReply,
    Lease,
    Limits,
    Replica,
    ReplicaState,
    Reservation,
    ReservedTrajectory,
    RunState,
    ScoringJob,
    Waiting,
)
from headrace.replay_replies import Taken, described, epoch_of, of_lane, reservation, score_key, unpack
from headrace.replay_wire import Wakeups, Wire, open_redis, refusal
from headrace.trajectory import Group, Score, Trajectory

__all__ = [
    "End",
    "Epoch",
    "Evaluated",
    "GroupState",
    "HeartbeatReply",
    "Lease",
    "Limits",
    "ReplayClient",
    "Replica",
    "ReplicaState",
    "Reservation",
    "ReservedTrajectory",
    "RunState",
    "ScoringJob",
    "Waiting",
    "worst_case_bytes",
]

# Where the server keeps the id of the run it serves now.
CURRENT_RUN = "headrace:run"
# A payload that no call made visible is gone after this many seconds.
_STAGED = b"60"
# Entries in one call of a batched function (BATCH in _args.lua); payloads in one round trip.
_BATCH = 256
_PAYLOADS = 64
# Round trips with payloads under way at a time.
_TRANSFERS = 4
# Of a token in a payload: id, log-probability, mask, and text. Of a trajectory: field names, spans, timings, score.
_TOKEN_BYTES, _OVERHEAD_BYTES = 15, 2048
_METRICS_KEPT = 100_000

T = TypeVar("T")
R = TypeVar("R")


class ReplayClient:
    """One connection pool to the buffer of one run. Safe for concurrent use by tasks of one event loop.

    Every method raises `ReplayUnavailable` when the server can't be reached (after redis-py's own retries), `InvalidCall` on
    arguments no correct caller sends, and the `Fenced` family (law 4) where stated.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        """A client of run `run_id` on `redis`, made if need be by `open_run`; `connect` is the ordinary way to one."""
        self.run_id = run_id
        self.redis = redis
        self._wire = Wire(redis, run_id)
        self._wakeups = Wakeups(self._wire)
        self._incarnation: str | None = None
        self._transfers = asyncio.Semaphore(_TRANSFERS)
        self._epoch: Epoch | None = None  # the newest that a heartbeat brought

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
                        raise ReplayUnavailable(f"{url}: {error}") from error
                await asyncio.sleep(0.1)
        finally:
            await redis.aclose()

    @classmethod
    async def _join(cls, redis: Redis, url: str, run_id: str | None) -> ReplayClient:
        probe = Wire(redis, run_id or "none")
        version = str((await probe.command("INFO", "server"))["redis_version"])
        if int(version.split(".")[0]) < 7:
            raise InvalidCall(f"{url}: Redis {version} is too old; run Redis 7.0 or later, or Valkey")
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

    async def aclose(self) -> None:
        await self._wakeups.aclose()
        await self.redis.aclose()

    # -- the run ---------------------------------------------------------------------------------------------------------

    async def open_run(self, limits: Limits) -> RunState:
        """Make the run if it is not there, else give it these limits. Called by the replay service; makes it the current run."""
        milliseconds = {
            f"{name.removesuffix('_s')}_ms": max(1, round(getattr(limits, name) * 1000))
            for name in ("lease_s", "group_deadline_s", "scoring_deadline_s", "replica_dead_s")
        }
        if limits.staleness_policy != "ordered":
            raise InvalidCall(f"staleness policy {limits.staleness_policy!r} is not known; use ordered")
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
        )
        await self._wire.command("SET", CURRENT_RUN, self.run_id)
        await self._sweep_old_incarnations()
        return self._note(reply)

    async def state(self) -> RunState:
        return self._note(await self._wire.call("state"))

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

    # -- the trainer -----------------------------------------------------------------------------------------------------

    async def rewind(self, version: int, timeline: str) -> RunState:
        """The trainer goes on from checkpoint `version` on the new `timeline` (a nonce of the caller: a repeat is a no-op).

        Commits reserved steps < version, reopens steps >= version for `reserve` unchanged where all trajectories survive, voids
        all leases, drops the validation lane, discards every trajectory with a token newer than `version`, marks every replica STALE.
        """
        state = self._note(await self._wire.call("rewind", version, timeline))
        await self._until_done("commit", version, timeline)
        return state

    async def restore(self, version: int, timeline: str, incarnation: str, enqueued: int) -> RunState:
        """The store lost writes: install a new incarnation that knows of nothing but checkpoint `version`, and of the prompts up to
        order `enqueued` as already taken. The caller enqueues again (with `refill`) those among them that its ledger does not hold.
        """
        state = self._note(await self._wire.call("restore", version, timeline, incarnation, enqueued))
        await self._sweep_old_incarnations()
        return state

    async def enqueue(self, groups: Sequence[Group], timeline: str, refill: bool = False) -> int:
        """Append to the queue of each group's lane; returns how many were new. A group at or below `enqueued` order, or known
        by id, is not new (idempotent). `refill` takes groups at or below `enqueued` that are not known by id."""
        if self._incarnation is None:
            await self.state()
        prefix = f"{self._wire.key}:{self._incarnation}:d:"
        new = 0
        for batch in _chunks(sorted(groups, key=lambda group: group.order), _PAYLOADS):
            commands: list[tuple[Any, ...]] = []
            args: list[Any] = []
            for group in batch:
                nonce = secrets.token_hex(8)
                commands.append(("SET", prefix + nonce, group.encode(), "NX", "EX", _STAGED))
                worst = worst_case_bytes(group.n, group.prompt_token_ids.size, group.sampling.max_new_tokens)
                args += [group.id, group.lane, group.order, group.n, worst, nonce]
            commands.append(self._fcall("enqueue", timeline, self._incarnation, int(refill), *args))
            new += (await self._wire.pipeline(commands))[-1]
        return new

    async def close(self, timeline: str) -> None:
        """No more training prompts will come (idempotent); a rewind opens the queue again."""
        await self._wire.call("close", timeline)

    async def reserve(self, step: int, timeline: str) -> Reservation | Waiting | End:
        """Laws 2, 3 and 5: the batch of `step`, which must be `next_step` (repeating the last reserve gives the same batch).

        Raises `WrongStep`, `WrongTimeline`.
        """
        reply = await self._wire.call("reserve", step, timeline)
        match reply[0]:
            case b"waiting":
                return Waiting(ready=reply[1], needed=reply[2])
            case b"end":
                return End(unused=reply[1])
        return reservation(reply)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when something that `reserve` waits for may have changed, or after `timeout_s`."""
        await self._wakeups.wait("ready", timeout_s)

    async def read(self, keys: Sequence[str]) -> list[tuple[Trajectory, Score]]:
        """Payloads and scores of reserved trajectories, in the order of `keys` (`ReservedTrajectory.key`)."""

        async def read_batch(batch: Sequence[str]) -> list[tuple[Trajectory, Score]]:
            values = await self._held([*batch, *map(score_key, batch)])
            pairs = zip(values[: len(batch)], values[len(batch) :], strict=True)
            return [(Trajectory.decode(payload), Score.decode(score)) for payload, score in pairs]

        return await self._in_batches(read_batch, keys)

    async def read_groups(self, ids: Sequence[str]) -> list[Group]:
        records = []
        for batch in _chunks(ids, _PAYLOADS):
            for group_id, reply in zip(batch, await self._pipeline_calls("group", batch), strict=True):
                if reply is None:
                    raise InvalidCall(f"group {group_id!r} is not held; it was committed or never enqueued")
                records.append(reply[1])
        return [Group.decode(record) for record in await self._held(records)]

    async def commit(self, version: int, timeline: str) -> None:
        """Checkpoint `version` is published: steps < version are trained for good and their payloads freed (idempotent)."""
        await self._until_done("commit", version, timeline)

    async def evaluated(self, ids: Sequence[str]) -> tuple[list[Evaluated], dict[str, str], int]:
        """Of these validation groups: (those evaluated, reasons of those failed, number still pending)."""
        replies: list[Any] = []
        for batch in _chunks(ids, _BATCH):
            replies += await self._wire.call("evaluated", *batch)
        done: list[Evaluated] = []
        failed: dict[str, str] = {}
        for group_id, (state, reason, record, keys) in zip(ids, replies, strict=True):
            if state == b"evaluated":
                (group,) = await self._held([record])
                pairs = await self.read([key.decode() for key in keys])
                done.append(Evaluated(Group.decode(group), tuple(pairs)))
            elif state == b"failed":
                failed[group_id] = reason.decode()
        return done, failed, len(replies) - len(done) - len(failed)

    async def drop_validation(self, timeline: str) -> None:
        """Forget every group of the validation lane, leased or not, with its payloads."""
        await self._until_done("drop_validation", timeline)

    # -- rollout replicas ------------------------------------------------------------------------------------------------

    async def register(self, replica: str, info: Mapping[str, Any]) -> None:
        """Enter the fleet as STALE. `replica` is a nonce made at process start: a restarted replica is a new one."""
        await self._wire.call("register", replica, msgpack.packb(dict(info)))

    async def deregister(self, replica: str) -> None:
        """Leave the fleet; leases still held are requeued at once, without costing an attempt."""
        await self._until_done("deregister", replica)

    async def heartbeat(self, replica: str, tokens: Sequence[str]) -> HeartbeatReply:
        """Renew the replica and these leases (never past a group's absolute deadline, law 6). A DEAD or unknown replica is told so."""
        known = f"{self._epoch.id} {self._epoch.state}" if self._epoch else ""
        state, timeline, changed, lost = await self._wire.call("heartbeat", replica, known, *tokens)
        if changed:
            self._epoch = await self.epoch()
        return HeartbeatReply(state.decode(), timeline.decode(), tuple(token.decode() for token in lost), self._epoch)

    async def wait_work(self, timeout_s: float) -> None:
        """Return when a lease may be had or an epoch changed, or after `timeout_s`."""
        await self._wakeups.wait("work", timeout_s)

    async def lease(self, replica: str, max_groups: int) -> list[Lease]:
        """Up to `max_groups` groups: validation first, then training prompts as admission allows. Empty: wait.

        Raises `NotVerified` unless the replica is HEALTHY.
        """
        reply = await self._wire.call("lease", replica, max_groups, secrets.token_hex(8))
        timeline, incarnation, expires_ms, version = reply[:4]
        entries = list(zip(*[iter(reply[4:])] * 5, strict=True))
        records = await self._fetch([entry[1] for entry in entries])
        leases = []
        for (group_id, _, token, attempt, ticket), record in zip(entries, records, strict=True):
            if record is None:  # dropped since: the lease is void
                continue
            try:
                group = Group.decode(record)
            except CodecError as error:  # no replica can ever generate it
                await self._wire.call("release", timeline, incarnation, group_id, token, "rejected", str(error))
                continue
            lease = Lease(
                group=group,
                token=token.decode(),
                attempt=attempt,
                ticket=ticket,
                version=version,
                timeline=timeline.decode(),
                incarnation=incarnation.decode(),
                expires_in_s=expires_ms / 1000,
            )
            leases.append(lease)
        return leases

    async def push(self, lease: Lease, trajectory: Trajectory) -> None:
        """Hand in one finished trajectory (law 3: index not yet pushed, 0 <= index < n). Pushing the same index again under the same
        token is a no-op. Raises `LeaseLost`, `WrongTimeline`, `InvalidCall`; a refused push leaves nothing behind."""
        (error,) = await self.push_many([(lease, trajectory)])
        if error is not None:
            raise error

    async def push_many(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | None]:
        """`push` of many at once: for each None, or the error that `push` would raise."""
        for lease, trajectory in items:
            _check_push(lease, trajectory)
        return await self._in_batches(self._push_batch, items)

    async def _push_batch(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | None]:
        """One round trip: payloads staged under nonces, then a call for each timeline that makes them permanent or deletes them."""
        commands: list[tuple[Any, ...]] = []
        calls: dict[tuple[str, str], tuple[list[str], list[int]]] = {}
        for position, (lease, trajectory) in enumerate(items):
            nonce, payload = secrets.token_hex(8), trajectory.encode()
            key = f"{self._wire.key}:{lease.incarnation}:p:{nonce}"
            commands.append((b"SET", key, payload, b"NX", b"EX", _STAGED))
            lines, positions = calls.setdefault((lease.timeline, lease.incarnation), ([], []))
            lines.append(
                f"{lease.group.id} {trajectory.index} {lease.token} {nonce} {len(payload)} "
                f"{trajectory.completion_token_ids.size} {trajectory.oldest_version} {trajectory.newest_version}"
            )
            positions.append(position)
        for fence, (lines, _) in calls.items():
            commands.append(self._fcall("push", *fence, *lines))
        replies = (await self._wire.pipeline(commands))[len(items) :]
        errors: list[ReplayError | None] = [None] * len(items)
        for (_, positions), reply in zip(calls.values(), replies, strict=True):
            for position, text in zip(positions, reply, strict=True):
                errors[position] = refusal(text.decode()) if text else None
        return errors

    async def release(self, lease: Lease, reason: str, *, failed: bool) -> None:
        """Give the group back: `failed` counts an attempt (after `max_attempts` the group ends as failed with `reason`),
        otherwise (shutdown, refit) it does not."""
        await self._release(lease, "failed" if failed else "returned", reason)

    async def reject(self, lease: Lease, reason: str) -> None:
        """The group can never succeed (prompt longer than the context, …): it ends as failed with `reason`, without further attempts."""
        await self._release(lease, "rejected", reason)

    # -- scoring ---------------------------------------------------------------------------------------------------------

    async def take_scoring(self, scorer: str, max_trajectories: int) -> list[ScoringJob]:
        """Pushed trajectories waiting for a score, oldest first, until `scoring_deadline_s` from now."""
        reply = await self._wire.call("take_scoring", scorer, max_trajectories, secrets.token_hex(8))
        taken = [
            Taken(group_id.decode(), int(index), payload, record, token.decode(), attempt)
            for group_id, index, payload, record, token, attempt in zip(*[iter(reply)] * 6, strict=True)
        ]
        records = list(dict.fromkeys(entry.record for entry in taken))
        groups = {
            record: None if data is None else Group.decode(data)
            for record, data in zip(records, await self._fetch(records), strict=True)
        }
        payloads = await self._in_batches(self._fetch, [entry.payload for entry in taken])
        jobs = []
        for entry, payload in zip(taken, payloads, strict=True):
            group = groups[entry.record]
            if payload is None or group is None:  # discarded since: the token is void
                continue
            try:
                jobs.append(entry.job(group, payload))
            except CodecError as error:
                await self._score_unreadable(entry, str(error))
        return jobs

    async def _score_unreadable(self, entry: Taken, problem: str) -> None:
        """Bytes that are no trajectory of this group can't be scored by anyone: law 7, the group fails with the reason."""
        score = Score("INVALID", message=problem)
        errors = await self._score_batch([(entry.group, entry.index, entry.token, score)])
        if errors[0] is not None and not isinstance(errors[0], LeaseLost):
            raise errors[0]

    async def release_scoring(self) -> None:
        """A scorer starts: what an earlier one had taken waits again at once, without costing an attempt."""
        await self._until_done("release_scoring")

    async def wait_scoring(self, timeout_s: float) -> None:
        await self._wakeups.wait("scoring", timeout_s)

    async def score(self, job: ScoringJob, score: Score) -> None:
        """Write a score back. `SCORED` counts towards the group's completeness. Law 7: `FAILED` and `TIMED_OUT` are tried again up to
        `max_scoring_attempts` and then fail the group with the message; `INVALID` fails it at once."""
        (error,) = await self.score_many([(job, score)])
        if error is not None:
            raise error

    async def score_many(self, items: Sequence[tuple[ScoringJob, Score]]) -> list[ReplayError | None]:
        """`score` of many at once: for each None, or the error that `score` would raise."""
        errors: list[ReplayError | None] = []
        for batch in _chunks(items, _BATCH):
            errors += await self._score_batch(
                [(job.group.id, job.trajectory.index, job.token, score) for job, score in batch]
            )
        return errors

    async def _score_batch(self, items: Sequence[tuple[str, int, str, Score]]) -> list[ReplayError | None]:
        args: list[Any] = []
        for group_id, index, token, score in items:
            reward = "-" if score.reward is None else repr(float(score.reward))
            args += [f"{group_id} {index} {token} {score.status} {reward}", score.encode(), score.message]
        return [refusal(text.decode()) if text else None for text in await self._wire.call("score", *args)]

    # -- the weight channel ----------------------------------------------------------------------------------------------

    async def replicas(self) -> list[Replica]:
        return [
            Replica(
                id=replica.decode(),
                state=state.decode(),
                version=int(version),
                timeline=timeline.decode(),
                info=unpack(info),
                leases=leases,
                seen_s_ago=seen_ms / 1000,
            )
            for replica, state, version, timeline, info, leases, seen_ms in await self._wire.call("replicas")
        ]

    async def open_epoch(self, epoch: str, version: int, timeline: str, rendezvous: Mapping[str, Any]) -> Epoch:
        """Announce epoch `epoch` (a nonce) to every replica that is not DEAD; ends any epoch before it. Raises `WrongTimeline`."""
        packed = msgpack.packb(dict(rendezvous))
        return epoch_of(await self._wire.call("open_epoch", epoch, version, timeline, packed))

    async def acknowledge(self, replica: str, epoch: str) -> None:
        """The replica is able to take part. Raises `Fenced` if the epoch is no longer announced."""
        await self._wire.call("acknowledge", replica, epoch)

    async def begin_epoch(self, epoch: str, rendezvous: Mapping[str, Any]) -> Epoch:
        """announced -> transfer with the members that acknowledged; replicas left out become STALE."""
        return epoch_of(await self._wire.call("begin_epoch", epoch, msgpack.packb(dict(rendezvous))))

    async def verify(self, replica: str, epoch: str, difference: float, tolerance: float) -> bool:
        """The only way to HEALTHY: the probe's largest |log-probability difference| under the epoch's weights, in nats.
        False (and STALE, with the figure as reason) unless difference <= tolerance."""
        return bool(await self._wire.call("verify", replica, epoch, repr(float(difference)), repr(float(tolerance))))

    async def refuse(self, replica: str, epoch: str, reason: str) -> None:
        """The replica could not complete the epoch: it is STALE, for this reason."""
        await self._wire.call("refuse", replica, epoch, reason)

    async def end_epoch(self, epoch: str, *, aborted: bool) -> Epoch:
        """transfer -> done or aborted. Members that did not verify are STALE."""
        return epoch_of(await self._wire.call("end_epoch", epoch, int(aborted)))

    async def epoch(self) -> Epoch | None:
        """The newest epoch."""
        reply = await self._wire.call("epoch")
        return None if reply is None else epoch_of(reply)

    async def wait_epoch(self, timeout_s: float) -> None:
        """Return when an acknowledgement, a verification or a membership may have changed, or after `timeout_s`."""
        await self._wakeups.wait("epoch", timeout_s)

    # -- for people ------------------------------------------------------------------------------------------------------

    async def publish_metrics(
        self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]
    ) -> None:
        """Append a step's metrics to the run's metric stream, which live views follow."""
        entry = msgpack.packb({name: float(value) for name, value in metrics.items()})
        key = f"{self._wire.key}:metrics"
        await self._wire.command(
            "XADD", key, "MAXLEN", "~", _METRICS_KEPT, "*", "kind", kind, "step", step, "metrics", entry
        )

    async def metrics(self, after: str = "0", count: int = 1000) -> list[tuple[str, str, int, dict[str, float]]]:
        """Entries after id `after`: (id, kind, step, metrics)."""
        entries = await self._wire.command("XRANGE", f"{self._wire.key}:metrics", f"({after}", "+", "COUNT", count)
        return [
            (entry.decode(), fields[b"kind"].decode(), int(fields[b"step"]), unpack(fields[b"metrics"]))
            for entry, fields in entries
        ]

    async def events(self, after: str, block_s: float, count: int = 1000) -> list[tuple[str, dict[str, str]]]:
        """What happened after id `after`, waiting up to `block_s` seconds for the first: (id, fields with the `kind` of event)."""
        key = f"{self._wire.key}:events"
        milliseconds = max(1, round(block_s * 1000))
        reply = await self._wire.command("XREAD", "COUNT", count, "BLOCK", milliseconds, "STREAMS", key, after)
        return [
            (entry.decode(), {name.decode(): value.decode() for name, value in fields.items()})
            for _, entries in (reply or [])
            for entry, fields in entries
        ]

    async def newest_event(self) -> str:
        """Id of the newest event, to follow from here on."""
        newest = await self._wire.command("XREVRANGE", f"{self._wire.key}:events", "+", "-", "COUNT", 1)
        return newest[0][0].decode() if newest else "0"

    async def group(self, group_id: str) -> dict[str, Any] | None:
        """One group for people: its record, state, fields, and trajectories pushed so far; None if the buffer does not hold it."""
        reply = await self._wire.call("group", group_id)
        if reply is None:
            return None
        state, record, fields, trajectories = reply
        (data,) = await self._fetch([record])
        pairs = zip(*[iter(fields)] * 2, strict=True)
        return {
            "id": group_id,
            "state": state.decode(),
            **{name.decode(): value.decode() if isinstance(value, bytes) else value for name, value in pairs},
            "group": None if data is None else Group.decode(data),
            "trajectories": [
                described(index, key.decode(), pushed, reward)
                for index, key, pushed, reward in zip(*[iter(trajectories)] * 4, strict=True)
            ],
        }

    async def trajectory(self, group_id: str, index: int) -> tuple[Trajectory, Score | None] | None:
        """One trajectory that the buffer holds, with its score if it has one; None if it does not hold it."""
        group = await self.group(group_id)
        found = [t for t in group["trajectories"] if t["index"] == index] if group else []
        if not found:
            return None
        payload, score = await self._fetch([found[0]["key"], score_key(found[0]["key"])])
        return None if payload is None else (Trajectory.decode(payload), Score.decode(score) if score else None)

    # -- helpers ---------------------------------------------------------------------------------------------------------

    def _fcall(self, function: str, *args: Any) -> tuple[Any, ...]:
        return ("FCALL", f"hr_{function}", 1, self._wire.key, *args)

    async def _pipeline_calls(self, function: str, arguments: Iterable[Any]) -> list[Any]:
        return await self._wire.pipeline([self._fcall(function, argument) for argument in arguments])

    async def _fetch(self, keys: Sequence[Any]) -> list[bytes | None]:
        return await self._wire.command("MGET", *keys) if keys else []

    async def _held(self, keys: Sequence[Any]) -> list[bytes]:
        """Values that must be there. Raises `InvalidCall` if one was freed since its key was asked for."""
        values = await self._fetch(keys)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                raise InvalidCall(f"{key!r} is not held any more; it was committed, dropped or rewound")
        return [value for value in values if value is not None]

    async def _in_batches(self, send: Callable[[Sequence[T]], Awaitable[list[R]]], items: Sequence[T]) -> list[R]:
        """`send` for each batch of payloads, a few at a time, so that the server works on one while the next is encoded."""

        async def one(batch: Sequence[T]) -> list[R]:
            async with self._transfers:
                return await send(batch)

        results = await asyncio.gather(*(one(batch) for batch in _chunks(items, _PAYLOADS)))
        return [result for batch in results for result in batch]

    async def _until_done(self, function: str, *args: Any) -> None:
        """A function that does a bounded part of its work in a call and returns how much is left."""
        while await self._wire.call(function, *args):
            pass

    async def _release(self, lease: Lease, how: str, reason: str) -> None:
        await self._wire.call("release", lease.timeline, lease.incarnation, lease.group.id, lease.token, how, reason)

    def _note(self, reply: bytes) -> RunState:
        state = unpack(reply)
        self._incarnation = state["incarnation"]
        return RunState(run_id=self.run_id, **{**state, "counts": of_lane(state["counts"] or {}, "train")})

    async def _sweep_old_incarnations(self) -> None:
        """Delete what a restore has put out of reach."""
        for old in await self._wire.command("SMEMBERS", f"{self._wire.key}:old"):
            pattern = f"{self._wire.key}:{old.decode()}:*"
            async for keys in self._scan(pattern):
                await self._wire.command("UNLINK", *keys)
            await self._wire.command("SREM", f"{self._wire.key}:old", old)

    async def _scan(self, pattern: str) -> AsyncIterator[list[bytes]]:
        cursor = 0
        while True:
            cursor, keys = await self._wire.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            if keys:
                yield keys
            if not int(cursor):
                return


def _check_push(lease: Lease, trajectory: Trajectory) -> None:
    trajectory.check()
    if (trajectory.group_id, trajectory.attempt) != (lease.group.id, lease.attempt):
        raise InvalidCall(
            f"trajectory of group {trajectory.group_id!r} attempt {trajectory.attempt} pushed under the lease of "
            f"{lease.group.id!r} attempt {lease.attempt}"
        )


def worst_case_bytes(n: int, prompt_tokens: int, max_new_tokens: int) -> int:
    """What a group of `n` trajectories may take in the buffer: what a lease reserves of `Limits.max_bytes`."""
    return n * (max_new_tokens * _TOKEN_BYTES + prompt_tokens * 4 + _OVERHEAD_BYTES)


def _chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
