"""A rollout replica's calls: membership of the fleet, leases, trajectories."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack

from headrace.errors import CodecError, InvalidCall, ReplayError
from headrace.replay.channel import ChannelCalls
from headrace.replay.records import HeartbeatReply, Lease
from headrace.replay.wire import refusal
from headrace.trajectory import Group, Trajectory

log = logging.getLogger(__name__)

# A payload that no call made visible is gone after this many seconds.
STAGED = b"60"
# A payload of up to so many bytes travels in the call that makes it visible, which spares client and server a command each. A larger one
# would cost more there, and keep the server from others for longer.
CARRIED_BYTES = 32 << 10


class RolloutCalls(ChannelCalls):
    async def register(self, replica: str, info: Mapping[str, Any]) -> None:
        """Enter the fleet as STALE. `replica` is a nonce made at process start: a restarted replica is a new one."""
        await self._wire.call("register", replica, msgpack.packb(dict(info)))

    async def deregister(self, replica: str) -> None:
        """Leave the fleet; groups still held are passed on at once, without costing an attempt."""
        await self._until_done("deregister", replica)

    async def heartbeat(self, replica: str, tokens: Sequence[str]) -> HeartbeatReply:
        """Renew the replica and these leases (never past a group's absolute deadline, law 6). A DEAD or unknown replica is told so."""
        known = f"{self._epoch.id} {self._epoch.state}" if self._epoch else ""
        state, timeline, changed, lost, complete = await self._wire.call("heartbeat", replica, known, *tokens)
        if changed:
            self._epoch = await self.epoch()
        lost, complete = (tuple(token.decode() for token in tokens) for tokens in (lost, complete))
        return HeartbeatReply(state.decode(), timeline.decode(), lost, self._epoch, complete)

    async def wait_work(self, timeout_s: float) -> None:
        """Return when a lease may be had or an epoch changed, or after `timeout_s`."""
        await self._wakeups.wait("work", timeout_s)

    async def lease(self, replica: str, max_groups: int) -> list[Lease]:
        """Up to `max_groups` groups: those that another replica has begun, validation, then training prompts as admission
        allows. Empty: wait.

        Raises `NotVerified` unless the replica is HEALTHY.
        """
        return await self._read_leases(await self._wire.call("lease", replica, max_groups, secrets.token_hex(8)))

    async def _read_leases(self, reply: Sequence[Any]) -> list[Lease]:
        timeline, incarnation, version, *entries = reply
        records = await self._fetch([entry[1] for entry in entries])
        leases = []
        begun = await self._begun(
            [(entry[0], entry[2], index, key) for entry in entries for index, key in pairs(entry[8])]
        )
        for entry, record in zip(entries, records, strict=True):
            group_id, _, token, ends_in_ms, attempt, ticket, count, missing, _ = entry
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
                expires_in_s=ends_in_ms / 1000,
                count=count,
                missing=tuple(missing) or tuple(range(count)),
                prefixes=begun.get(token, {}),
            )
            leases.append(lease)
        return leases

    async def _begun(self, saved: Sequence[tuple[bytes, bytes, int, bytes]]) -> dict[bytes, dict[int, Trajectory]]:
        """By token and index, from (group id, token, index, payload key). One that was freed or can't be read is left out: it
        starts over."""
        begun: dict[bytes, dict[int, Trajectory]] = {}
        payloads = await self._read_batches(self._fetch, [entry[3] for entry in saved])
        for (group_id, token, index, key), payload in zip(saved, payloads, strict=True):
            if payload is None:
                continue
            try:
                prefix = Trajectory.decode(payload)
            except CodecError as error:
                log.warning("a saved trajectory (%r) can't be gone on from: %s", key, error)
                continue
            if (prefix.group_id, prefix.index) == (group_id.decode(), index):
                begun.setdefault(token, {})[index] = prefix
            else:
                log.warning("a saved trajectory (%r) is of another: %s[%d]", key, prefix.group_id, prefix.index)
        return begun

    async def push(self, lease: Lease, trajectory: Trajectory) -> None:
        """Hand in one finished trajectory (law 3: index not yet pushed, 0 <= index < `lease.count`). Pushing the same index again under the
        same token is a no-op. Raises `LeaseLost`, `Surplus`, `WrongTimeline`, `InvalidCall`; a refused push leaves nothing behind."""
        (error,) = await self.push_many([(lease, trajectory)])
        if error is not None:
            raise error

    async def push_many(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | CodecError | None]:
        """`push` of many at once: for each None, or the error that `push` would raise."""
        return await self._write_batches(partial(self._hand_in, "push"), items, _size)

    async def save(self, lease: Lease, trajectory: Trajectory) -> None:
        """What there is of an unfinished trajectory, so that another replica can go on from there should the lease be lost. Each is longer
        than the one before; raises as `push` does."""
        (error,) = await self.save_many([(lease, trajectory)])
        if error is not None:
            raise error

    async def save_many(self, items: Sequence[tuple[Lease, Trajectory]]) -> list[ReplayError | CodecError | None]:
        """`save` of many at once: for each None, or the error that `save` would raise."""
        return await self._write_batches(partial(self._hand_in, "save"), items, _size)

    async def _hand_in(
        self, function: str, items: Sequence[tuple[Lease, Trajectory]]
    ) -> list[ReplayError | CodecError | None]:
        """One round trip: large payloads staged under nonces, then a call for each timeline that makes them permanent or deletes them,
        and carries the small ones."""
        errors: list[ReplayError | CodecError | None] = [None] * len(items)
        nonces = secrets.token_hex(8 * len(items))  # one call of the system for all
        commands: list[tuple[Any, ...]] = []
        calls: dict[tuple[str, str], tuple[list[str | bytes], list[int]]] = {}
        for position, (lease, trajectory) in enumerate(items):
            try:
                payload = _payload(lease, trajectory)
            except (InvalidCall, CodecError) as error:
                errors[position] = error
                continue
            nonce = nonces[position * 16 : position * 16 + 16]
            arguments, positions = calls.setdefault((lease.timeline, lease.incarnation), ([], []))
            arguments.append(
                f"{lease.group.id} {trajectory.index} {lease.token} {nonce} {len(payload)} "
                f"{trajectory.completion_token_ids.size} {trajectory.oldest_version} {trajectory.newest_version}"
            )
            if len(payload) > CARRIED_BYTES:
                key = f"{self._wire.key}:{lease.incarnation}:p:{nonce}"
                commands.append((b"SET", key, payload, b"NX", b"EX", STAGED))
                payload = b""
            arguments.append(payload)
            positions.append(position)
        for fence, (arguments, _) in calls.items():
            commands.append(self._fcall(function, *fence, *arguments))
        replies = (await self._wire.pipeline(commands))[-len(calls) :] if calls else []
        for (_, positions), reply in zip(calls.values(), replies, strict=True):
            for position, text in zip(positions, reply, strict=True):
                errors[position] = refusal(text.decode()) if text else None
        return errors

    async def release(self, lease: Lease, reason: str, *, failed: bool) -> None:
        """Give the group back: `failed` counts an attempt (after `max_attempts` the group ends as failed with `reason`), and the
        next starts over; otherwise (shutdown, refit) another replica goes on with it."""
        await self._release(lease, "failed" if failed else "returned", reason)

    async def abandon(self, lease: Lease, index: int, reason: str) -> bool:
        """Trajectory `index` can't be generated. True: the group does without it. False: too few are left, and the whole group was given
        back as failed."""
        fence = lease.timeline, lease.incarnation
        return bool(await self._wire.call("abandon", *fence, lease.group.id, lease.token, index, reason))

    async def reject(self, lease: Lease, reason: str) -> None:
        """The group can never succeed (prompt longer than the context, …): it ends as failed with `reason`, without further attempts."""
        await self._release(lease, "rejected", reason)

    async def _release(self, lease: Lease, how: str, reason: str) -> None:
        await self._wire.call("release", lease.timeline, lease.incarnation, lease.group.id, lease.token, how, reason)


def pairs(flat: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(*[iter(flat)] * 2, strict=True)


def _size(item: tuple[Lease, Trajectory]) -> int:
    return item[1].nbytes


def _payload(lease: Lease, trajectory: Trajectory) -> bytes:
    """What is stored of a trajectory. Raises `CodecError` for one that is none, `InvalidCall` for one of another group or attempt."""
    trajectory.check()
    if (trajectory.group_id, trajectory.attempt) != (lease.group.id, lease.attempt):
        raise InvalidCall(
            f"trajectory of group {trajectory.group_id!r} attempt {trajectory.attempt} pushed under the lease of "
            f"{lease.group.id!r} attempt {lease.attempt}"
        )
    return trajectory.encode()
