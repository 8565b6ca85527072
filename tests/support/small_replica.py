"""The light replica of the benchmarks, with faults, and a scorer, whose rewards are a function of the tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.light_replica import LightReplica
from headrace.base.errors import Fenced, InvalidCall
from headrace.records.score import Score
from headrace.records.trajectory import Float32, Int32, Trajectory
from headrace.replay import Epoch, Lease, ReplayClient


class SmallReplica(LightReplica):
    """`faulty`: it computes the probe so many nats off. `off`: it reports log-probabilities of its tokens that are so many nats lower.
    `mute`: it leases validation prompts and never answers them. `may_validate`: it answers them once this is set. `doomed`: data set
    indices whose groups it rejects. `poison`: the data set index of a prompt that kills its process."""

    def __init__(
        self,
        replay: ReplayClient,
        model: Path,
        *,
        faulty: float = 0.0,
        off: float = 0.0,
        mute: bool = False,
        may_validate: asyncio.Event | None = None,
        doomed: frozenset[int] = frozenset(),
        poison: int | None = None,
        most: int = 4,
    ) -> None:
        super().__init__(replay, model, most=most)
        self._may_validate, self._held_back = may_validate, list[Lease]()
        self._faulty, self._off, self._mute, self._doomed, self._poison = faulty, off, mute, doomed, poison

    async def _take_part(self, epoch: Epoch) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await super()._take_part(epoch)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._replay.heartbeat(self.id, [])

    def _prove(self, probe: Int32) -> Float32:
        return super()._prove(probe) - np.float32(self._faulty)

    async def _lease(self) -> Sequence[Lease]:
        leases = await super()._lease()
        if self._may_validate is None or self._may_validate.is_set():
            leases, self._held_back = [*self._held_back, *leases], []
        if self._poison in {lease.group.dataset_index for lease in leases if lease.group.lane == "train"}:
            os.kill(os.getpid(), signal.SIGKILL)
        return leases

    async def _answer(self, lease: Lease) -> None:
        if lease.group.lane == "validation" and self._mute:
            return
        if lease.group.lane == "validation" and self._may_validate is not None and not self._may_validate.is_set():
            self._held_back.append(lease)
            return
        if lease.group.lane == "train" and lease.group.dataset_index in self._doomed:
            await self._replay.reject(lease, "this problem is doomed")
        else:
            await super()._answer(lease)

    def _trajectory(self, lease: Lease, index: int) -> Trajectory:
        trajectory = super()._trajectory(lease, index)
        return msgspec.structs.replace(trajectory, logprobs=trajectory.logprobs - np.float32(self._off))


async def installed(replica: SmallReplica, version: int) -> None:
    async with replica.changed:
        await replica.changed.wait_for(lambda: version in replica.installed)


async def score_all(replay: ReplayClient, equal_every: int = 0) -> None:
    """Score what waits, for ever; of each `equal_every` prompts, the rewards of the first are all equal."""
    while True:
        jobs = await replay.take_scoring({"math": 64, "sums": 64})
        for job in jobs:
            reward = float(job.trajectory.completion_token_ids.mean() - 9.5)
            if equal_every and job.group.order % equal_every == 0:
                reward = 1.0
            with contextlib.suppress(Fenced, InvalidCall):
                await replay.score(job, Score("SCORED", reward))
        if not jobs:
            await replay.wait_scoring(0.1)


@contextlib.asynccontextmanager
async def running(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Tasks that run while the context is open; one that fails meanwhile fails the test at once."""
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def repeated(items: list[str]) -> list[str]:
    return [item for item, count in Counter(items).items() if count > 1]
