"""A run whose learning rate destroys its policy, as a person starts it: it stops when it is told to, and can go back."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.net.service import EXIT_ALARM
from tests.support.command import said
from tests.support.up import DEMO, Up, demo_arguments

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_a_collapse_ends_the_run_with_a_code_of_its_own(tmp_path: Path, warm_model: Path) -> None:
    arguments = demo_arguments(
        tmp_path, warm_model, "checkpointing.save_period=2", "checkpointing.keep_top_k=null", "grpo.max_num_steps=30"
    )
    up = Up(
        DEMO, *arguments, "policy.optimizer.kwargs.lr=2e-2", "run.stop_on=[collapse]", output=tmp_path / "collapsed.out"
    )
    assert up.ends() == EXIT_ALARM, up.said()
    assert "the policy collapsed at step" in up.said()
    assert "headrace rewind demo 2" in up.said()
    run = tmp_path / "demo"
    assert (run / "curve.png").exists()
    assert "collapsed" in said("status", run)
    assert "collapsed" in said("runs", "--dir", tmp_path, columns=200)
    said("rewind", run, 2)
    again = Up(DEMO, *arguments, "grpo.max_num_steps=4", "run.stop_on=[]", output=tmp_path / "again.out")
    assert again.ends() == 0, again.said()
