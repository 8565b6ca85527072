"""The weight channel's calls: the fleet and its membership epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from headrace.replay.calls import Calls
from headrace.replay.records import Epoch, Replica
from headrace.replay.replies import epoch_of, unpack


class ChannelCalls(Calls):
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
