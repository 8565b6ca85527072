"""The ranks' launcher: its exit code is that of the rank that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.net.service import EXIT_INTERNAL_ERROR
from headrace_services.trainer import launch


@pytest.mark.parametrize(
    ("end", "code"),
    [
        # a code that is passed on as it is; the other one is made of a signal
        pytest.param(f"sys.exit({EXIT_INTERNAL_ERROR})", EXIT_INTERNAL_ERROR, marks=pytest.mark.nightly),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("sys.exit(0)", 0, marks=pytest.mark.nightly),  # every run of two ranks ends so
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(tmp_path: Path, end: str, code: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {end}\nelif {code}:\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "headrace_services.trainer.launch", "2", str(script)]
    assert subprocess.run(command, timeout=240).returncode == code


def test_ranks_of_several_machines_meet_where_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(launch, "torchrun", seen.append)
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:29500"]
    assert launch.main(["6", *meeting, "-m", "headrace.cli", "trainer"]) == 0
    assert launch.main(["6", "-m", "headrace.cli", "trainer"]) == 0
    assert seen[0] == ["--nproc-per-node", "6", *meeting, "-m", "headrace.cli", "trainer"]
    assert seen[1][0] == "--standalone"
