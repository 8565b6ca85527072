"""Keeps the queue of training prompts filled ahead of the fleet, closes it after the last prompt, and supplies the prompts of failed groups
that are retried.

The buffer's server may lose writes unnoticed. So each look compares the run's state with what was done, and repeats what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from headrace.base.errors import WrongStep
from headrace.config import Config
from headrace.replay import BufferRetry, ReplayClient, RunState
from headrace.run.journal import Journal, list_retries

from ..data import Prompts

log = logging.getLogger(__name__)

REFRESH_S = 1.0
BATCH = 256


def next_orders(state: RunState, *, ahead: int, total: int, to_train: int) -> tuple[range, bool]:
    """Return the prompts to enqueue now, by their `order`, and whether to close the queue after them.

    `ahead` groups are kept queued ahead of the fleet. All epochs together have `total` prompts. The run trains `to_train` groups. A group
    that failed or was filtered trains nothing, so the run needs another prompt for each of those. The queue is closed only after the last
    prompt of the last epoch: until then a late failure can be replaced.
    """
    lost = state.counts.get("failed", 0) + state.counts.get("filtered", 0)
    start = state.enqueued + 1
    room = ahead - state.counts.get("queued", 0)
    end = max(start, min(start + max(room, 0), total, to_train + lost))
    return range(start, end), end >= total


class Feeder:
    """Enqueues prompts in one endless task: enqueue, wait for a second or for `wake`, look again.

    Groups are made in another thread, because tokenizing takes time. `retries` counts the lines of retries in the journal.
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
        self.retries = len(list_retries(journal.read()))
        algorithm = config.algorithm
        self._ahead = algorithm.num_prompts_per_step * (algorithm.ahead_steps + 2)
        self._to_train = algorithm.num_prompts_per_step * config.max_num_steps
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look again now, because groups have left the queue."""
        self._wake.set()

    async def refill(self, orders: Iterable[int]) -> int:
        """Enqueue again the prompts that a rewind or restore left missing. Returns how many were new to the buffer.

        `refilled` has the buffer count them. It asks for the refill until that call succeeds, so a trainer that was killed meanwhile
        repeats it.
        """
        orders, total = list(orders), 0
        while True:
            # finish what earlier commits left to free: until then the buffer still knows those groups
            state = await self._retry(self._replay.state)
            await self._retry(partial(self._replay.commit, state.committed, self._timeline))
            new = await self._enqueue(orders, refill=True)
            total += new
            try:
                await self._retry(lambda: self._replay.end_refill(self._timeline))
            except WrongStep as error:
                if not new:
                    raise
                log.warning("the buffer's server lost writes: %s", error)
            else:
                return total

    async def run(self, missing: Callable[[], Iterable[int]]) -> None:
        """Feed until cancelled. `missing` returns the prompts of a refill, in case the buffer asks for it again."""
        closed = False
        while True:
            self._wake.clear()
            state = await self._retry(self._replay.state)
            if state.refill and state.timeline == self._timeline:
                log.warning(
                    "the buffer's server lost writes: %d prompts are queued again", await self.refill(missing())
                )
            if state.wanted:
                await self._supply(state.next_step)
            total = self._prompts.total
            orders, close = next_orders(state, ahead=self._ahead, total=total, to_train=self._to_train)
            try:
                await self._enqueue(orders, refill=False)
            except WrongStep as error:
                log.warning("the buffer's server lost writes: %s", error)
                continue  # from its current state
            if close and not state.closed:
                await self._retry(lambda: self._replay.close(self._timeline))
                log.info("the queue is closed%s: all %d prompts are in", " again" if closed else "", total)
                closed = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._wake.wait()

    async def _supply(self, step: int) -> None:
        """Enqueue again the prompts of failed groups that are retried. They are journaled first, in case the buffer loses them."""
        while orders := await self._retry(self._replay.read_wanted):
            self._journal.append("retry", step, self._timeline, {}, orders)
            self.retries += 1
            await self._enqueue(orders, refill=True)
            log.info("%d prompts whose groups had failed are queued again", len(orders))

    async def _enqueue(self, orders: Sequence[int], *, refill: bool) -> int:
        """Enqueue these prompts, a batch at a time. Returns how many were new to the buffer."""
        new = 0
        for at in range(0, len(orders), BATCH):
            groups = await asyncio.to_thread(self._prompts.train, orders[at : at + BATCH])
            new += await self._retry(partial(self._replay.enqueue, groups, self._timeline, refill=refill))
        return new
