"""Where a trainer goes on from: its newest checkpoint, and what the buffer still knows of the run."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterator

from headrace.errors import ServiceError
from headrace.replay import Ended, ReplayClient, RunState
from services.trainer.control.checkpoint import ENDED, TRAINED, Checkpoints, State
from services.trainer.control.ledger import Ledger, Orders, orders_of
from services.trainer.control.patience import Patience

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rewind:
    """The buffer knows all that led to the checkpoint, which may be older than its newest: go on from it, keeping every generation that
    is still of use."""

    version: int


@dataclasses.dataclass(frozen=True)
class Restore:
    """The buffer does not know what led to the checkpoint, for this reason: make it anew from the checkpoint's ledger."""

    version: int
    reason: str


def choose_start(checkpoint: State | None, run: RunState) -> Rewind | Restore:
    """Rewind where the buffer's own record reaches the checkpoint, else restore. Raises `ServiceError` where weights that the buffer
    knows to be published are gone: there is nothing to go on from."""
    if checkpoint is None:
        if run.committed > 0:
            raise ServiceError(
                f"run {run.run_id!r} has published version {run.committed}, but there is no checkpoint of it here; bring its "
                "checkpoints back, or give run.id another name to start anew"
            )
        return Rewind(0)
    version = checkpoint.version
    if run.incarnation != checkpoint.incarnation:
        return Restore(version, "it holds another incarnation of this run than the one the checkpoint was trained from")
    if run.timeline_of(version) != checkpoint.timeline:
        return Restore(
            version, f"its history does not come from timeline {checkpoint.timeline}, which made the checkpoint"
        )
    if run.next_step < version:
        return Restore(version, f"it knows of {run.next_step} steps, fewer than the {version} of the checkpoint")
    return Rewind(version)


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the run stands once the buffer has agreed to it. `refill`: whether the buffer misses prompts up to place `enqueued`, which
    must be queued again before anything else; `ended`: those that failed or were filtered before the checkpoint."""

    version: int
    timeline: str
    ancestors: tuple[str, ...]
    incarnation: str
    ledger: Ledger
    ended: Orders
    enqueued: int
    refill: bool
    before: str  # the buffer's timeline until then

    def missing(self) -> Iterator[int]:
        """Places of the prompts that a refill queues again; those that the buffer holds after all change nothing."""
        return self.ledger.orders.missing(self.enqueued, self.ended)


async def take_up(replay: ReplayClient, patience: Patience, checkpoints: Checkpoints, run_id: str) -> Standing:
    """Rewind or restore the buffer to the newest checkpoint, on a new timeline."""
    newest = checkpoints.newest()
    checkpoint = None if newest is None else checkpoints.state(newest)
    if checkpoint is not None and checkpoint.run_id != run_id:
        raise ServiceError(
            f"{checkpoints.path(checkpoint.version)} is of run {checkpoint.run_id!r}, not {run_id!r}; give run.id that name, or "
            "set checkpointing.checkpoint_dir to another folder"
        )
    found = await patience(replay.state)
    start = choose_start(checkpoint, found)
    timeline = secrets.token_hex(8)
    ledger, ended = Ledger(), Ended()
    if checkpoint is not None:
        ledger = Ledger(Orders.decode(checkpoints.file(checkpoint.version, TRAINED)))
        ended = Ended(checkpoint.failed, checkpoint.filtered, checkpoints.file(checkpoint.version, ENDED))
    ended_orders = orders_of(ended)
    if isinstance(start, Rewind):
        run = await patience(lambda: replay.rewind(start.version, timeline))
        log.info("going on from version %d", start.version)
    else:
        incarnation = secrets.token_hex(8)
        log.warning("the buffer is made anew from checkpoint %d: %s", start.version, start.reason)
        last = max(ledger.orders.last, ended_orders.last)
        run = await patience(lambda: replay.restore(start.version, timeline, incarnation, last, ended))
    return Standing(
        version=start.version,
        timeline=timeline,
        ancestors=(*checkpoint.ancestors, checkpoint.timeline) if checkpoint else (),
        incarnation=run.incarnation,
        ledger=ledger,
        ended=ended_orders,
        enqueued=run.enqueued,
        refill=run.refill,
        before=found.timeline,
    )


def lost_writes(standing: Standing, run: RunState, reserved: int) -> bool:
    """Whether a buffer that refuses this trainer, or lacks what it was to train on, shows a past of it or nothing at all: the server
    lost writes (a failover, a power cut, an empty volume), which a new start makes good. Otherwise another trainer has taken the run
    over, or something is wrong. `reserved`: steps that the trainer got from the buffer."""
    if run.timeline == standing.timeline:
        return run.next_step < reserved
    untouched = run.committed < 0  # by any trainer: the first thing that each does commits version 0
    return untouched or run.timeline in (standing.before, *standing.ancestors)
