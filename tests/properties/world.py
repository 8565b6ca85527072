"""The real buffer and the model side by side: each call goes to both, and what they answer and hold is compared."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.base.errors import HeadraceError
from headrace.records.group_event import GroupEvent
from headrace.replay import Ended, EnvironmentState, Epoch, Lease, Limits, ReplayClient, Reservation, RunState
from headrace.replay.bias import MOMENTS, QUANTITIES, Moment, TrajectoryMeter
from headrace.replay.connection import BufferConnection, open_redis
from headrace.replay.history import expand_entry
from headrace.run.group_record import ENDS, GroupRecord, apply_to_run
from tests.properties import wakes
from tests.properties.clock import CLOCK, MEMORY, START_MS
from tests.properties.learning import Model, orders, seen_batch, shape
from tests.properties.records import Held
from tests.support.wake_ups import WakeUps

# Client's method -> the model's, where they differ.
NAMES = {"refuse": "refuse_epoch", "read_ended": "groups_ended"}

# Calls that have a number, and what reads their answers where callers live on them: the server knows the second delivery, and answers it
# again at most.
HEARD = {"lease": "_read_leases", "lease_episodes": "_read_leases", "take_scoring": "_read_jobs"}
NUMBERED = {
    *(
        *HEARD,
        "heartbeat",
        "runner_heartbeat",
        "renew_scoring",
        "release_scoring",
        "reserve",
        "quarantine",
        "drop_validation",
    )
}
# Calls that change nothing when they come again, and say nothing that their caller has to hear.
IDEMPOTENT = {
    *("enqueue", "close", "commit", "rewind", "restore", "end_refill"),
    *(
        "open_epoch",
        "acknowledge",
        "begin_epoch",
        "verify",
        "refuse",
        "end_epoch",
        "offer",
        "register",
        "register_puller",
        "deregister",
    ),
    *("make_room", "push_many", "save_many", "release", "reject", "abandon", "reject_step"),
    *("score_many", "retry", "register_runner", "deregister_runner", "append", "finish"),
}


# To look closely at a call takes about as long as the call.
LOOK_EVERY = 3
# The longest that nobody calls while time passes.
PACE_MS = 4_000


class Echo(BufferConnection):
    """A wire on which, while `on`, the server gets every call twice, as after a reply that was lost; the second is answered."""

    on = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[list[tuple[Any, ...]]] = []
        self.unheard: Any = None  # what the first of two deliveries answered

    async def command(self, *command: Any) -> Any:
        self.sent.append([command])
        if self.on and command[0] == "FCALL":
            with contextlib.suppress(HeadraceError):
                self.unheard = await super().command(*command)
        return await super().command(*command)

    async def pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        self.sent.append(commands)
        if self.on:
            with contextlib.suppress(HeadraceError):
                await super().pipeline(commands)
        return await super().pipeline(commands)


@dataclasses.dataclass(frozen=True)
class Delivered:
    """A call that was made: its commands, and when."""

    name: str
    args: tuple[Any, ...]
    sent: list[list[tuple[Any, ...]]]
    number: int
    incarnation: str


class World:
    """One run on a real server."""

    def __init__(self, url: str, run_id: str) -> None:
        self.client = ReplayClient(open_redis(url), run_id)
        self.wire = self.client._connection = Echo(self.client.redis, run_id)
        self.ledger: dict[int, tuple[str, ...]] = {}  # step -> groups, in the history of the surviving weights
        self.calls = 0
        self.delivered: list[Delivered] = []
        self.told: dict[str, GroupRecord] = {}  # what the history says of each group
        self.told_until = "-"
        self.woken = WakeUps(self.client)
        self.just_woken: set[str] = set()  # by the last call
        self.look_every, self.looks = LOOK_EVERY, 0

    async def open(self, limits: Limits) -> None:
        await self.client.redis.set(CLOCK, START_MS)
        await self.client.redis.delete(MEMORY)
        await self.woken.open()
        state = await self.client.open_run(limits)
        self.model = Model(limits, START_MS, state.timeline, state.incarnation)
        await self.compare([])

    async def refit(self, version: int = 0) -> None:
        """The replica `replica` verifies the version."""
        epoch = f"epoch-{version}"
        await self.call("open_epoch", epoch, version, self.model.timeline, {})
        await self.call("acknowledge", "replica", epoch)
        await self.call("begin_epoch", epoch, {}, [0.0], 1e-3)
        await self.call("verify", "replica", epoch, [0.0])

    async def pass_time(self, milliseconds: int) -> None:
        """The replay service calls every second, and so at least as often as here."""
        while (step := min(milliseconds, PACE_MS)) > 0:
            milliseconds -= step
            await self.jump(step)
            if milliseconds:
                await self.call("make_room")

    async def jump(self, milliseconds: int) -> None:
        """The server's clock is another, and nobody has called meanwhile."""
        self.model.clock += milliseconds
        await self.client.redis.set(CLOCK, self.model.clock)

    async def has_room(self, room: int | None) -> None:
        """The server may take `room` bytes more; None: as many as there are."""
        self.model.left = math.inf if room is None else room
        await (self.client.redis.delete(MEMORY) if room is None else self.client.redis.set(MEMORY, room))

    async def limit(self, limits: Limits) -> None:
        """The replay service starts again with other limits."""
        look = await self._look("open_run", ())
        await self.client.open_run(limits)
        self.model.limits = limits
        self.model.expire()
        await self._compare_wakes(look, "open_run")

    async def call(self, name: str, *args: Any, echo: bool = False) -> Any:
        """The answer, or the refusal, on which both agree. `echo`: the server gets the call twice."""
        before = {held.id: _seen_of(held) for held in self.model.groups.values()}
        look = await self._look(name, args)
        now, unlawful = (self.model.timeline, self.model.next_step), self.model.unlawful()
        self.wire.on, self.wire.sent, self.wire.unheard = echo, [], None
        seen = await _outcome(getattr(self.client, name), name, args)
        self.wire.on, sent = False, self.wire.sent
        self.wire.sent = []  # what follows is only to compare
        if name == "rewind" and len(sent) == 1:  # it was refused; where it is not, the client goes on so
            sent = [*sent, [self.client._connection.fcall("commit", version=args[0], timeline=args[1], trained="")]]
        self.model.call_number += 1
        delivered = Delivered(name, args, sent, self.model.call_number, self.model.incarnation)
        if name in IDEMPOTENT or name in NUMBERED:
            self.delivered = [*self.delivered[-40:], delivered]
        if name == "reserve":
            args = (*args, {group for group in unlawful if await self._state(group) == "queued"})
        if echo:
            first = seen
            if name in HEARD:
                first = await self._heard(name, self.wire.unheard)
            self._expected(name, args, first)
        expected = self._expected_again(delivered, seen) if echo else self._expected(name, args, seen)
        assert _same(_plain(seen), expected), f"{name}{args}: {_plain(seen)!r}, and by the contract {expected!r}"
        self.calls += 1 + echo
        await self._history(seen, now)
        after = {held.id: _seen_of(held) for held in self.model.groups.values()}
        await self.compare([group for group in before | after if before.get(group) != after.get(group)])
        await self._compare_wakes(look, f"{name}{args}")
        return seen

    async def _look(self, name: str, args: tuple[Any, ...]) -> wakes.Look:
        """Before a call: closely before one of `look_every`."""
        self.looks += 1
        closely = self.looks % self.look_every == 0
        short = closely and await self.client.redis.hget(f"hr:{{{self.client.run_id}}}", "short") == b"1"
        return wakes.Look(self.model, name, args, closely=closely, short=short)

    async def _compare_wakes(self, look: wakes.Look, call: str) -> None:
        self.just_woken = await self.woken.take()
        missed = look.missed(self.model, self.just_woken)
        assert not missed, f"{'; '.join(missed)}; and {sorted(self.just_woken)} alone were woken by {call}"

    async def deliver_again(self, which: int) -> Any:
        """The very commands of an earlier call arrive once more, however late. Nobody waits for the answer; it is returned where
        callers live on it."""
        delivered = self.delivered[-1 - which % len(self.delivered)]
        name, args, sent = delivered.name, delivered.args, delivered.sent
        before = {held.id: _seen_of(held) for held in self.model.groups.values()}
        look = await self._look(name, args)
        now = self.model.timeline, self.model.next_step
        replies: list[Any] = [None]
        heard = name in HEARD
        for commands in sent[:1] if heard else sent:
            with contextlib.suppress(HeadraceError):
                replies = await BufferConnection.pipeline(self.wire, commands)
        seen = await self._heard(name, replies[0]) if heard else None
        refused = isinstance(self._expected_again(delivered, seen), HeadraceError)
        if name == "rewind" and refused:  # its second half comes by itself
            self._expected("commit", args, None)
        self.calls += 1
        await self._history(None, now)
        after = {held.id: _seen_of(held) for held in self.model.groups.values()}
        await self.compare([group for group in before | after if before.get(group) != after.get(group)])
        await self._compare_wakes(look, f"{name}{args} once more")
        return seen

    async def _heard(self, name: str, reply: Any) -> Any:
        """What a caller would make of the reply; None was refused."""
        seen = None if reply is None else await getattr(self.client, HEARD[name])(reply)
        self.wire.sent = []
        return seen

    def _expected_again(self, delivered: Delivered, seen: Any) -> Any:
        """Of the second delivery of a call, at once or late."""
        if delivered.name in NUMBERED:
            return self._expected(f"{delivered.name}_again", (delivered.number, *delivered.args), seen)
        if delivered.name in ("register", "register_puller", "register_runner"):
            return self._expected(delivered.name, delivered.args, seen, incarnation=delivered.incarnation)
        return self._expected(delivered.name, delivered.args, seen)

    def _expected(self, name: str, args: tuple[Any, ...], seen: Any, **context: Any) -> Any:
        try:
            return getattr(self.model, NAMES.get(name, name))(*args, seen=seen, **context)
        except HeadraceError as error:
            return error
        except (AttributeError, TypeError):
            if isinstance(seen, HeadraceError):
                raise AssertionError(f"{name}{args} is refused with {seen!r}, against the contract") from None
            raise

    async def _history(self, seen: Any, before: tuple[str, int]) -> None:
        """What holds for batches and histories whatever the state (laws 1, 2, 3 and 7). `before` the call: timeline and next step."""
        if before[0] != self.model.timeline or self.model.next_step < before[1]:
            self.ledger = {step: ids for step, ids in self.ledger.items() if step < self.model.next_step}
        if not isinstance(seen, Reservation):
            return
        self.ledger[seen.step] = seen.groups
        trained = [group for ids in self.ledger.values() for group in ids]
        assert len(trained) == len(set(trained)), "a group is trained twice in the history of the surviving weights"
        limits = self.model.limits
        assert len(seen.groups) == limits.prompts_per_step
        for group in seen.groups:
            indices = [t.index for t in seen.trajectories if t.group_id == group]
            assert len(indices) == len(set(indices)) == self.model.groups[group].group.n
        for t in seen.trajectories:
            assert t.newest_version <= seen.step
            assert limits.staleness_policy == "mask" or t.oldest_version >= seen.step - limits.max_age
        payloads = await self.client.read([t.key for t in seen.trajectories])
        for t, (trajectory, score) in zip(seen.trajectories, payloads, strict=True):
            piece = self.model.groups[t.group_id].pieces[t.index]
            assert trajectory.encode() == piece.trajectory.encode()
            assert (score.status, score.reward, score.reward) == ("SCORED", piece.reward, t.reward)
            assert score.build in ("", self.model.groups[t.group_id].build[1]), "a group is scored by one build"

    # -- what the server holds

    async def _state(self, group: str) -> str | None:
        held = await self.client.group(group)
        return held["state"] if held else None

    async def compare(self, groups: list[str]) -> None:
        """The run as a whole, and these groups."""
        model, client = self.model, self.client
        # at once: what it costs is to wait for the server
        stats, replicas, runners, environments, meters, *held = await asyncio.gather(
            *(client.stats(), client.replicas(), client.runners(), client.environments(), client.bias()),
            *map(client.group, groups),
        )
        counts = stats["counts"]
        assert _plain(msgspec.convert(stats | {"counts": counts["train"]}, RunState)) == model.state()
        assert {lane: _nonzero(counts[lane]) for lane in counts} == {lane: model.count(lane) for lane in counts}
        assert stats["refusals"] == dict(model.refusals)
        assert stats["requeues"] == dict(model.requeues)
        assert (stats["bytes"], stats["full"]) == (model.bytes, model.full)
        assert stats["suspects"] == sum(held.cohort is not None for held in model.groups.values())
        assert stats["leases"] == sum(held.state == "open" and held.token is not None for held in model.groups.values())
        assert stats["line"] == len(model.line())
        pieces = [piece for held in model.groups.values() for piece in held.pieces.values()]
        waiting = sum(piece.waits for piece in pieces), sum(piece.taken for piece in pieces)
        assert (stats["scoring"]["waiting"], stats["scoring"]["taken"]) == waiting
        for seen_environment in environments:
            self._compare_environment(seen_environment)
        assert [environment.name for environment in environments] == sorted(model.environments)
        seen = {r.id: (r.state, r.version, r.leases, r.validates) for r in replicas}
        assert seen == {replica: self._replica(replica) for replica in model.members}
        alive = {f"runner {r.id}": (r.alive, r.leases) for r in runners}
        assert alive == {name: (model.is_alive(name), len(model.held_by(name))) for name in model.runners}
        self._compare_meters(meters)
        await self._compare_told()
        for group, found in zip(groups, held, strict=True):
            self._compare_group(group, found)

    async def _compare_told(self) -> None:
        """The history agrees with the state of every group, and every group that was enqueued has one end at most (law 1). What a call
        changed is told in it, so a call that changes nothing tells nothing."""
        entries = await self.client.redis.xrange(f"hr:{{{self.client.run_id}}}:history", self.told_until, "+")
        for entry, fields in entries:
            self.told_until = f"({entry.decode()}"
            for row in expand_entry(entry.decode(), fields):
                self._hear(row)
        model = self.model
        for held in model.groups.values():
            told = self.told[held.id]
            assert (told.state, told.attempts) == (held.state, held.attempt), held.id
            if (
                held.state in ("scoring", "ready", "reserved") and not held.evicted
            ):  # the history keeps what the buffer frees
                pieces = {index: (*shape(piece.trajectory), piece.reward) for index, piece in held.pieces.items()}
                assert told.trajectories == pieces, held.id
            if held.state in ("reserved", "trained"):
                assert told.step == held.step, held.id
        if not model.refill:  # until it is complete, what a restore forgot may seem to have ended
            told_counts = collections.Counter(r.state for r in self.told.values() if r.lane == "train")
            for state in ENDS:
                assert told_counts[state] == model.count("train").get(state, 0), state

    def _hear(self, row: GroupEvent) -> None:
        if row.group is None:
            apply_to_run(self.told.values(), row)
            return
        record = self.told.setdefault(row.group, GroupRecord(row.group))
        if row.what in ENDS:
            assert record.state not in ENDS, f"{row.group} is {row.what}, and was {record.state} before"
        else:
            ended = record.state in ("filtered", "failed") and record.lane == "train"
            assert row.what in ("enqueued", "retried") or not ended, f"{row.group} is {row.what} after its end"
        record.apply(row)

    def _compare_meters(self, seen: Mapping[Moment, TrajectoryMeter]) -> None:
        for moment in MOMENTS:
            assert seen[moment].trajectories == self.model.meters.trajectories[moment], moment
            for quantity in QUANTITIES:
                metered, values = getattr(seen[moment], quantity), self.model.meters.values[moment, quantity]
                assert metered.count == len(values) == sum(count for _, count in metered.buckets), (moment, quantity)
                for one, other in (
                    (metered.sum, sum(values)),
                    (metered.squares, sum(value * value for value in values)),
                ):
                    assert math.isclose(one, other, abs_tol=1e-9), (moment, quantity)

    def _compare_environment(self, seen: EnvironmentState) -> None:
        held, model = self.model.environment(seen.name), self.model
        waiting = model.waiting(seen.name).values()
        counts = (len(waiting), sum(piece.alone for piece in waiting), len(model.taken(seen.name)), len(held.failing))
        assert (seen.waiting, seen.alone, seen.taken, seen.failing) == counts, (seen, counts)
        assert (seen.broken, seen.kind, seen.probes) == (held.broken is not None, held.kind, held.probes), seen
        if held.broken is not None:
            assert seen.broken_s == (model.present - held.broken) / 1000
            assert seen.probe_in_s == max(0, held.probe_at - model.present) / 1000

    def _replica(self, replica: str) -> tuple[str, int, int, bool]:
        model = self.model
        leases = sum(held.state == "open" and held.replica == replica for held in model.groups.values())
        version = model.members[replica].version if model.healthy(replica) else -1
        return (model.state_of(replica), version, leases, model.takes_part(replica) and model.validates(replica))

    def _compare_group(self, group: str, seen: Any) -> None:
        held = self.model.groups.get(group)
        if held is None or seen is None:
            assert held is None, f"{group} is {held and held.state}, and the buffer does not hold it"
            assert seen is None, f"{group} is gone, and the buffer holds it as {seen and seen['state']}"
            return
        assert seen["group"].encode() == held.group.encode()
        assert (seen["state"], seen["attempt"], seen["failures"]) == (held.state, held.attempt, held.failures), group
        pieces = [
            (t["index"], t["reward"], t["length"], t["oldest_version"], t["newest_version"])
            for t in seen["trajectories"]
        ]
        assert pieces == [(i, p.reward, *shape(p.trajectory)) for i, p in sorted(held.pieces.items())], group
        leased = held.state == "open" and held.token is not None
        assert seen.get("silent_s") == ((self.model.present - held.moved) / 1000 if leased else None), group
        begun = [(each["index"], each["calls"]) for each in seen["begun"]]
        assert begun == [(index, len(calls)) for index, calls in sorted(held.calls.items())], group
        if held.state in ("reserved", "trained"):
            assert seen["step"] == held.step

    async def compare_all(self) -> None:
        """Everything, down to the payloads: none is missing, and none is left behind."""
        await self.compare(list(self.model.groups))
        groups = self.model.groups.values()
        pieces = [piece for held in groups for piece in held.pieces.values()]
        saved = sum(len(held.saved) + len(held.calls) for held in groups)
        kept = {"p": len(pieces) + saved, "s": sum(piece.reward is not None for piece in pieces), "d": len(groups)}
        found = dict.fromkeys(kept, 0)
        async for key in self.client.redis.scan_iter(match=f"hr:{{{self.client.run_id}}}:*", count=1000):
            kind = key.decode().split(":")[3:4]
            # what is only staged goes by itself
            if kind and kind[0] in found and await self.client.redis.ttl(key) == -1:
                found[kind[0]] += 1
        assert found == kept, "payloads (p), scores (s) and records (d) left behind or lost"


def _seen_of(held: Held) -> tuple[object, ...]:
    pieces = tuple((index, piece.reward) for index, piece in sorted(held.pieces.items()))
    calls = tuple((index, len(calls)) for index, calls in sorted(held.calls.items()))
    return (held.state, held.token, held.moved, held.attempt, held.failures, held.step, pieces, calls)


async def _outcome(method: Any, name: str, args: tuple[Any, ...]) -> Any:
    options: dict[str, Any] = {}
    if name == "release":
        *args, options["failed"] = args  # type: ignore[assignment]
    if name in ("deregister", "deregister_runner"):
        *args, options["died"] = args  # type: ignore[assignment]
    if name == "end_epoch":
        *args, options["aborted"] = args  # type: ignore[assignment]
    try:
        return await method(*args, **options)
    except HeadraceError as error:
        return error


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {state: number for state, number in counts.items() if number}


def _plain(seen: Any) -> Any:
    """An answer in the model's form."""
    match seen:
        case Epoch():
            members = (seen.members, seen.acknowledged, seen.verified, seen.refused)
            return (seen.id, seen.version, seen.timeline, seen.state, *map(set, members))
        case Lease():  # of `finish`
            return seen.tries
        case RunState():
            return msgspec.structs.replace(seen, run_id="", counts=_nonzero(seen.counts))
        case Reservation():
            return seen_batch(seen)
        case Ended():
            return (seen.failed, seen.filtered, orders(seen.bitmap), orders(seen.failures), seen.retries)
        case ([*done], dict(failed), list(unknown)):
            described = [
                (e.group.id, [(e.group.id, t.index, score.reward, *shape(t)) for t, score in e.trajectories])
                for e in done
            ]
            return (described, set(failed), unknown)
    return seen


def _same(seen: Any, expected: Any) -> bool:
    if isinstance(seen, HeadraceError) or isinstance(expected, HeadraceError):
        return type(seen) is type(expected)
    if isinstance(seen, list) and isinstance(expected, list):
        return len(seen) == len(expected) and all(_same(a, b) for a, b in zip(seen, expected, strict=True))
    return bool(seen == expected)
