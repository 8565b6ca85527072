"""Decides what a replica does next, and whether it samples for a call: pure functions of the buffer's last reply and the replica's own
state.

The only way to a lease is registered → acknowledged → transfer → verified, HEALTHY. From the announcement of an epoch that names it, a
replica leases nothing until it has verified the epoch, or until the epoch is over and it is still HEALTHY. A QUARANTINED replica is in no
epoch and leases nothing.

Calls of episodes are fenced like leases, but are not renewed here: a call runs to its end unless a rewind has undone the weights, or the
replica has left the fleet. A refit drains calls as it drains leases. A call that arrives meanwhile is refused, not queued. Its caller knows
its own deadlines and whether another replica can take the call; and a call held back here could never be released under weights that fail
their proof.
"""

from __future__ import annotations

import dataclasses

from headrace.net.replica_client import ReplicaFenced
from headrace.replay import Epoch, HeartbeatReply


@dataclasses.dataclass(frozen=True)
class Abort:
    """Stop generating under these lease tokens. The leases are already void, so nothing is returned. The groups of those in `complete` have
    all their trajectories."""

    tokens: frozenset[str]
    complete: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class EndCalls:
    """Stop sampling for the calls of these timelines, which end as fenced."""

    timelines: frozenset[str]


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


Action = Abort | EndCalls | Rejoin | Acknowledge | TakePart | LeaseGroups


@dataclasses.dataclass(frozen=True)
class WorkerState:
    """The input of a decision.

    `reply`: the reply to the newest heartbeat, which may be older than the replica's last action. `held`: tokens of the leases being
    generated. `calls`: timelines of the calls being sampled. `weights`: (timeline, version) of the engine's weights if they are verified.
    `answered`: the last epoch that the replica acknowledged, or that excluded it. `attempted`: the last epoch whose transfer it joined,
    whatever the outcome. `refitting`: that refit is still running. `torn`: it failed. One that `pulls` its weights has in `reply` an epoch
    of its own once newer ones are here.
    """

    replica: str
    reply: HeartbeatReply
    held: frozenset[str]
    calls: frozenset[str]
    weights: tuple[str, int] | None
    answered: str | None
    attempted: str | None
    refitting: bool
    torn: bool
    in_flight_updates: bool
    max_groups: int
    pulls: bool = False


def decide(now: WorkerState) -> list[Action]:
    """Return the next actions, in the order in which to take them."""
    if now.reply.state == "DEAD":
        # a refit that still runs belongs to the old id; it ends at its own deadline, or because the trainer continues without it
        ended: list[Action] = [Abort(now.held), *_end_calls(now.calls)]
        return ended if now.refitting else [*ended, Rejoin()]
    actions: list[Action] = []
    over = now.calls if now.reply.state == "QUARANTINED" else now.calls - {now.reply.timeline}
    actions += _end_calls(over)
    lost = now.held & frozenset(now.reply.lost)
    if lost:
        actions.append(Abort(lost, lost & frozenset(now.reply.complete)))
    held = now.held - lost
    epoch = _open_epoch(now)
    if now.refitting:
        return actions
    if epoch is not None and held and now.weights is not None:
        timeline, version = now.weights
        if timeline != epoch.timeline and version > epoch.version:
            # a rewind keeps no lease under later weights: the buffer lost the write that this replica has them
            return [*actions, *_end_calls(now.calls - over), Abort(held), Rejoin()]
    if epoch is not None:
        return [*actions, *_join(now, epoch, busy=bool(held or now.calls - over))]
    if now.reply.state == "HEALTHY" and now.torn:
        # the buffer accepted the verification but its reply was lost: the engine is paused, and would hold its leases forever
        return [*actions, *_end_calls(now.calls - over), Rejoin()]
    if now.reply.state == "HEALTHY" and len(held) < now.max_groups:
        actions.append(LeaseGroups(now.max_groups - len(held)))
    return actions


def _open_epoch(now: WorkerState) -> Epoch | None:
    """Return the newest epoch if it is open and this replica still has a part in it."""
    epoch = now.reply.epoch
    if epoch is None or epoch.state not in ("announced", "transfer") or now.replica not in epoch.members:
        return None
    return None if epoch.id == now.attempted else epoch


def _end_calls(timelines: frozenset[str]) -> list[Action]:
    return [EndCalls(timelines)] if timelines else []


def _join(now: WorkerState, epoch: Epoch, *, busy: bool) -> list[Action]:
    if epoch.state == "transfer":
        drains = now.pulls and busy and not now.in_flight_updates
        return [TakePart(epoch)] if now.replica in epoch.acknowledged and not drains else []
    waits_for_trainer = now.replica in epoch.acknowledged or epoch.id == now.answered
    if waits_for_trainer or (busy and not now.in_flight_updates):
        return []
    return [Acknowledge(epoch)]


def timeline_of_call(timeline: str, weights: tuple[str, int] | None, reply: HeartbeatReply) -> str:
    """Return the timeline on which a call goes on: the run's, if a rewind went back to weights that descend from those that it is of."""
    goes_on = reply.descends and weights is not None and weights[0] == timeline
    return reply.timeline if goes_on else timeline


def fence(now: WorkerState, timeline: str, min_version: int) -> ReplicaFenced | None:
    """Return why this replica can't sample now for a call of `timeline` that needs weights of `min_version` or newer, or None if it can."""
    if now.reply.timeline != timeline:
        return ReplicaFenced(
            "timeline", f"the call is of timeline {timeline!r}, the replica's current one is {now.reply.timeline!r}"
        )
    if now.torn:
        return ReplicaFenced("unhealthy", "the replica's weights are not verified; call another replica")
    if (now.refitting or _open_epoch(now) is not None) and (now.weights is None or not now.in_flight_updates):
        return ReplicaFenced(
            "refit", "the replica takes no calls until its refit is over; retry, or call another replica"
        )
    if now.reply.state != "HEALTHY" or now.weights is None:
        return ReplicaFenced("unhealthy", f"the replica is {now.reply.state}; call another replica")
    if now.weights[0] != timeline:
        return ReplicaFenced("timeline", f"the replica's weights are of timeline {now.weights[0]!r}, not {timeline!r}")
    if now.weights[1] < min_version:
        return ReplicaFenced(
            "stale",
            f"the replica's weights are version {now.weights[1]}; the call needs version {min_version} or newer",
        )
    return None
