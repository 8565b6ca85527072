"""Resumes a run: from its newest checkpoint, with what the buffer still holds."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from pyroaring import BitMap

from headrace.base.errors import ServiceError
from headrace.replay import BufferRetry, Ended, ReplayClient, RunState

from .checkpoint import (
    ENDED,
    FAILURES,
    TRAINED,
    Checkpoints,
    CheckpointState,
    Ledger,
    ended_orders,
)

log = logging.getLogger(__name__)


def restore_reason(checkpoint: CheckpointState | None, run: RunState, before: int = -1) -> str | None:
    """Return why the buffer must be rebuilt from the checkpoint's ledger (`restore`), or None if a rewind is enough. `before` is the
    version that was published before the checkpoint.

    The buffer must be rebuilt if it lacks the history that led to the checkpoint. A rewind keeps every trajectory that is still usable. The
    checkpoint may be older than the newest one that the buffer has seen, or there may be none yet.

    Raises `ServiceError` if the buffer knows of published weights but there is no checkpoint to resume from.
    """
    if checkpoint is None:
        if run.committed > 0:
            raise ServiceError(
                f"run {run.run_id!r} has published version {run.committed}, but there is no checkpoint of it here; restore its "
                "checkpoints, or give run.id another name to start over"
            )
        return None
    if run.incarnation != checkpoint.incarnation:
        return "it holds another incarnation of this run than the one that the checkpoint was trained from"
    if run.find_timeline(checkpoint.version) != checkpoint.timeline:
        return f"its history does not come from timeline {checkpoint.timeline}, which made the checkpoint"
    if run.next_step < checkpoint.version:
        return f"it has {run.next_step} steps, fewer than the {checkpoint.version} of the checkpoint"
    if run.committed < before:
        return f"its newest published version is {run.committed}, and {before} was published before the checkpoint"
    return None


async def differing_step(replay: ReplayClient, retry: BufferRetry, steps: Mapping[int, Sequence[str]]) -> int | None:
    """Return the first of `steps` for which the buffer holds another batch than the groups that it was trained on, or None.

    The buffer's server lost such a step, and a late copy of `reserve` took it again. Steps that it no longer holds, or whose payloads are
    gone, are not checked.
    """
    for step, groups in steps.items():
        _, batch = await retry(partial(replay.read_held_batch, step))
        if batch is not None and sorted(batch.groups) != sorted(groups):
            return step
    return None


@dataclasses.dataclass(frozen=True)
class ResumeState:
    """The state that a trainer resumes from, agreed with the buffer.

    With `refill`, prompts up to order `enqueued` are missing in the buffer and must be enqueued again before anything else. `ended` are the
    orders that failed or were filtered, as far as the buffer knows now. `last_validation`: a version before `version` whose validation
    groups the buffer held: if no trainer has reported them, none will. (Later versions are validated when the trainer gets there.)
    """

    version: int
    timeline: str
    ancestors: tuple[str, ...]
    incarnation: str
    ledger: Ledger
    ended: BitMap
    enqueued: int
    refill: bool
    previous_timeline: str  # the buffer's, before this start
    last_validation: int | None = None

    def missing(self) -> Iterator[int]:
        """Return the prompts to refill, by their `order`. Enqueuing one that the buffer still holds changes nothing."""
        return self.ledger.missing(self.enqueued, self.ended)


def read_ended(checkpoint: CheckpointState, checkpoints: Checkpoints) -> Ended:
    """Return the groups that had ended untrained when the checkpoint was published. An earlier build did not record which had failed."""
    version = checkpoint.version
    failures = b"" if checkpoint.retries is None else checkpoints.file(version, FAILURES)
    return Ended(checkpoint.failed, checkpoint.filtered, checkpoints.file(version, ENDED), failures)


def check_prompts(checkpoint: CheckpointState, folder: Path, digest: str) -> None:
    """Raise `ServiceError` unless the run's prompts, with this `digest`, are those that `checkpoint`, in `folder`, was trained on: places
    in the prompts' order decide which are still to come."""
    if checkpoint.prompts not in (None, digest):
        raise ServiceError(
            f"the prompts are not those that {folder} was trained on: a file of data.train or data.validation has changed, or a data set "
            "of the Hugging Face Hub. Restore it; or start a new run (another run.id) that continues from these weights with "
            f"policy.model_name={folder / 'policy'}"
        )


async def resume(
    replay: ReplayClient,
    retry: BufferRetry,
    checkpoints: Checkpoints,
    newest: int | None,
    retried: Sequence[Sequence[int]],
    run_id: str,
    *,
    afresh: bool = False,
) -> ResumeState:
    """Rewind or restore the buffer to checkpoint `newest`, whose weights the trainer has loaded (None: the initial model), on a new
    timeline. That timeline becomes the newest of the checkpoints' chain.

    `retried` has the orders of each retry in the journal; retries that the checkpoint doesn't know of are still carried out. `afresh` means
    that, without a checkpoint, the buffer's content is of another configuration or of other prompts, and is discarded.
    """
    checkpoint = None if newest is None else checkpoints.state(newest)
    ledger, ended = Ledger(), Ended()
    if checkpoint is not None:
        if checkpoint.run_id != run_id:
            raise ServiceError(
                f"{checkpoints.path(checkpoint.version)} is of run {checkpoint.run_id!r}, not {run_id!r}; give run.id that name, or "
                "set checkpointing.checkpoint_dir to another folder"
            )
        ledger = Ledger.decode(checkpoints.file(checkpoint.version, TRAINED))
        ended = read_ended(checkpoint, checkpoints)
        ended = ended.without(order for orders in retried[checkpoint.retries or 0 :] for order in orders)
    ended_bitmap = ended_orders(ended)
    found = await retry(replay.state)
    version = 0 if checkpoint is None else checkpoint.version
    timeline = secrets.token_hex(8)
    steps = {} if checkpoint is None else checkpoints.ledger(version)
    reason = restore_reason(checkpoint, found, min(steps, default=-1))
    if reason is None:
        differing = await differing_step(replay, retry, steps)
        if differing is not None:
            reason = f"it holds another batch of step {differing} than the one that was trained"
    if reason is None and checkpoint is None and afresh:
        reason = "it was filled under another configuration, or with other prompts"
    if reason is None:
        run = await retry(lambda: replay.rewind(version, timeline))
        log.info("resuming from version %d", version)
    else:
        incarnation = secrets.token_hex(8)
        log.warning("the buffer is rebuilt from version %d: %s", version, reason)
        taken = ledger.trained | ended_bitmap
        last = int(taken.max()) if taken else -1
        run = await retry(lambda: replay.restore(version, timeline, incarnation, last, ended))
    await asyncio.to_thread(checkpoints.start, timeline, version)
    return ResumeState(
        version=version,
        timeline=timeline,
        ancestors=(*checkpoint.ancestors, checkpoint.timeline) if checkpoint else (),
        incarnation=run.incarnation,
        ledger=ledger,
        ended=ended_orders(await retry(replay.read_ended)),
        enqueued=run.enqueued,
        refill=run.refill,
        previous_timeline=found.timeline,
        last_validation=found.validation if 0 <= found.validation < version else None,
    )


def has_lost_writes(resumed: ResumeState, run: RunState, reserved: int) -> bool:
    """Return whether the server lost writes (a failover, a power cut, an empty volume): the buffer is empty or in an earlier state of this
    run.

    Called when the buffer refuses this trainer or lacks a payload of its batch. After lost writes a restart restores the buffer. Otherwise
    another trainer has taken over the run, or there is a bug. `reserved` is the number of steps handed out to this trainer so far.
    """
    if run.timeline == resumed.timeline:
        return run.next_step < reserved
    untouched = run.committed < 0  # every trainer begins by committing version 0
    return untouched or run.timeline in (resumed.previous_timeline, *resumed.ancestors)
