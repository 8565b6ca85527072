"""Which rank trains on what of a batch, and the laws on it, checked where it is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from headrace.errors import ServiceError
from headrace.replay import Reservation
from headrace.trajectory import Group, Score, Trajectory
from services.trainer.learning.experience import split_across_ranks, split_groups_across_ranks


def check_batch(reservation: Reservation, groups: Sequence[Group], prompts_per_step: int) -> None:
    """Law 3 on what was reserved: P groups, each with n trajectories of distinct indices, in order. Raises `ServiceError`."""
    if len(reservation.groups) != prompts_per_step or len(set(reservation.groups)) != prompts_per_step:
        raise ServiceError(
            f"step {reservation.step}: {len(reservation.groups)} groups were reserved, not {prompts_per_step} different ones "
            "(law 3)"
        )
    expected = [group.id for group in groups for _ in range(group.n)]
    found = [(t.group_id, t.index) for t in reservation.trajectories]
    if [group_id for group_id, _ in found] != expected or len(set(found)) != len(found):
        raise ServiceError(
            f"step {reservation.step}: the reserved trajectories are not those of complete groups (law 3)"
        )


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


def law_broken(
    assignment: Assignment, trajectory: Trajectory, score: Score, step: int, max_age: int, policy: str
) -> str | None:
    """Laws 2, 3 and 7 on what was read, checked where it is used: the sentence that says what is wrong, or None.

    Under the age policy `mask` law 2 is kept token by token, by what goes into the loss.
    """
    where = f"step {step}: trajectory {assignment.group_id!r}[{assignment.index}]"
    if (trajectory.group_id, trajectory.index) != (assignment.group_id, assignment.index):
        return f"{where} was reserved, {trajectory.group_id!r}[{trajectory.index}] was read (law 3)"
    if policy != "mask" and step - trajectory.oldest_version > max_age:
        return f"{where} has tokens of version {trajectory.oldest_version}, older than {max_age} steps (law 2)"
    if trajectory.newest_version > step:
        return (
            f"{where} has tokens of version {trajectory.newest_version}, which these weights do not come from (law 2)"
        )
    if score.status != "SCORED" or score.reward != assignment.reward:
        return f"{where} was reserved with reward {assignment.reward}, its score says {score.status} {score.reward} (law 7)"
    return None
