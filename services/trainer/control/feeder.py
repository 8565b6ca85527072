"""Keeps the queue of training prompts filled ahead of the fleet, and closes it when no more will come."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence

from headrace.replay import ReplayClient, RunState
from headrace.trajectory import Group
from services.trainer.control.patience import Patience

log = logging.getLogger(__name__)

REFRESH_S = 1.0
BATCH = 256


@dataclasses.dataclass(frozen=True)
class Demand:
    """How many prompts a run asks for. `ahead`: groups queued ahead of the fleet; `total`: prompts in all epochs;
    `trained`: groups that all steps train together."""

    ahead: int
    total: int
    trained: int

    @classmethod
    def of(cls, prompts_per_step: int, ahead_steps: int, max_steps: int, total: int) -> Demand:
        return cls(prompts_per_step * (ahead_steps + 2), total, prompts_per_step * max_steps)


@dataclasses.dataclass(frozen=True)
class Feed:
    """Enqueue the prompts with `start <= order < end`, then close the queue if `close`."""

    start: int
    end: int
    close: bool


def next_feed(demand: Demand, state: RunState) -> Feed:
    """What to enqueue now.

    A group that failed or was filtered trains nothing, so another prompt takes its place: the run needs as many prompts as it
    trains groups, and one more for each of those. The queue is closed only after the last prompt of the last epoch; until then
    a late failure can be made good.
    """
    lost = state.counts.get("failed", 0) + state.counts.get("filtered", 0)
    start = state.enqueued + 1
    room = demand.ahead - state.counts.get("queued", 0)
    end = max(start, min(start + max(room, 0), demand.total, demand.trained + lost))
    return Feed(start, end, close=end >= demand.total)


class Feeder:
    """One task: enqueue, wait for a nudge or a second, look again. Ends when it has closed the queue.

    `groups` makes the groups of some places in the order; it tokenizes, so it runs in a thread of its own.
    """

    def __init__(
        self,
        replay: ReplayClient,
        patience: Patience,
        timeline: str,
        demand: Demand,
        groups: Callable[[Iterable[int]], Sequence[Group]],
    ) -> None:
        self._replay = replay
        self._patience = patience
        self._timeline = timeline
        self._demand = demand
        self._groups = groups
        self._nudge = asyncio.Event()

    def nudge(self) -> None:
        """Groups have left the queue: look at once."""
        self._nudge.set()

    async def refill(self, orders: Iterable[int]) -> int:
        """Queue again prompts that the buffer counts as taken, holds no more, and nothing was trained on; returns how many.

        The buffer asks for it until it hears that all are in, so that a trainer killed in the middle does it again.
        """
        new, places = 0, iter(orders)
        while batch := list(itertools.islice(places, BATCH)):
            new += await self._enqueue(batch, refill=True)
        await self._patience(lambda: self._replay.refilled(self._timeline))
        return new

    async def run(self) -> None:
        while True:
            self._nudge.clear()
            feed = next_feed(self._demand, await self._patience(self._replay.state))
            for at in range(feed.start, feed.end, BATCH):
                await self._enqueue(range(at, min(at + BATCH, feed.end)), refill=False)
            if feed.close:
                await self._patience(lambda: self._replay.close(self._timeline))
                log.info("the queue is closed: all %d prompts are in", self._demand.total)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._nudge.wait()

    async def _enqueue(self, orders: Sequence[int], *, refill: bool) -> int:
        groups = await asyncio.to_thread(self._groups, orders)
        return await self._patience(lambda: self._replay.enqueue(groups, self._timeline, refill=refill))
