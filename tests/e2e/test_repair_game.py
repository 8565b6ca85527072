"""`headrace up` with the game of two turns in `examples/`, shortened: what its program plays is trained, and shown by its metrics."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from headrace.run.checkpoints import find_published
from headrace.run.metric_names import unknown
from tests.support.up import ROOT, Up, own_run

SMALL = (
    "num_prompts_per_step=4",
    "num_generations_per_prompt=4",
    "max_num_steps=2",
    "val_at_start=false",
    "max_val_samples=4",
)


STEPS = 20


def up(tmp_path: Path, model: Path, *settings: str, within_s: float) -> list[dict[str, Any]]:
    """Run the example to its end; returns its metrics, line by line."""
    own = own_run(tmp_path, "game", model)
    run = Up(ROOT / "examples" / "repair_game.yaml", *own, *settings, output=tmp_path / "up.log", cwd=ROOT)
    try:
        assert run.process.wait(timeout=within_s) == 0, run.said()
    finally:
        if run.process.poll() is None:
            run.stop(signal.SIGTERM)
    lines = [json.loads(line) for line in (tmp_path / "game" / "metrics.jsonl").read_text().splitlines()]
    assert find_published(tmp_path / "game" / "checkpoints")[-1] == sum(line["kind"] == "train" for line in lines)
    return lines


@pytest.mark.nightly  # test_agents.py trains two turns on the real services; test_repair_game.py plays the example every day
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_game_of_two_turns_is_trained(tmp_path: Path, tiny_model: Path) -> None:
    lines = up(tmp_path, tiny_model, *(f"grpo.{setting}" for setting in SMALL), within_s=280)
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


@pytest.mark.nightly  # a warm-up and twenty steps; every day training raises a reward in test_looping_policy.py
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_policy_learns_to_answer_rightly_in_either_turn(tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-m", "headrace.cli", "model", "tiny-two-turns", str(model)], check=True)
    lines = up(tmp_path, model, f"grpo.max_num_steps={STEPS}", within_s=3000)
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert len(steps) == STEPS
    for name, least in (("environment_reward", 0.1), ("reward/first", 0.1), ("reward/second", 0.05)):
        first, last = (fmean(metrics[name] for metrics in some) for some in (steps[:5], steps[-5:]))
        assert last - first > least, (name, first, last)
    calls = [metrics["episode_calls/repair"] for metrics in steps]
    assert fmean(calls[-5:]) < fmean(calls[:5])
    held_out = [line["metrics"]["accuracy"] for line in lines if line["kind"] == "validation"]
    assert held_out[0] < 0.6 < 0.8 < held_out[-1], held_out
    # one conversation: the second turn continues the first, as it was sampled
    assert {metrics["episode_roots/repair"] for metrics in steps} == {1}
