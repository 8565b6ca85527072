"""The demo's pipeline as a person starts it, shortened: it learns, and what it leaves behind obeys the laws."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import load
from headrace_services.trainer.control.checkpoint import TRAINED, Checkpoints, Ledger
from headrace_services.trainer.telemetry.journal import Journal, surviving
from tests.support.ports import free_ports
from tests.support.up import Up

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "arithmetic_tiny.yaml"


def overrides(folder: Path, model: Path, *more: str) -> list[str]:
    redis, replay, reward, reward_http = free_ports(4)
    return [
        f"run.dir={folder}",
        "run.id=demo",
        f"policy.model_name={model}",
        f"replay.redis_port={redis}",
        f"replay.port={replay}",
        f"reward.port={reward}",
        f"reward.http_port={reward_http}",
        "grpo.max_val_samples=200",
        *more,
    ]


def journal(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def audit(run: Path, arguments: Sequence[str], steps: int) -> None:
    """Laws 1, 2 and 3 as the files of a finished run tell them."""
    config = load(DEMO, arguments)
    checkpoints = Checkpoints(config.checkpoint_folder, config.checkpointing)
    newest = checkpoints.newest()
    assert newest == steps
    batch = config.algorithm.num_prompts_per_step
    trained = Ledger.decode(checkpoints.file(newest, TRAINED)).trained
    assert len(trained) == steps * batch, "every step trained whole groups, none twice"
    for version in checkpoints.published():
        for step, groups in checkpoints.ledger(version).items():
            assert len(groups) == len(set(groups)) == batch, f"step {step}"
    train = {line["step"]: line["metrics"] for line in journal(run) if line["kind"] == "train"}
    assert sorted(train) == list(range(steps))
    assert all(metrics["max_trajectory_age"] <= config.algorithm.max_age for metrics in train.values())


def leftovers(folder: Path) -> list[str]:
    """Processes that still belong to the run: their command line names its folder."""
    mine = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            mine.append(words)
    return mine


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_and_keeps_its_laws_though_it_was_killed_on_the_way(tmp_path: Path, warm_model: Path) -> None:
    """SIGKILL of the supervisor in the middle of training leaves no orphan; `up` with the same id then finishes the run."""
    steps = 15
    arguments = overrides(tmp_path, warm_model, f"grpo.max_num_steps={steps}", "checkpointing.save_period=2")
    run = tmp_path / "demo"
    first = Up(DEMO, *arguments, output=tmp_path / "first.out")
    try:
        first.wait_for("step 3:")
    finally:
        left = first.stop(signal.SIGKILL)
    assert left == []
    assert not leftovers(tmp_path)

    second = Up(DEMO, *arguments, output=tmp_path / "second.out")
    assert second.process.wait(timeout=500) == 0, second.said()
    assert not leftovers(tmp_path)
    lines = surviving(Journal(run / "metrics.jsonl").read())
    assert any(line["kind"] == "rewind" and line["step"] >= 2 for line in journal(run)), "it went on from a checkpoint"
    assert [line.step for line in lines if line.kind == "train"] == list(range(steps))
    accuracy = {line.step: line.metrics["accuracy"] for line in lines if line.kind == "validation"}
    assert accuracy[0] <= 0.5
    assert accuracy[steps] >= accuracy[0] + 0.25
    audit(run, arguments, steps)
    assert (run / "curve.png").stat().st_size > 1000

    policy = run / "checkpoints" / f"step_{steps}" / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(policy).encode("1+2")
