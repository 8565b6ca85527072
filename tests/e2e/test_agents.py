"""`headrace up` with a program that uses OpenAI's client over two turns: real services, a real engine, a real trainer. Its runner is killed
on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from headrace.run.checkpoints import find_published
from headrace.run.journal import JOURNAL, read_journal
from tests.support.up import Up
from tests.support.waiting import wait_until

HELD = Path(__file__).parents[1] / "support" / "held_program.py"
PROGRAM = Path(__file__).parents[1] / "support" / "repair_program.py"
STEPS = 6


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    settings: dict[str, Any] = {
        "run": {"id": "repair", "dir": str(tmp_path / "runs")},
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 4,
            "max_num_steps": STEPS,
            "val_period": 0,
            "val_at_end": False,
            "async_grpo": {"enabled": True, "in_flight_weight_updates": True},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {
            "model_name": str(tiny_model),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "train_micro_batch_size": 64,
            "generation": {"max_new_tokens": 6, "vllm_cfg": {"kv_cache_memory_bytes": 2**26}},
        },
        "data": {
            "default": {"dataset_name": "arithmetic", "task_config": {"digits": 2}, "env_name": "repair"},
            "train": {"size": 200, "seed": 1},
        },
        "env": {"repair": {"target": f"{PROGRAM}:Repair", "episodes": True, "public": ["answer"]}},
        "trainer": {"num_threads": 1},
        "logger": {"keep_step_data": None},
    }
    path = tmp_path / "repair.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


# chaos strikes runners every other day, and tests/integration/agents plays every day, both on light replicas; test_calls.py has an engine
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_turns_are_trained_though_their_runner_is_killed(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "repair"
    up = Up(config, output=tmp_path / "up.log", cwd=tmp_path)
    try:
        up.wait_for("step 0:")
        os.kill(up.pid_of("agents"), signal.SIGKILL)
        assert up.ends() == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
    assert find_published(run / "checkpoints")[-1] == STEPS
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("kind") == "train"]
    assert len(steps) == STEPS
    # the trainer's log-probabilities, at the weights that sampled, in the contexts of the record, are the engine's
    errors = [step["metrics"].get("on_policy_token_mult_prob_error") for step in steps]
    assert len(errors) > errors.count(None)
    assert all(error is None or error < 1.0001 for error in errors)
    # two turns: more than a single completion can have
    assert max(step["metrics"]["mean_gen_tokens_per_sample"] for step in steps) > 6
    log = (run / "logs" / "agents-1.log").read_text()
    assert "Traceback" not in log


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_programs_go_on_when_a_rank_of_the_trainer_dies(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that admission allows are between two turns, and what the trainer has is trained: it waits for them."""
    folder, journal = tmp_path / "held", tmp_path / "runs" / "repair" / JOURNAL
    (tmp_path / "memory").mkdir()
    folder.mkdir()
    monkeypatch.setenv("HELD_PROGRAM", str(folder))
    settings = yaml.safe_load(config.read_text())
    settings["env"]["repair"]["target"] = f"{HELD}:Held"
    settings["trainer"] |= {"num_processes": 2, "device": "cpu"}
    settings["checkpointing"] = {"snapshot_dir": str(tmp_path / "memory")}
    settings["agents"] = {"think_s": 600}  # longer than a rank takes to start again on a busy machine
    config.write_text(yaml.safe_dump(settings))
    per_step = settings["grpo"]["num_prompts_per_step"] * settings["grpo"]["num_generations_per_prompt"]

    def all_are_held() -> bool:
        begun, ended, held = (
            {".".join(path.name.split(".")[:2]) for path in folder.glob(f"*.{kind}")}
            for kind in ("began", "ended", "held")
        )
        steps = sum(line.kind == "train" for line in read_journal(journal))
        return len(begun) == (steps + 2) * per_step and begun == ended | held

    up = Up(config, output=tmp_path / "up.log", cwd=tmp_path)
    try:
        up.wait_for("step 1:")
        (folder / "hold").touch()
        wait_until(all_are_held)
        rewinds = _rewinds(journal)
        next(each for each in map(psutil.Process, up.started()) if each.environ().get("RANK") == "1").kill()
        wait_until(lambda: _rewinds(journal) > rewinds)
        (folder / "hold").unlink()
        assert up.ends() == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
    for each in folder.glob("*.held"):
        assert len([*folder.glob(f"{each.stem}.*.began")]) == 1
    trained = [line for line in read_journal(journal) if line.kind == "train"]
    assert [line.step for line in trained] == [*range(STEPS)]


def _rewinds(journal: Path) -> int:
    return sum(line.kind == "rewind" for line in read_journal(journal))
