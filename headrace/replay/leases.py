"""Calls that replicas and runners share: registering, reading leases, staging payloads, and returning leases."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any

from headrace.base.errors import CodecError, InvalidCall, ReplayUnavailable, WrongTimeline
from headrace.base.tasks import cancel
from headrace.records.trajectory import AnyTrajectory, Group, Trajectory
from headrace.replay.base_client import PAYLOADS, BufferClient, chunks, transfer_all
from headrace.replay.records import Lease, unpack

log = logging.getLogger(__name__)

# How long a service that is stopped waits for a buffer that does not answer. It does so twice, and a pod has 30 s in all.
PARTING_S = 10.0
# A payload that no call has made visible expires after this many seconds.
STAGED = b"60"
# A payload of up to this many bytes travels in the call that makes it visible, which saves client and server a command. A larger one
# would cost more in the call, and block the server for longer.
CARRIED_BYTES = 32 << 10


async def wait_for_work(
    client: LeaseClient, period_s: float, others: Sequence[asyncio.Event], spread_s: float = 0.0
) -> None:
    """Return when there may be a lease, an epoch has changed, or one of `others` is set, after at most `period_s`. The buffer's news is
    answered `spread_s` later, and a server that can't be reached is asked again after `period_s`."""
    news, *rest = (
        asyncio.create_task(wait) for wait in (client.wait_work(period_s), *(each.wait() for each in others))
    )
    try:
        await asyncio.wait((news, *rest), return_when=asyncio.FIRST_COMPLETED)
        if news.done() and isinstance(news.exception(), ReplayUnavailable):
            await asyncio.wait(rest, timeout=period_s, return_when=asyncio.FIRST_COMPLETED)
        elif news.done():
            news.result()
            if spread_s:
                await asyncio.wait(rest, timeout=spread_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel((news, *rest))


async def take_turn(turn: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Await a turn of a service. After `stop` it has `PARTING_S` left, in which the buffer may still answer, and is cancelled then."""
    running, stopped = asyncio.create_task(turn), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((running,), timeout=PARTING_S)
    finally:
        await cancel((running, stopped))
    if not running.cancelled():
        running.result()


async def leave(deregister: Awaitable[None]) -> None:
    """Await the call by which a service leaves. It stays without effect, with a warning, if the buffer does not answer within
    `PARTING_S`."""
    try:
        async with asyncio.timeout(PARTING_S):
            await deregister
    except (ReplayUnavailable, TimeoutError) as error:
        log.warning(
            "could not deregister, so the leases stay until they expire: %s", error or "the buffer does not answer"
        )


class LeaseClient(BufferClient):
    async def wait_work(self, timeout_s: float) -> None:
        """Return when a lease may be available or an epoch has changed, or after `timeout_s`."""
        await self._wakeups.wait("work", timeout_s)

    async def release(self, lease: Lease, reason: str, *, failed: bool) -> None:
        """Return the lease. With `failed` it costs an attempt (after `max_attempts` the group ends as failed with `reason`), and the next
        attempt starts over. Otherwise (shutdown, refit) another replica continues it."""
        how = "failed" if failed else "returned"
        await self._connection.call("release", **fence(lease), how=how, reason=reason)

    async def reject(self, lease: Lease, reason: str) -> None:
        """End the group as failed with `reason`, without further attempts, because it can never succeed (its prompt is too long, …)."""
        await self._connection.call("release", **fence(lease), how="rejected", reason=reason)

    async def _enter(self, function: str, **arguments: Any) -> None:
        entered = False
        while not entered:
            incarnation = (await self.state()).incarnation
            with contextlib.suppress(WrongTimeline):  # a restore happened in between
                entered = bool(await self._connection.call(function, incarnation=incarnation, **arguments))

    async def _read_leases(self, answer: bytes) -> list[Lease]:
        reply = unpack(answer)
        granted = reply.pop("leases")
        records = await self._fetch([lease.pop("record") for lease in granted])
        prefixes = await self._prefixes(granted)
        leases = []
        for lease, record in zip(granted, records, strict=True):
            if record is None:  # the group was dropped, so the lease is void
                continue
            group_id, token = lease.pop("group"), lease["token"]
            try:
                group = Group.decode(record)
            except CodecError as error:  # no replica can generate this group
                own = {
                    "timeline": reply["timeline"],
                    "incarnation": reply["incarnation"],
                    "group": group_id,
                    "token": token,
                }
                await self._connection.call("release", **own, how="rejected", reason=str(error))
                continue
            lease["missing"] = tuple(lease.get("missing") or range(lease["count"]))
            lease["prefixes"] = prefixes.get(token, {})
            lease["tries"] = dict(lease.get("tries", ()))
            leases.append(Lease(group=group, **reply, **lease))
        return leases

    async def _prefixes(self, granted: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Trajectory]]:
        """Return the saved prefixes of these leases, by token and index. A prefix that was freed or can't be read is left out: its
        trajectory starts over."""
        begun: dict[str, dict[int, Trajectory]] = {}
        saved = [(lease, index, key) for lease in granted for index, key in lease.get("prefixes", ())]
        payloads = await transfer_all(self._fetch, chunks([key for _, _, key in saved], PAYLOADS), self._reads)
        for (lease, index, key), payload in zip(saved, payloads, strict=True):
            if payload is None:
                continue
            try:
                prefix = Trajectory.decode(payload)
            except CodecError as error:
                log.warning("the saved trajectory %r can't be continued: %s", key, error)
                continue
            if (prefix.group_id, prefix.index) == (lease["group"], index):
                begun.setdefault(lease["token"], {})[index] = prefix
            else:
                log.warning(
                    "the saved trajectory %r belongs to %s[%d]; it is ignored", key, prefix.group_id, prefix.index
                )
        return begun

    def _staging(self, lease: Lease, nonce: str, payload: bytes) -> tuple[Any, ...]:
        """Return the command that writes a payload before the call that makes it visible."""
        key = f"{self._connection.key}:{lease.incarnation}:p:{nonce}"
        return (b"SET", key, payload, b"NX", b"EX", STAGED)


def fence(lease: Lease) -> dict[str, Any]:
    """Return the arguments of a call by which the buffer knows the lease (law 4)."""
    return {
        "timeline": lease.timeline,
        "incarnation": lease.incarnation,
        "group": lease.group.id,
        "token": lease.token,
    }


def renewed(tokens: Sequence[str], progress: Sequence[int]) -> dict[str, Any]:
    """Return the leases that a heartbeat renews as it names them. Without `progress` there was none."""
    return {"tokens": tokens, "progress": progress or [0] * len(tokens)}


def encode_payload(lease: Lease, trajectory: AnyTrajectory) -> bytes:
    """Return the encoded trajectory. Raises `CodecError` if it is not valid, `InvalidCall` if it belongs to another group or attempt."""
    trajectory.check()
    if (trajectory.group_id, trajectory.attempt) != (lease.group.id, lease.attempt):
        raise InvalidCall(
            f"trajectory of group {trajectory.group_id!r} attempt {trajectory.attempt} handed in under the lease of "
            f"{lease.group.id!r} attempt {lease.attempt}"
        )
    return trajectory.encode()
