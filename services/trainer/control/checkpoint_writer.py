"""Writes checkpoints while training continues.

Before a snapshot the loop waits until the previous checkpoint is written. So there is one snapshot in memory at a time, and all work on the
checkpoints' folder is done in order. A thread of each rank writes its part. Rank 0 then publishes the whole, commits it to the buffer, and
adds the metrics of validations that ended meanwhile. In this order nothing is lost, whatever dies in between. A failure ends the run when
the loop next polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from headrace.base.errors import Restartable, ServiceError, WrongStep

from .checkpoint import CheckpointState
from .context import TrainerContext

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.1


class CheckpointWriter:
    """Writes the checkpoints of the trainer on `timeline` after their snapshots."""

    def __init__(self, context: TrainerContext, timeline: str) -> None:
        self._context = context
        self._timeline = timeline
        self._work: asyncio.Task[None] | None = None  # the last task; it waits for those before
        self._all_written = asyncio.Event()  # with several ranks: every rank has written its part
        self._all_written.set()
        self._metrics: dict[str, float] = {}

    async def save(
        self,
        state: CheckpointState,
        steps: Mapping[int, Sequence[str]],
        keep: Collection[int],
        files: Mapping[str, bytes],
    ) -> None:
        """Take a snapshot of the weights of `state.version`, and begin to write it. The other arguments are those of `Checkpoints.publish`.
        Nothing else may be being written (call `finish`). Raises as `Checkpoints.begin` does."""
        lead, checkpoints = self._context.lead, self._context.checkpoints
        await self._take(lambda: lead.save(str(checkpoints.begin(state.version, self._timeline))))
        began = self._context.clock()
        self._then(lambda: self._publish(state, steps, keep, files, began))

    async def save_in_memory(
        self, state: CheckpointState, files: Mapping[str, bytes], steps: Mapping[int, Sequence[str]]
    ) -> None:
        """Do as `save` does, but for a snapshot that stays one: nothing follows from it."""
        snapshots = self._context.snapshots
        assert snapshots is not None
        await self._take(lambda: self._context.lead.save_in_memory(state.version, self._timeline))

        async def publish() -> None:
            await self._await_all_parts()
            await asyncio.to_thread(snapshots.publish, state, steps, files)

        self._then(publish)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        return self._work is None

    async def _take(self, save: Callable[[], None]) -> None:
        assert self.idle
        context = self._context
        await context.torch(save)
        if context.lead.ranks.size > 1:
            self._all_written.clear()

    def add_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the checkpoint of `version` once it is published. A no-op without such a checkpoint."""

        async def add() -> None:
            await asyncio.to_thread(self._context.checkpoints.add_metrics, version, self._timeline, metrics)
            self._wake_uploads()

        self._then(add)

    async def poll(self) -> None:
        """Raise the error of what has failed. With several ranks this is a collective while they write, so no other may be running."""
        if self._work is None:
            return
        if not self._all_written.is_set() and await self._await_parts(self._context.torch(self._context.lead.is_saved)):
            self._all_written.set()
        if self._work.done():
            work, self._work = self._work, None
            work.result()

    async def finish(self) -> None:
        """Wait until all work is done; raises as `poll` does."""
        while self._work is not None:
            await asyncio.wait((self._work,), timeout=POLL_S)
            await self.poll()

    async def close(self) -> None:
        """Called after an error that ends the run. Complete what this rank can complete alone: other ranks may be gone or busy."""
        if self._work is None:
            return
        if not self._all_written.is_set():
            self._work.cancel()
        await asyncio.wait((self._work,))
        if self._work.cancelled():
            log.warning("the checkpoint that the ranks were writing is left unfinished; the earlier ones are untouched")
        elif (error := self._work.exception()) is not None:
            log.error("%s", error)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the checkpoint that was published since the last call, if any."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _then(self, work: Callable[[], Awaitable[None]]) -> None:
        before = self._work

        async def after() -> None:
            if before is not None:
                await before
            await work()

        self._work = asyncio.create_task(after())

    async def _publish(
        self,
        state: CheckpointState,
        steps: Mapping[int, Sequence[str]],
        keep: Collection[int],
        files: Mapping[str, bytes],
        began: float,
    ) -> None:
        context = self._context
        await self._await_all_parts()

        def publish() -> None:
            context.lineage.fsync()
            context.checkpoints.publish(state, steps, keep, files)

        await asyncio.to_thread(publish)
        took = context.clock() - began
        self._metrics = {"timing/train/checkpoint_write": took}
        log.info("checkpoint %s, written in %.2f s", context.checkpoints.path(state.version), took)
        # a server that loses everything after this takes nothing from the history of what the checkpoint was trained on
        await context.retry(context.history.write_all)
        self._wake_uploads()
        try:
            await context.retry(lambda: context.replay.commit(state.version, self._timeline, steps))
        except WrongStep as refusal:
            raise Restartable(
                f"the buffer's server lost a step that was trained ({refusal}); start this trainer again: it resumes from its checkpoint "
                "and restores the buffer"
            ) from refusal

    async def _await_all_parts(self) -> None:
        """Return once every rank has written its part."""
        if self._context.lead.ranks.size > 1:
            await self._all_written.wait()
        else:
            await self._await_parts(asyncio.wrap_future(self._context.lead.part))

    def _wake_uploads(self) -> None:
        if self._context.uploads is not None:
            self._context.uploads.wake()

    async def _await_parts(self, parts: Awaitable[T]) -> T:
        try:
            return await parts
        except ServiceError:
            # raises instead if a successor removed the folder: then the disk is not the reason
            await asyncio.to_thread(self._context.checkpoints.require_newest, self._timeline)
            raise
