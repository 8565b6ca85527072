"""Samples that a bound removed are told apart from those that never were."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.run.sample_files import SampleFiles
from tests.support.command import refused, said
from tests.support.past_run import past_run


@pytest.mark.parametrize(
    ("keep", "most_bytes", "bound", "removed"),
    [(2, 10**6, "logger.keep_step_data=2", "steps 0 to 1"), (20, 1, "logger.keep_step_data_bytes=1", "steps 0 to 2")],
)
def test_commands_name_the_bound_that_removed_samples(
    tmp_path: Path, keep: int, most_bytes: int, bound: str, removed: str
) -> None:
    keys = f"{{keep_step_data: {keep}, keep_step_data_bytes: {most_bytes}}}"
    run = past_run(tmp_path, "adder", 4, logger=keys)
    files = SampleFiles(run / "logs", keep, most_bytes)
    for step in range(4):
        files.write("train", step, [{}])
    # terminals break lines anywhere
    status = " ".join(said("status", "--run", run).split())
    assert f"those of {removed} were removed by the bound {bound}" in status
    assert bound in refused("samples", run, "--step", 0)
    assert bound not in refused("samples", run, "--step", 9)


def test_samples_that_no_bound_removed_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    """As in a folder that was copied in part."""
    run = past_run(tmp_path, "adder", 4)
    SampleFiles(run / "logs", None).write("train", 3, [{}])
    assert "those of steps 0 to 2 were moved, not copied" in " ".join(said("status", "--run", run).split())


def test_a_run_without_samples_lost_none_to_a_bound(tmp_path: Path) -> None:
    run = past_run(tmp_path, "adder", 4)
    assert "removed" not in said("status", "--run", run)
    assert "not copied with the run" in " ".join(refused("samples", run).split())
