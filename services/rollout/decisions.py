"""What a replica does next: a pure function of what the buffer last said and of what the replica holds.

The way to a lease is registered → acknowledged → transfer → verified, HEALTHY. There is no other: from the announcement of
an epoch that names it, a replica leases nothing until it has verified the epoch, or the epoch is over and it is HEALTHY still.
"""

from __future__ import annotations

import dataclasses

from headrace.replay import Epoch, HeartbeatReply


@dataclasses.dataclass(frozen=True)
class Abort:
    """Stop generating under these tokens; the leases are void already, so nothing is handed back. The groups of `complete` among them have
    their trajectories."""

    tokens: frozenset[str]
    complete: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Reenter:
    """What the fleet counts this replica as, it is not (or no longer): leave, and enter again under a new id, as STALE."""


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


Action = Abort | Reenter | Acknowledge | TakePart | LeaseGroups


@dataclasses.dataclass(frozen=True)
class Situation:
    """`reply` answers the newest heartbeat; it may be older than what this replica did since. `held`: tokens of leases being
    generated. `answered`: the last epoch it acknowledged (or was told not to come to). `attempted`: the last one whose transfer it
    joined, whatever came of it; `refitting`: that still runs, `torn`: it failed. `holds_weights`: it computes with the announced
    weights already."""

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


def decide(now: Situation) -> list[Action]:
    """Actions in the order in which to take them."""
    if now.reply.state == "DEAD":
        # a refit that still runs belongs to the old id; it ends by its own deadline, or because the trainer went on without it
        return [Abort(now.held)] if now.refitting else [Abort(now.held), Reenter()]
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
        # the buffer took the proof, but its answer was lost: the engine is paused, and would keep for ever what it leases
        return [*actions, Reenter()]
    if now.reply.state == "HEALTHY" and len(held) < now.max_groups:
        actions.append(LeaseGroups(now.max_groups - len(held)))
    return actions


def _open_epoch(now: Situation) -> Epoch | None:
    """The newest epoch, if it is open and this replica has a part in it still to come."""
    epoch = now.reply.epoch
    if epoch is None or epoch.state not in ("announced", "transfer") or now.replica not in epoch.members:
        return None
    return None if epoch.id == now.attempted else epoch


def _join(now: Situation, epoch: Epoch, held: frozenset[str]) -> list[Action]:
    if epoch.state == "transfer":
        return [TakePart(epoch)] if now.replica in epoch.acknowledged else []
    waits_for_trainer = now.replica in epoch.acknowledged or epoch.id == now.answered
    drains = bool(held) and not now.in_flight_updates and not now.holds_weights
    if waits_for_trainer or drains:
        return []
    return [Acknowledge(epoch)]
