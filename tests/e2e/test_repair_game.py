"""`headrace up` with the game of two turns in `examples/`, shortened: what its program plays is trained, and shown by its metrics."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from headrace.checkpoints import published
from headrace_services.trainer.telemetry.metric_names import unknown
from tests.support.ports import free_ports
from tests.support.up import Up

ROOT = Path(__file__).parents[2]
SMALL = (
    "num_prompts_per_step=4",
    "num_generations_per_prompt=4",
    "max_num_steps=2",
    "val_at_start=false",
    "max_val_samples=4",
)


@pytest.mark.nightly  # test_agents.py trains two turns on the real services; test_repair_game.py plays the example every day
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_game_of_two_turns_is_trained(tmp_path: Path, tiny_model: Path) -> None:
    names = ("replay.redis_port", "replay.port", "reward.port", "reward.http_port")
    ports = [f"{name}={port}" for name, port in zip(names, free_ports(len(names)), strict=True)]
    small = [f"grpo.{setting}" for setting in SMALL]
    own = [f"run.dir={tmp_path}", "run.id=game", f"policy.model_name={tiny_model}"]
    up = Up(ROOT / "examples" / "repair_game.yaml", *own, *ports, *small, output=tmp_path / "up.log", cwd=ROOT)
    try:
        assert up.ends() == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
    run = tmp_path / "game"
    assert published(run / "checkpoints")[-1] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert len(steps) == 2
    for metrics in steps:
        # random weights: hardly any first answer is right, and the second turn is played
        assert 1 < metrics["episode_calls/repair"] <= 2
        assert {"reward/first", "reward/second", "episode_roots/repair"} <= metrics.keys()
        # both turns are trained, and the problem is there twice
        wrote, prompts = metrics["mean_gen_tokens_per_sample"], metrics["mean_prompt_length"]
        assert metrics["mean_total_tokens_per_sample"] > wrote + prompts
        assert unknown(metrics) == []
