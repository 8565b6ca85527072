"""Where a trainer goes on from: its newest checkpoint, and what the buffer still knows of the run."""

from __future__ import annotations

import dataclasses
import logging
import secrets

from headrace.errors import ServiceError
from headrace.replay import ReplayClient, RunState
from services.trainer.checkpoint import Checkpoints, State
from services.trainer.ledger import Ledger, Orders
from services.trainer.patience import Patience

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Rewind:
    """The buffer knows all that led to the checkpoint: go on from it, keeping every generation that is still of use."""

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
    if run.next_step < version:
        return Restore(version, f"it knows of {run.next_step} steps, fewer than the {version} of the checkpoint")
    if run.committed > version:
        return Restore(version, f"it has freed what led from version {version} to {run.committed}, which is gone")
    return Rewind(version)


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where the run stands once the buffer has agreed to it. `refill`: whether prompts the ledger does not hold must be queued again."""

    version: int
    timeline: str
    ancestors: tuple[str, ...]
    incarnation: str
    ledger: Ledger
    refill: bool


async def take_up(replay: ReplayClient, patience: Patience, checkpoints: Checkpoints, run_id: str) -> Standing:
    """Rewind or restore the buffer to the newest checkpoint, on a new timeline."""
    newest = checkpoints.newest()
    checkpoint = None if newest is None else checkpoints.state(newest)
    if checkpoint is not None and checkpoint.run_id != run_id:
        raise ServiceError(
            f"{checkpoints.path(checkpoint.version)} is of run {checkpoint.run_id!r}, not {run_id!r}; give run.id that name, or "
            "set checkpointing.checkpoint_dir to another folder"
        )
    start = choose_start(checkpoint, await patience(replay.state))
    timeline = secrets.token_hex(8)
    ledger = Ledger(Orders(checkpoint.trained)) if checkpoint else Ledger()
    if isinstance(start, Rewind):
        run = await patience(lambda: replay.rewind(start.version, timeline))
        log.info("going on from version %d", start.version)
    else:
        incarnation = secrets.token_hex(8)
        log.warning("the buffer is made anew from checkpoint %d: %s", start.version, start.reason)
        run = await patience(lambda: replay.restore(start.version, timeline, incarnation, ledger.orders.last))
    return Standing(
        version=start.version,
        timeline=timeline,
        ancestors=(*checkpoint.ancestors, checkpoint.timeline) if checkpoint else (),
        incarnation=run.incarnation,
        ledger=ledger,
        refill=isinstance(start, Restore),
    )
