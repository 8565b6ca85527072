"""What can be seen of a run from outside: the buffer's keys by plain Redis commands, and the checkpoints' folder.

Nothing here calls a function of the buffer or imports its client: a call would let it expire what is due, and the auditor's
evidence must not come from what it judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from tests.chaos.plan import Phase

# User and password, or nothing.
Login = tuple[str, str] | tuple[()]


@dataclasses.dataclass(frozen=True)
class Glance:
    """The buffer at one moment. `leases`: groups that a replica generates; `scoring`: trajectories that a scorer has.
    `trained`: the highest step whose metrics were published, -1 before any. `closed`: no more prompts will come. `refill`: prompts are
    still to be queued again. `validating`: groups of a validation that have no end yet. `untrained`: prompts of training that ended as
    failed or filtered."""

    timeline: str
    incarnation: str
    next_step: int
    committed: int
    leases: int
    scoring: int
    epoch: str
    trained: int
    closed: bool
    refill: bool
    validating: int
    untrained: int

    def shows(self, phase: Phase) -> bool:
        """Whether the run is in `phase` (a checkpoint is seen on the disk, not here)."""
        match phase:
            case "generation":
                return self.leases > 0
            case "scoring":
                return self.scoring > 0
            case "reserve":
                return self.next_step > max(self.trained + 1, self.committed, 0)
            case "refit":
                return self.epoch in ("announced", "transfer")
            case "validation":
                return self.validating > 0
            case "committed":
                return self.committed > 0
            case "refilled":
                return not self.refill
            case "closed":
                return self.closed
        return False


def writing_checkpoint(folder: Path) -> bool:
    return any(path.name.startswith(".unfinished-step_") for path in _entries(folder))


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


@dataclasses.dataclass(frozen=True)
class Member:
    """A replica as the buffer knows it; its state is one of that timeline. `holds`: so many groups. Or a runner, without one."""

    id: str
    state: str
    timeline: str
    holds: int


class _Asked(CredentialProvider):
    """Asks for the login at each connection: a run makes its own when it starts."""

    def __init__(self, login: Callable[[], Login]) -> None:
        self._login = login

    def get_credentials(self) -> Login:
        return self._login()

    async def get_credentials_async(self) -> Login:
        return self._login()


class Buffer:
    """The keys of one run. Every method raises `RedisError` while the server is away."""

    def __init__(self, host: str, port: int, run_id: str, login: Callable[[], Login], *, played: bool) -> None:
        """`login`: of who may do everything, if the server asks for one. `played`: programs say their rewards themselves."""
        self.key = f"hr:{{{run_id}}}"
        self._redis: Any = Redis(
            host=host, port=port, socket_timeout=1.0, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0),
            credential_provider=_Asked(login),
        )  # fmt: skip
        self._played = played
        self._observed: set[tuple[str, str, int]] = set()

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def glance(self) -> Glance | None:
        """None before the run is there."""
        fields = await self._redis.hmget(
            self.key, "timeline", "incarnation", "next_step", "committed", "closed", "refill"
        )
        if fields[0] is None:
            return None
        timeline, incarnation = fields[0].decode(), fields[1].decode()
        base = f"{self.key}:{incarnation}:"
        pipe = self._redis.pipeline(transaction=False)
        pipe.zcard(base + "leases").zcard(base + "orphans").zcard(base + "taken:paced").hget(base + "epoch", "state")
        pipe.hmget(base + "counts", "validation:queued", "validation:open", "validation:scoring")
        pipe.bitcount(base + "ended").xrevrange(f"{self.key}:metrics", count=8)
        open_, orphans, scoring, epoch, validating, untrained, metrics = await pipe.execute()
        if self._played:  # then a group is being scored that has some of its rewards
            leased = await self._redis.zrange(base + "leases", 0, -1)
            scored = [await self._redis.hget(base.encode() + b"g:" + id_, "scored") for id_ in leased]
            scoring = sum(int(count or 0) > 0 for count in scored)
        trained = [int(entry[b"step"]) for _, entry in metrics if entry[b"kind"] == b"train"]
        return Glance(
            timeline,
            incarnation,
            int(fields[2]),
            int(fields[3]),
            open_ - orphans,
            scoring,
            (epoch or b"").decode(),
            trained[0] if trained else -1,
            fields[4] == b"1",
            fields[5] == b"1",
            sum(int(count or 0) for count in validating),
            untrained,
        )

    async def clock(self) -> float:
        """What time it is for the server."""
        seconds, microseconds = await self._redis.time()
        return float(seconds + microseconds / 1e6)

    async def held_by_pid(self) -> dict[int, tuple[str, ...]]:
        """Ids of the groups that each replica or runner holds, by its process id; those of processes that are gone are among them."""
        incarnation = await self._redis.hget(self.key, "incarnation")
        held: dict[int, tuple[str, ...]] = {}
        if incarnation is None:
            return held
        base = f"{self.key}:{incarnation.decode()}:"
        for replica in await self._members(base):
            groups = await self._redis.smembers(base.encode() + b"h:" + replica)
            info = await self._redis.hget(base.encode() + b"r:" + replica, "info") if groups else None
            if info:
                held[int(msgpack.unpackb(info)["pid"])] = tuple(sorted(group.decode() for group in groups))
        return held

    async def _members(self, base: str) -> list[bytes]:
        return [name for kind in ("replicas", "runners") for name in await self._redis.zrange(base + kind, 0, -1)]

    async def fleet(self) -> dict[int, Member]:
        """The replicas and runners, by process id. One that was dead and has entered again is known under its new name."""
        incarnation = await self._redis.hget(self.key, "incarnation")
        base = f"{self.key}:{incarnation.decode()}:" if incarnation else ""
        members = {}
        for replica in await self._members(base):
            key = base.encode() + b"r:" + replica
            state, info, timeline = await self._redis.hmget(key, "state", "info", "timeline")
            if info is not None:
                holds = await self._redis.scard(base.encode() + b"h:" + replica)
                member = Member(replica.decode(), state.decode(), (timeline or b"").decode(), holds)
                pid = int(msgpack.unpackb(info)["pid"])
                if pid not in members or member.state != "DEAD":
                    members[pid] = member
        return members

    async def observe(self, glance: Glance, journal: Path) -> None:
        """Append the batches that are reserved now and were not seen before: groups, and what their trajectories say."""
        base = f"{self.key}:{glance.incarnation}:"
        new = [
            step
            for step in range(max(glance.committed, 0), glance.next_step)
            if (glance.timeline, glance.incarnation, step) not in self._observed
        ]
        for step in new:
            ids = await self._redis.hget(base + "steps", step)
            if ids is None:
                continue
            groups = [await self._group(base, id_) for id_ in ids.decode().split("\n")]
            # a commit that came in between has taken some of it away: half a batch is no evidence
            if all(groups) and await self._redis.hget(base + "steps", step) == ids:
                line = {"timeline": glance.timeline, "incarnation": glance.incarnation, "step": step, "groups": groups}
                with journal.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                self._observed.add((glance.timeline, glance.incarnation, step))

    async def _group(self, base: str, group_id: str) -> dict[str, Any] | None:
        fields = {k.decode(): v.decode() for k, v in (await self._redis.hgetall(f"{base}g:{group_id}")).items()}
        if not fields:
            return None
        trajectories = []
        for field, value in fields.items():
            if re.fullmatch(r"p\d+", field):
                nonce = value.split(" ")[0]
                payload, score = await self._redis.mget(f"{base}p:{nonce}", f"{base}s:{nonce}")
                if payload is None or score is None:
                    return None
                failed = int(
                    fields.get("a" + field[1:], "0 0").split(" ")[1]
                )  # of an episode, when it was begun before
                tries = int(fields["w" + field[1:]].split(" ")[0]) + failed
                trajectories.append(_trajectory(msgpack.unpackb(payload), msgpack.unpackb(score), tries))
        charged = int(fields["failures"])
        return {"id": group_id, "order": int(fields["order"]), "charged": charged, "trajectories": trajectories}

    async def dump(self) -> dict[str, Any]:
        """Every key of the run as it is: by name, its type and its raw value."""
        dumped: dict[str, Any] = {}
        async for key in self._redis.scan_iter(match=f"{self.key}*", count=1000):
            kind = (await self._redis.type(key)).decode()
            match kind:
                case "string":
                    value: Any = await self._redis.get(key)
                case "hash":
                    value = await self._redis.hgetall(key)
                case "zset":
                    value = dict(await self._redis.zrange(key, 0, -1, withscores=True))
                case "set":
                    value = list(await self._redis.smembers(key))
                case "list":
                    value = await self._redis.lrange(key, 0, -1)
                case _:
                    continue
            dumped[key.decode()] = value
        return dumped


def _trajectory(payload: dict[str, Any], score: dict[str, Any], tries: int) -> dict[str, Any]:
    seen = {
        "group": payload["group_id"],
        "index": payload["index"],
        "status": score["status"],
        "reward": score["reward"],
        "tries": tries,
    }
    if payload["schema"] == 1:
        spans = [list(span) for span in payload["spans"]]
        return {**seen, "replica": payload["replica"], "spans": spans, "text": payload["text"]}
    calls = [_call(call) for call in payload["calls"]]
    return {**seen, "replica": calls[0]["replica"], "calls": calls, "text": payload["calls"][-1]["answer"]["content"]}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """One of an episode's."""
    return {
        "parent": call["parent"],
        "context": struct.unpack(f"<{len(call['context_token_ids']) // 4}i", call["context_token_ids"]),
        "completion": struct.unpack(f"<{len(call['completion_token_ids']) // 4}i", call["completion_token_ids"]),
        "spans": call["spans"],
        "trained": call["trained"],
        "replica": call["replica"],
        "asked": [message["content"] for message in call["messages"] if message["role"] == "user"],
    }


Away = (RedisError, OSError)
