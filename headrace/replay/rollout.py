"""A rollout replica's calls: membership of the fleet and of epochs, leases, trajectories."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from redis.asyncio import Redis

from headrace.base.errors import CodecError, InvalidCall, ReplayError, Unstaged
from headrace.base.tasks import cancel
from headrace.records.trajectory import Trajectory
from headrace.replay.base_client import of_bounded_size, transfer_all
from headrace.replay.connection import refusal
from headrace.replay.leases import CARRIED_BYTES, LeaseClient, encode_payload, fence, renewed
from headrace.replay.records import Epoch, HeartbeatReply, Lease, RefitVerdict, decode_info, unpack

# The columns of `push` and `save`, one entry per trajectory (_payload.lua).
_COLUMNS = ("group", "index", "token", "nonce", "bytes", "length", "oldest", "newest")


class RolloutClient(LeaseClient):
    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id)
        self._to_push: list[tuple[Lease, Trajectory, asyncio.Future[None]]] = []
        self._pushing: asyncio.Task[None] | None = None

    async def aclose(self) -> None:
        if self._pushing is not None:
            await cancel([self._pushing])
        await super().aclose()

    async def register(self, replica: str, info: Mapping[str, Any], loading: bool = False) -> None:
        """Register a replica as STALE, or as LOADING. `replica` is a nonce: one that has left or died can't register again. `info` is for
        people: each value is a text, a finite number or a flag. Raises `Fenced`, `InvalidCall`."""
        await self._enter("register", replica=replica, info=info, loading=loading)

    async def register_puller(self, replica: str, info: Mapping[str, Any]) -> None:
        """Register a replica that pulls its weights (`offered`) as STALE. It is in no epoch."""
        await self._enter("register_puller", replica=replica, info=info)

    async def deregister(self, replica: str, *, died: bool = False) -> None:
        """Leave the fleet. Leases that the replica still holds are passed on at once, without costing an attempt. `died`: an error ends the
        replica, and any group that it holds may be the cause, so these are leased apart from others, as after a lost heartbeat."""
        await self._until_done("deregister", replica=replica, died=died)

    async def heartbeat(self, replica: str, tokens: Sequence[str], progress: Sequence[int] = ()) -> HeartbeatReply:
        """Renew the replica and these leases (never past a group's deadline, law 6). `progress`: for each lease a count that has risen if
        the replica has progressed since the last heartbeat; none are given if it has not. The reply tells a replica whether it is DEAD or
        unknown."""
        known = f"{self._epoch.id} {self._epoch.state}" if self._epoch else ""
        reply = await self._connection.call(
            "heartbeat", replica=replica, number=next(self._numbers), epoch=known, **renewed(tokens, progress)
        )
        fields = unpack(reply)
        if fields.pop("epoch_changed"):
            self._epoch = await self.epoch()
        return msgspec.convert({**fields, "epoch": self._epoch}, HeartbeatReply)

    async def lease(self, replica: str, max_groups: int) -> list[Lease]:
        """Lease up to `max_groups` groups: first those that another replica has begun, then validation, then training prompts as admission
        allows. If the result is empty, wait.

        Raises `NotVerified` unless the replica is HEALTHY.
        """
        nonce = secrets.token_hex(8)
        return await self._read_leases(
            await self._connection.call(
                "lease", replica=replica, most=max_groups, number=next(self._numbers), nonce=nonce
            )
        )

    async def push(self, lease: Lease, trajectory: Trajectory) -> None:
        """Hand in one finished trajectory (law 3: index not yet pushed, 0 <= index < `lease.count`). Pushing the same index again under the
        same token is a no-op. Raises `LeaseLost`, `Surplus`, `WrongTimeline`, `InvalidCall`; a refused push leaves nothing behind.

        An engine finishes many trajectories at a time, and a call costs client and buffer more than each trajectory in it. So those that
        are pushed during one call wait for the next. One that is cancelled before its call is not sent."""
        pushed = asyncio.get_running_loop().create_future()
        self._to_push.append((lease, trajectory, pushed))
        if self._pushing is None or self._pushing.done():
            self._pushing = asyncio.create_task(self._push_together())
        await pushed

    async def _push_together(self) -> None:
        while self._to_push:
            batch = [each for each in self._to_push if not each[-1].done()]
            self._to_push.clear()
            errors: Sequence[Exception | None]
            try:
                errors = await self.push_many([(lease, trajectory) for lease, trajectory, _ in batch])
            except asyncio.CancelledError:  # the client is closed
                for *_, pushed in (*batch, *self._to_push):
                    pushed.cancel()
                raise
            except Exception as failure:  # noqa: BLE001  # every push of the batch raises it
                errors = [failure] * len(batch)
            for (*_, pushed), error in zip(batch, errors, strict=True):
                if pushed.done():  # cancelled
                    continue
                if error is None:
                    pushed.set_result(None)
                else:
                    pushed.set_exception(error)

    async def push_many(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | CodecError | None]:
        """Push many at once. Returns, for each, None or the error that `push` would raise."""
        return await transfer_all(partial(self._hand_in, "push"), of_bounded_size(items, _size), self._writes)

    async def save(self, lease: Lease, trajectory: Trajectory) -> None:
        """Save an unfinished trajectory, so that another replica can continue it if the lease is lost. Each save must be longer than the
        previous one; raises as `push` does."""
        (error,) = await self.save_many([(lease, trajectory)])
        if error is not None:
            raise error

    async def save_many(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | CodecError | None]:
        """Save many at once. Returns, for each, None or the error that `save` would raise."""
        return await transfer_all(partial(self._hand_in, "save"), of_bounded_size(items, _size), self._writes)

    async def _hand_in(
        self, function: str, items: Sequence[tuple[Lease, Trajectory]]
    ) -> list[ReplayError | CodecError | None]:
        """Push or save. A staged payload that is gone when the call arrives (the server lost it, or its time ran out) is sent again."""
        errors = await self._hand_in_once(function, items, CARRIED_BYTES)
        gone = [position for position, error in enumerate(errors) if isinstance(error, Unstaged)]
        again = await self._hand_in_once(function, [items[position] for position in gone], math.inf)
        for position, error in zip(gone, again, strict=True):
            errors[position] = error
        return errors

    async def _hand_in_once(
        self, function: str, items: Sequence[tuple[Lease, Trajectory]], carried_bytes: float
    ) -> list[ReplayError | CodecError | None]:
        """Push or save in one round trip: payloads above `carried_bytes` are staged under nonces, then one call per timeline makes them
        permanent or deletes them, and carries the others."""
        errors: list[ReplayError | CodecError | None] = [None] * len(items)
        nonces = secrets.token_hex(8 * len(items))  # one system call for all
        commands: list[tuple[Any, ...]] = []
        # for each timeline: the columns, the payloads, and their positions in `items`
        calls: dict[tuple[str, str], tuple[list[tuple[Any, ...]], list[bytes], list[int]]] = {}
        for position, (lease, trajectory) in enumerate(items):
            try:
                payload = encode_payload(lease, trajectory)
            except (InvalidCall, CodecError) as error:
                errors[position] = error
                continue
            nonce = nonces[position * 16 : position * 16 + 16]
            entries, payloads, positions = calls.setdefault((lease.timeline, lease.incarnation), ([], [], []))
            versions = trajectory.oldest_version, trajectory.newest_version
            size = len(payload), trajectory.completion_token_ids.size
            entries.append((lease.group.id, trajectory.index, lease.token, nonce, *size, *versions))
            if len(payload) > carried_bytes:
                commands.append(self._staging(lease, nonce, payload))
                payload = b""
            payloads.append(payload)
            positions.append(position)
        for (timeline, incarnation), (entries, payloads, _) in calls.items():
            columns = dict(zip(_COLUMNS, zip(*entries, strict=True), strict=True))
            commands.append(
                self._connection.fcall(function, *payloads, timeline=timeline, incarnation=incarnation, **columns)
            )
        replies = (await self._connection.pipeline(commands))[-len(calls) :] if calls else []
        for (_, _, positions), reply in zip(calls.values(), replies, strict=True):
            for position, text in zip(positions, reply, strict=True):
                errors[position] = refusal(text.decode()) if text else None
        return errors

    async def abandon(self, lease: Lease, index: int, reason: str) -> bool:
        """Report that trajectory `index` can't be generated. Returns True if the group can do without it; False if too few are left, and
        the whole group was released as failed."""
        return bool(await self._connection.call("abandon", **fence(lease), index=index, reason=reason))

    # -- epochs of the weight channel --------------------------------------------------------------------------------------

    async def acknowledge(self, replica: str, epoch: str) -> None:
        """Tell the buffer that the replica can take part. Raises `Fenced` if the epoch is no longer announced."""
        await self._connection.call("acknowledge", replica=replica, epoch=epoch)

    async def offered(self, replica: str) -> Epoch | None:
        """Return the newest version that a replica may pull (`TrainerClient.offer`), as an epoch in transfer with this replica alone."""
        if (reply := await self._connection.call("offered")) is None:
            return None
        return Epoch(
            **unpack(reply[0]),
            state="transfer",
            members=(replica,),
            acknowledged=(replica,),
            verified=(),
            refused={},
            rendezvous=unpack(reply[1]),
        )

    async def parents(self, replica: str) -> list[tuple[str, dict[str, str | int | float | bool]]]:
        """Return id and info of those that a replica asks for what it pulls before it asks the store, the nearest first."""
        found = await self._connection.call("parents", replica=replica)
        return [(id_.decode(), decode_info(info)) for id_, info in found]

    async def unreached(self, replica: str, reason: str) -> None:
        """Report that this replica, one that pulls, could not be reached by another."""
        await self._connection.call("unreached", **self._number(), replica=replica, reason=reason)

    async def verify(self, replica: str, epoch: str, logprobs: Sequence[float], finding: str = "") -> RefitVerdict:
        """Report the replica's log-probabilities of the probe's tokens under the weights of the epoch or offer. The buffer compares them
        with the trainer's (`begin_epoch`, `offer`); a replica becomes HEALTHY in no other way. A replica that differs by more than the
        tolerances is STALE, for a reason that includes its `finding`. Raises `InvalidCall` unless they are finite and as many as the
        trainer's, and `Fenced`."""
        reply = await self._connection.call("verify", replica=replica, epoch=epoch, logprobs=logprobs, finding=finding)
        return msgspec.convert(unpack(reply), RefitVerdict)

    async def refuse(self, replica: str, epoch: str, reason: str, *, interrupted: bool = False) -> None:
        """Report that the replica could not complete the epoch; it becomes STALE for this reason. `interrupted`: the collective failed, and
        the replica is not at fault."""
        await self._connection.call("refuse", replica=replica, epoch=epoch, reason=reason, interrupted=interrupted)


def _size(item: tuple[Lease, Trajectory]) -> int:
    return item[1].nbytes
