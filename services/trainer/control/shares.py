"""Which rank trains on what of a batch: planned on rank 0, from lengths alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.replay import Reservation
from headrace.trajectory import Group


@dataclasses.dataclass(frozen=True)
class Assignment:
    """One trajectory of a batch, as rank 0 gives it to the rank that trains on it: `place` is its own in the batch, `group` its
    group's."""

    key: str
    group_id: str
    index: int
    reward: float
    loss_multiplier: float
    group: int
    place: int


def assign(
    reservation: Reservation, groups: Sequence[Group], ranks: int, optimizer_step: int, *, whole_groups: bool = False
) -> list[list[Assignment]]:
    """Each rank's share of a batch: of the trajectories of every optimizer step (`optimizer_step` of them), about equally many tokens.

    With `whole_groups` those of a group go to one rank, so that they can share its prompt.
    """
    batch = reservation.trajectories
    place_of = {group.id: place for place, group in enumerate(groups)}
    shares: list[list[Assignment]] = [[] for _ in range(ranks)]
    for first in range(0, len(batch), optimizer_step):
        step = batch[first : first + optimizer_step]
        lengths, own = [t.length for t in step], [place_of[t.group_id] for t in step]
        split = split_groups_across_ranks(lengths, own, ranks) if whole_groups else split_across_ranks(lengths, ranks)
        for share, indices in zip(shares, split, strict=True):
            for place in (first + index for index in indices):
                one, group = batch[place], place_of[batch[place].group_id]
                multiplier = groups[group].loss_multiplier
                share.append(Assignment(one.key, one.group_id, one.index, one.reward, multiplier, group, place))
    return shares


def split_groups_across_ranks(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank, all of one of the `groups` on the same: the longest first, each to the rank that has least."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for own in sorted(members.values(), key=lambda own: -sum(lengths[i] for i in own)):
        rank = loads.index(min(loads))
        shares[rank].extend(own)
        loads[rank] += sum(lengths[i] for i in own)
    return [sorted(share) for share in shares]


def split_across_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: counts differ by at most one, lengths are dealt longest first, back and forth."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return [sorted(share) for share in shares]
