"""Where a trainer resumes: what it rewinds to, what it restores, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyroaring import BitMap

from headrace.base.errors import ServiceError
from headrace_services.trainer.control.checkpoint import CheckpointState, Ledger
from headrace_services.trainer.control.resume import ResumeState, check_prompts, has_lost_writes, restore_reason
from tests.unit.trainer.loop_cases import run_state

CHECKPOINT = CheckpointState(version=4, timeline="line", incarnation="home", cursor=8, run_id="r")


def test_start_rewinds_where_the_buffer_knows_the_checkpoint() -> None:
    assert restore_reason(CHECKPOINT, run_state()) is None
    assert restore_reason(CHECKPOINT, run_state(next_step=4)) is None
    # one that was set back to an older checkpoint
    assert restore_reason(CHECKPOINT, run_state(next_step=9, committed=8)) is None
    assert restore_reason(None, run_state(committed=-1, next_step=3)) is None
    assert restore_reason(None, run_state(committed=0, next_step=0)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": "other", "next_step": 0, "committed": -1}, "another incarnation"),
        ({"next_step": 3, "committed": 2}, "3 steps, fewer than the 4"),
        ({"timelines": (("first", 0), ("other", 2))}, "does not come from timeline line"),
        ({"timelines": (("first", 0), ("line", 4))}, "does not come from timeline line"),
        ({"timelines": ()}, "does not come from timeline line"),
    ],
)
def test_start_restores_where_the_buffer_lost_writes(changes: dict[str, object], reason: str) -> None:
    found = restore_reason(CHECKPOINT, run_state(**changes))
    assert found is not None
    assert reason in found


def test_start_restores_where_the_checkpoint_before_is_in_doubt() -> None:
    """A copy of `reserve` that came late may have brought back the steps in between, with other groups."""
    assert restore_reason(CHECKPOINT, run_state(committed=2), before=2) is None
    found = restore_reason(CHECKPOINT, run_state(committed=1), before=2)
    assert found is not None
    assert "newest published version is 1" in found


def test_start_refuses_a_run_whose_checkpoints_are_gone() -> None:
    with pytest.raises(ServiceError, match="has published version 1"):
        restore_reason(None, run_state(committed=1))


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"next_step": 6}, True),  # its own timeline, at an earlier step
        ({"next_step": 7}, False),  # it holds the step, and refuses all the same
        ({"timeline": "before"}, True),  # its rewind is gone
        ({"timeline": "line"}, True),  # so are those before it
        ({"timeline": "fresh", "committed": -1, "next_step": 0}, True),  # an empty volume
        ({"timeline": "other"}, False),
        ({"timeline": "other", "committed": 0}, False),
    ],
)
def test_a_buffer_that_lost_writes_is_told_from_one_taken_over(changes: dict[str, object], lost: bool) -> None:
    resumed = ResumeState(
        version=4, timeline="now", ancestors=("first", "line"), incarnation="home", ledger=Ledger(), ended=BitMap(),
        enqueued=20, refill=False, previous_timeline="before",
    )  # fmt: skip
    assert has_lost_writes(resumed, run_state(**changes), reserved=7) is lost


def test_other_prompts_than_those_of_the_checkpoint_are_refused() -> None:
    folder = Path("runs/r/checkpoints/step_4")
    check_prompts(CHECKPOINT, folder, "now")  # of a build that took no digest
    taken = CHECKPOINT.model_copy(update={"prompts": "then"})
    check_prompts(taken, folder, "then")
    with pytest.raises(ServiceError, match=r"Restore.*policy\.model_name=runs/r/checkpoints/step_4/policy"):
        check_prompts(taken, folder, "now")
