"""Limits how many sequences the replica has in its engine, so that a slot stays free for the probe of a refit.

vLLM admits no request while `max_num_seqs` sequences are running, whatever the request's priority. The probe would wait until one of them
ends, possibly longer than `weight_channel.timeout_s`. So vLLM gets one slot more than `policy.generation.vllm_cfg.max_num_seqs`, and
everything except the probe takes slots here first.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# The engine's slots beyond those that are given out here. Only one probe runs at a time.
PROBE_SLOTS = 1


class SequenceSlots:
    """Gives out `count` slots: the lowest `priority` first, and in the order of the requests among equal ones."""

    def __init__(self, count: int) -> None:
        self.count = self._free = count
        self._order: Iterator[int] = itertools.count()
        # priority, order, number of slots, and the future that is done once they are given
        self._queue: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @classmethod
    def of(cls, engine: AsyncLLM) -> SequenceSlots:
        """Return the slots of an engine that `engine_arguments` configured."""
        return cls(engine.vllm_config.scheduler_config.max_num_seqs - PROBE_SLOTS)

    @property
    def waiting(self) -> int:
        """The number of sequences that are waiting for a slot."""
        return sum(wanted for _, _, wanted, future in self._queue if not future.done())

    def check(self, wanted: int) -> None:
        """Raise `ValueError` if a request wants more slots than there are."""
        if wanted > self.count:
            raise ValueError(
                f"n: {wanted} sequences in one request; a replica computes at most {self.count} at once "
                "(policy.generation.vllm_cfg.max_num_seqs)"
            )

    @contextlib.asynccontextmanager
    async def take(self, wanted: int = 1, priority: int = 0) -> AsyncIterator[None]:
        """Hold `wanted` slots while the context is open. Raises as `check`."""
        self.check(wanted)
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._order), wanted, given))
        self._give()
        try:
            await given
            yield
        finally:
            if not given.cancelled():  # else it got none, and the next in the queue may fit now
                self._free += wanted
            self._give()

    def _give(self) -> None:
        while self._queue:
            _, _, wanted, given = self._queue[0]
            if not given.done():
                if wanted > self._free:
                    return
                self._free -= wanted
                given.set_result(None)
            heapq.heappop(self._queue)
