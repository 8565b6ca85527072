"""The laws on a batch, checked where it is used: the buffer keeps them, the trainer takes nobody's word for it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import ServiceError
from headrace.replay import Reservation
from headrace.trajectory import Group, Score, Trajectory
from services.trainer.control.shares import Assignment


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
