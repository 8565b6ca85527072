"""Decisions about the members of an epoch, as pure functions of the epoch and the fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.replay import Epoch, Replica


def dead(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Return the members that are DEAD or quarantined, or have left the fleet."""
    living = {replica.id for replica in fleet if replica.takes_part}
    return frozenset(member for member in epoch.members if member not in living)


def find_awaited(epoch: Epoch, fleet: Iterable[Replica], excluded: Iterable[str]) -> frozenset[str]:
    """Return the replicas of an announced epoch whose acknowledgement is still worth waiting for."""
    answered = frozenset(epoch.acknowledged) | frozenset(epoch.refused)
    return frozenset(epoch.members) - answered - dead(epoch, fleet) - frozenset(excluded)


def find_lost(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Return the members that an epoch in transfer has lost; without them the collective can't complete."""
    return dead(epoch, fleet) | frozenset(epoch.refused)


def find_unsettled(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Return the members that may still verify, once the transfer is over."""
    return frozenset(epoch.members) - frozenset(epoch.verified) - find_lost(epoch, fleet)


def at_fault(epoch: Epoch) -> frozenset[str]:
    """Return the members that broke the collective themselves, and would break the next one."""
    return frozenset(epoch.refused) - frozenset(epoch.interrupted)


def find_late(received: Sequence[int], ranks: Mapping[str, range]) -> dict[str, int]:
    """Return the members that have received less than others, each with how many buckets it has: as many as the worker that has the fewest.
    `received` is of each rank from 1 on; `ranks` are each member's."""
    counts = {member: min(received[rank - 1] for rank in own) for member, own in ranks.items()}
    most = max(counts.values(), default=0)
    return {member: count for member, count in counts.items() if count < most}
