"""The benchmark of a rank that dies, at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest
import rich

from benchmarks.dead_rank import CASES, Outcome, measure, table

pytestmark = pytest.mark.slow


@pytest.mark.nightly  # test_resume.py has every moment by day; this is torchrun and all services
def test_a_rank_that_dies_costs_a_step_or_two_and_changes_no_loss(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "memory").mkdir()
    snapshots = {"save_period": 10, "snapshot_dir": str(tmp_path / "memory")}
    outcomes = []
    for kill_after, checkpointing in ((6, {}), (3, snapshots)):
        folder = tmp_path / str(kill_after)
        folder.mkdir()
        outcomes.append(measure(folder, tiny_model, 6, kill_after, checkpointing))
    straight, killed = outcomes
    assert killed.losses == straight.losses
    assert len(killed.losses) == 6
    assert (straight.steps_again, straight.next_step_s) == (0, 0)
    assert killed.steps_again <= 2
    assert killed.next_step_s > 0


def test_the_table_says_how_many_losses_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {0: 0.5, 1: 0.25}
    outcomes = [Outcome(0.1, 9.0, 1, 4, {**losses, 1: 0.25 + 1e-9 * case}) for case, _ in enumerate(CASES)]
    rich.print(table(outcomes))
    assert "1 of 2" in capsys.readouterr().out
