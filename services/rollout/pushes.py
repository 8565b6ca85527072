"""Pushes finished trajectories to the buffer in batches: those that finish during one call wait for the next."""

from __future__ import annotations

import asyncio
from functools import partial

from headrace.records.trajectory import Trajectory
from headrace.replay import BufferRetry, Lease, ReplayClient


class Pushes:
    """Batches pushes. The engine finishes many trajectories at a time, and a call costs this process and the buffer more than each
    trajectory in it."""

    def __init__(self, replay: ReplayClient, retry: BufferRetry) -> None:
        self._replay = replay
        self._retry = retry
        self._waiting: list[tuple[Lease, Trajectory, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def push(self, lease: Lease, trajectory: Trajectory) -> None:
        """Return once the trajectory is in the buffer. Raises what `ReplayClient.push` raises, but waits while the buffer is unreachable.
        If it is cancelled before the call starts, the trajectory is not sent."""
        pushed = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, trajectory, pushed))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await pushed

    async def _send(self) -> None:
        while self._waiting:
            batch = [each for each in self._waiting if not each[-1].done()]
            self._waiting.clear()
            errors: list[Exception | None]
            try:
                items = [(lease, trajectory) for lease, trajectory, _ in batch]
                errors = [*await self._retry(partial(self._replay.push_many, items))]
            except Exception as failure:  # noqa: BLE001  # every push of the batch raises it
                errors = [failure] * len(batch)
            for (*_, pushed), error in zip(batch, errors, strict=True):
                if pushed.done():  # cancelled
                    continue
                if error is None:
                    pushed.set_result(None)
                else:
                    pushed.set_exception(error)

    async def aclose(self) -> None:
        """End the call that is under way. Its pushes must have been cancelled."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
