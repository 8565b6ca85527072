"""Decides what a replica does next: a pure function of the buffer's last reply and the replica's own state.

The only way to a lease is registered → acknowledged → transfer → verified, HEALTHY. From the announcement of
an epoch that names it, a replica leases nothing until it has verified the epoch, or until the epoch is over and it is still HEALTHY.
One that is QUARANTINED is in no epoch, and leases nothing.
"""

from __future__ import annotations

import dataclasses

from headrace.replay import Epoch, HeartbeatReply


@dataclasses.dataclass(frozen=True)
class Abort:
    """Stop generating under these lease tokens; the leases are already void, so nothing is returned. Those in `complete` are of groups that
    have all their trajectories."""

    tokens: frozenset[str]
    complete: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """Leave the fleet and re-enter it under a new id, as STALE, because the buffer's record of this replica is wrong."""


@dataclasses.dataclass(frozen=True)
class Acknowledge:
    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class TakePart:
    """Join the collective of `epoch`, receive, verify."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class LeaseGroups:
    count: int


Action = Abort | Rejoin | Acknowledge | TakePart | LeaseGroups


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """The input of a decision.

    `reply` answers the newest heartbeat; it may be older than the replica's last action. `held`: tokens of the leases being
    generated. `answered`: the last epoch that the replica acknowledged, or that excluded it. `attempted`: the last epoch whose transfer
    it joined, whatever the outcome; `refitting`: that refit is still running; `torn`: it failed. `holds_weights`: the replica already
    computes with the announced weights.
    """

    replica: str
    reply: HeartbeatReply
    held: frozenset[str]
    answered: str | None
    attempted: str | None
    refitting: bool
    torn: bool
    holds_weights: bool
    in_flight_updates: bool
    max_groups: int


def decide(now: WorkerState) -> list[Action]:
    """The next actions, in the order in which to take them."""
    if now.reply.state == "DEAD":
        # a refit that still runs belongs to the old id; it ends by its own deadline, or because the trainer went on without it
        return [Abort(now.held)] if now.refitting else [Abort(now.held), Rejoin()]
    actions: list[Action] = []
    lost = now.held & frozenset(now.reply.lost)
    if lost:
        actions.append(Abort(lost, lost & frozenset(now.reply.complete)))
    held = now.held - lost
    epoch = _open_epoch(now)
    if now.refitting:
        return actions
    if epoch is not None:
        return [*actions, *_join(now, epoch, held)]
    if now.reply.state == "HEALTHY" and now.torn:
        # the buffer accepted the verification, but its answer was lost: the engine is paused, and would hold its leases forever
        return [*actions, Rejoin()]
    if now.reply.state == "HEALTHY" and len(held) < now.max_groups:
        actions.append(LeaseGroups(now.max_groups - len(held)))
    return actions


def _open_epoch(now: WorkerState) -> Epoch | None:
    """The newest epoch, if it is open and this replica still has a part in it."""
    epoch = now.reply.epoch
    if epoch is None or epoch.state not in ("announced", "transfer") or now.replica not in epoch.members:
        return None
    return None if epoch.id == now.attempted else epoch


def _join(now: WorkerState, epoch: Epoch, held: frozenset[str]) -> list[Action]:
    if epoch.state == "transfer":
        return [TakePart(epoch)] if now.replica in epoch.acknowledged else []
    waits_for_trainer = now.replica in epoch.acknowledged or epoch.id == now.answered
    drains = bool(held) and not now.in_flight_updates and not now.holds_weights
    if waits_for_trainer or drains:
        return []
    return [Acknowledge(epoch)]
