"""The laws on what was reserved and read, checked where it is used."""

from __future__ import annotations

import dataclasses

import pytest
from loop_cases import group, reservation, trajectory
from services.trainer.control.laws import check_batch, law_broken
from services.trainer.control.shares import Assignment

from headrace.errors import ServiceError
from headrace.trajectory import Score


@pytest.mark.parametrize(
    ("changes", "score", "step", "law"),
    [
        ({}, Score("SCORED", 1.0), 5, None),
        ({}, Score("SCORED", 1.0), 4, "law 2"),
        ({"index": 1}, Score("SCORED", 1.0), 5, "law 3"),
        ({"group_id": "h"}, Score("SCORED", 1.0), 5, "law 3"),
        ({}, Score("FAILED", message="no"), 5, "law 7"),
        ({}, Score("SCORED", 0.0), 5, "law 7"),
    ],
)
@pytest.mark.parametrize("policy", ["ordered", "drop", "mask"])
def test_laws_2_3_and_7_on_what_was_read(
    changes: dict[str, object], score: Score, step: int, law: str | None, policy: str
) -> None:
    assignment = Assignment("key", "g", 0, 1.0, 1.0, 0, 0)
    broken = law_broken(assignment, trajectory(**changes), score, step, 1, policy)
    assert broken is None if law is None else law in (broken or "")


@pytest.mark.parametrize(("policy", "refused"), [("ordered", True), ("drop", True), ("mask", False)])
def test_law_2_a_token_over_age_is_refused_unless_it_is_masked(policy: str, refused: bool) -> None:
    assignment = Assignment("key", "g", 0, 1.0, 1.0, 0, 0)
    broken = law_broken(assignment, trajectory(), Score("SCORED", 1.0), 6, 1, policy)
    assert ("law 2" in (broken or "")) is refused


def test_law_3_a_batch_is_complete_groups() -> None:
    whole = reservation("a", "b")
    check_batch(whole, [group("a"), group("b")], 2)
    for wrong, groups in (
        (reservation("a"), [group("a")]),
        (reservation("a", "a"), [group("a"), group("a")]),
        (whole, [group("a"), group("b", n=3)]),
        (dataclasses.replace(whole, trajectories=whole.trajectories[::-1]), [group("a"), group("b")]),
    ):
        with pytest.raises(ServiceError, match="law 3"):
            check_batch(wrong, groups, 2)
