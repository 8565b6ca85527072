"""The demo's pipeline as a person starts it, shortened: it learns, and what it leaves behind obeys the laws."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import load
from headrace.service import bind
from services.trainer.control.checkpoint import TRAINED, Checkpoints, Ledger

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "arithmetic_tiny.yaml"


def free_ports(count: int) -> list[int]:
    sockets = [bind("127.0.0.1", 0, "a free port") for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


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


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "headrace.cli", "up", str(DEMO), *arguments]


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
@pytest.mark.timeout(600)
def test_the_demo_learns_and_keeps_its_laws(tmp_path: Path, warm_model: Path) -> None:
    steps = 15
    arguments = overrides(tmp_path, warm_model, f"grpo.max_num_steps={steps}", "checkpointing.save_period=5")
    done = subprocess.run(command(arguments), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "demo"
    accuracy = {line["step"]: line["metrics"]["accuracy"] for line in journal(run) if line["kind"] == "validation"}
    assert accuracy[0] <= 0.5
    assert accuracy[steps] >= accuracy[0] + 0.25
    audit(run, arguments, steps)
    assert (run / "curve.png").stat().st_size > 1000
    assert not leftovers(tmp_path)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = run / "checkpoints" / f"step_{steps}" / "policy"
    assert AutoModelForCausalLM.from_pretrained(policy).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(policy).encode("1+2")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_with_its_supervisor_leaves_no_orphan_and_goes_on(tmp_path: Path, warm_model: Path) -> None:
    """SIGKILL of the supervisor in the middle of training; `up` with the same id then finishes the run."""
    steps = 8
    arguments = overrides(
        tmp_path,
        warm_model,
        f"grpo.max_num_steps={steps}",
        "checkpointing.save_period=2",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "grpo.val_period=0",
    )
    run = tmp_path / "demo"
    first = subprocess.Popen(command(arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("step 3:"):
                break
        else:
            pytest.fail(f"the run ended before step 3 with {first.wait()}")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    deadline_processes = [
        psutil.Process(p.pid)
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    psutil.wait_procs(deadline_processes, timeout=60)
    assert not leftovers(tmp_path)

    done = subprocess.run(command(arguments), cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = journal(run)
    assert any(line["kind"] == "rewind" and line["step"] >= 2 for line in lines), "it went on from a checkpoint"
    from services.trainer.telemetry.journal import Journal, surviving

    train = [line.step for line in surviving(Journal(run / "metrics.jsonl").read()) if line.kind == "train"]
    assert train == list(range(steps))
    config = load(DEMO, arguments)
    trained = Checkpoints(config.checkpoint_folder, config.checkpointing).file(steps, TRAINED)
    assert len(Ledger.decode(trained).trained) == steps * config.algorithm.num_prompts_per_step
