"""A run as a person starts it, two engines and validation beside training: it trains as ever, and each result is of one version."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import load
from headrace.run.journal import Journal
from tests.support.up import DEMO, Up, demo_arguments

# two engines take a minute of a core to start, and tests/integration/trainer/test_validation_beside.py has the decisions by day
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS = 8


def test_law_2_one_engine_validates_while_the_other_goes_on(tmp_path: Path, warm_model: Path) -> None:
    wanted = ["rollout.replicas=2", "trainer.validation_replicas=1", f"grpo.max_num_steps={STEPS}", "grpo.val_period=2"]
    arguments = demo_arguments(tmp_path, warm_model, *wanted, "grpo.val_at_start=false")
    up = Up(DEMO, *arguments, output=tmp_path / "up.log")
    assert up.ends() == 0, up.said()
    config = load(DEMO, arguments)
    lines = Journal(config.run_folder / "metrics.jsonl").read()
    train = [line.metrics for line in lines if line.kind == "train"]
    assert len(train) == STEPS
    assert all(metrics["max_trajectory_age"] <= config.algorithm.max_age for metrics in train)
    validations = {line.step: line.metrics for line in lines if line.kind == "validation"}
    assert sorted(validations) == [2, 4, 6, 8]
    for version, metrics in validations.items():
        assert metrics["failed"] == 0
        if metrics["evaluated"]:
            assert metrics["evaluated"] == 200
            assert metrics["version_min"] == metrics["version_max"] == version
    said = (config.run_folder / "logs" / "trainer.log").read_text()
    assert "is validated beside training, by rollout-" in said
