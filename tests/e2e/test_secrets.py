"""Secrets that a run takes from its environment, in keys of every kind, are nowhere in what it leaves behind: its folder with checkpoints,
samples, journal and logs, the files of its trackers, and what it printed. With its real trainer, as a person starts it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.up import DEMO, ROOT, Up, demo_arguments

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

SECRETS = {
    "HR_TOKEN": "canary-token",  # for `${oc.env:…}`
    "HEADRACE_LOGGER__WANDB__NAME": "canary-name",
    "HEADRACE_ENV__SPARE": "{type: regex, pattern: canary-pattern}",
    "HEADRACE_POLICY__TOKENIZER__CHAT_TEMPLATE_KWARGS": "{deep: [canary-deep]}",
}


def test_no_secret_of_the_environment_is_in_what_a_run_leaves_behind(tmp_path: Path, warm_model: Path) -> None:
    arguments = [
        *demo_arguments(
            tmp_path, warm_model, "grpo.max_num_steps=2", "grpo.val_period=0", "checkpointing.save_period=1"
        ),
        *("logger.tensorboard_enabled=true", "logger.mlflow_enabled=true", "logger.wandb.project=${oc.env:HR_TOKEN}"),
    ]
    run = Up(DEMO, *arguments, output=tmp_path / "said", environ=os.environ | SECRETS, cwd=ROOT)
    try:
        assert run.ends() == 0, run.said()
    finally:
        if run.process.poll() is None:
            run.process.kill()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert {"config.yaml", "metrics.jsonl", "mlflow.db", "model.safetensors", "trainer.log"} <= names, names
    assert any(name.startswith("events.out") for name in names), names
    assert [path for path in written if b"canary" in path.read_bytes()] == []
