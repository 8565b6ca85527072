"""Decisions about the members of an epoch, as pure functions of the epoch and the fleet."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.replay import Epoch, Replica


def dead(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Members that are DEAD or quarantined, or have left the fleet."""
    living = {replica.id for replica in fleet if replica.takes_part}
    return frozenset(member for member in epoch.members if member not in living)


def awaited(epoch: Epoch, fleet: Iterable[Replica], excluded: Iterable[str]) -> frozenset[str]:
    """Replicas of an announced epoch whose acknowledgement is still worth waiting for."""
    answered = frozenset(epoch.acknowledged) | frozenset(epoch.refused)
    return frozenset(epoch.members) - answered - dead(epoch, fleet) - frozenset(excluded)


def lost(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Members that an epoch in transfer has lost; without them the collective can't complete."""
    return dead(epoch, fleet) | frozenset(epoch.refused)


def unsettled(epoch: Epoch, fleet: Iterable[Replica]) -> frozenset[str]:
    """Members that may still verify, once the transfer is over."""
    return frozenset(epoch.members) - frozenset(epoch.verified) - lost(epoch, fleet)


def interrupted(epoch: Epoch) -> bool:
    """Whether some member did not get all the bytes through no fault of its own."""
    return bool(epoch.interrupted)


def at_fault(epoch: Epoch) -> frozenset[str]:
    """Members that broke the collective themselves, and would break the next one."""
    return frozenset(epoch.refused) - frozenset(epoch.interrupted)


def choose_backend(configured: str, *, trainer_on_gpu: bool, devices: Iterable[str]) -> str:
    """Resolve `auto`: nccl if the trainer and all replicas (by the device they registered) run on GPUs, else gloo."""
    if configured != "auto":
        return configured
    return "nccl" if trainer_on_gpu and all(device == "cuda" for device in devices) else "gloo"
