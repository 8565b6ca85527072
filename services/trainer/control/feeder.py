"""Keeps the queue of training prompts filled ahead of the fleet, closes it when no more will come, and supplies the prompts of failed
groups that are retried."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence

from headrace.config import Config
from headrace.replay import BufferRetry, ReplayClient, RunState
from headrace_services.trainer.data import Prompts
from headrace_services.trainer.telemetry.journal import Journal, retried

log = logging.getLogger(__name__)

REFRESH_S = 1.0
BATCH = 256


def next_orders(state: RunState, *, ahead: int, total: int, to_train: int) -> tuple[range, bool]:
    """The prompts to enqueue now, by their `order`, and whether to close the queue after them.

    `ahead` groups are kept queued ahead of the fleet; there are `total` prompts in all epochs; the run trains `to_train` groups. A
    group that failed or was filtered trains nothing, so another prompt takes its place: the run needs `to_train` prompts, plus one
    for each of those. The queue is closed only after the last prompt of the last epoch; until then a late failure can be replaced.
    """
    lost = state.counts.get("failed", 0) + state.counts.get("filtered", 0)
    start = state.enqueued + 1
    room = ahead - state.counts.get("queued", 0)
    end = max(start, min(start + max(room, 0), total, to_train + lost))
    return range(start, end), end >= total


class Feeder:
    """Enqueues prompts in one task: enqueue, wait for a second or for `wake`, look again.

    Groups are made in another thread, because that tokenizes. `retries` counts the lines of retries in the journal.
    """

    def __init__(
        self,
        config: Config,
        replay: ReplayClient,
        retry: BufferRetry,
        timeline: str,
        prompts: Prompts,
        journal: Journal,
    ) -> None:
        self._replay = replay
        self._retry = retry
        self._timeline = timeline
        self._prompts = prompts
        self._journal = journal
        self.retries = len(retried(journal.read()))
        algorithm = config.algorithm
        self._ahead = algorithm.num_prompts_per_step * (algorithm.ahead_steps + 2)
        self._to_train = algorithm.num_prompts_per_step * algorithm.max_num_steps
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look at once, because groups have left the queue."""
        self._wake.set()

    async def refill(self, orders: Iterable[int]) -> int:
        """Enqueue again the prompts that a rewind or restore left missing; returns how many were new to the buffer.

        The buffer asks for a refill until `refilled` tells it that all are in, so a trainer killed in the middle repeats it.
        """
        new, rest = 0, iter(orders)
        while batch := list(itertools.islice(rest, BATCH)):
            new += await self._enqueue(batch, refill=True)
        await self._retry(lambda: self._replay.refilled(self._timeline))
        return new

    async def run(self) -> None:
        while True:
            self._wake.clear()
            state = await self._retry(self._replay.state)
            if state.wanted:
                await self._supply(state.next_step)
            total = self._prompts.total
            orders, close = next_orders(state, ahead=self._ahead, total=total, to_train=self._to_train)
            for at in range(0, len(orders), BATCH):
                await self._enqueue(orders[at : at + BATCH], refill=False)
            if close and not state.closed:
                await self._retry(lambda: self._replay.close(self._timeline))
                log.info("the queue is closed: all %d prompts are in", total)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._wake.wait()

    async def _supply(self, step: int) -> None:
        """Enqueue again the prompts of failed groups that are retried. The journal knows it first, should the buffer lose them."""
        while orders := await self._retry(self._replay.wanted):
            self._journal.append("retry", step, self._timeline, {}, orders)
            self.retries += 1
            await self._enqueue(orders, refill=True)
            log.info("%d prompts whose groups had failed are queued again", len(orders))

    async def _enqueue(self, orders: Sequence[int], *, refill: bool) -> int:
        groups = await asyncio.to_thread(self._prompts.train, orders)
        return await self._retry(lambda: self._replay.enqueue(groups, self._timeline, refill=refill))
