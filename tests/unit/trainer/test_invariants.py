"""The laws on what was reserved and read, checked where it is used."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.errors import ServiceError
from headrace.records.score import Score
from headrace.replay import ReservedTrajectory
from headrace_services.trainer.control.rank import check_reservation
from headrace_services.trainer.learning.batch import check_invariants
from tests.unit.trainer.loop_cases import group, reservation, trajectory

RESERVED = ReservedTrajectory(
    group_id="g", index=0, key="key", reward=1.0, length=2, oldest_version=4, newest_version=5
)


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
    broken = check_invariants(RESERVED, trajectory(**changes), score, step=step, max_age=1, policy=policy)
    assert broken is None if law is None else law in (broken or "")


@pytest.mark.parametrize(("policy", "refused"), [("ordered", True), ("drop", True), ("mask", False)])
def test_law_2_a_token_over_age_is_refused_unless_it_is_masked(policy: str, refused: bool) -> None:
    broken = check_invariants(RESERVED, trajectory(), Score("SCORED", 1.0), step=6, max_age=1, policy=policy)
    assert ("law 2" in (broken or "")) is refused


def test_law_3_a_batch_is_complete_groups() -> None:
    whole = reservation("a", "b")
    check_reservation(whole, [group("a"), group("b")], 2)
    for wrong, groups in (
        (reservation("a"), [group("a")]),
        (reservation("a", "a"), [group("a"), group("a")]),
        (whole, [group("a"), group("b", n=3)]),
        (msgspec.structs.replace(whole, trajectories=whole.trajectories[::-1]), [group("a"), group("b")]),
        (
            msgspec.structs.replace(whole, trajectories=whole.trajectories[:1] * 2 + whole.trajectories[2:]),
            [group("a"), group("b")],
        ),
    ):
        with pytest.raises(ServiceError, match="law 3"):
            check_reservation(wrong, groups, 2)
