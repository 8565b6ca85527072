"""The agent with a calculator in `examples/`, by the commands of docs/agents.md: the policy learns to call its tool."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from headrace.run.metric_names import unknown
from headrace.run.sample_files import SampleFiles
from tests.support.up import ROOT, Up, own_run


@pytest.mark.nightly  # a warm-up and thirty steps; the program, the model's tokens and the parser of its calls have tests of a second
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_policy_learns_to_call_its_tool(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "calculator"
    subprocess.run([sys.executable, "-m", "headrace.cli", "model", "tiny-calculator", str(model)], check=True)
    own = own_run(tmp_path, run.name, model)
    up = Up(ROOT / "examples" / "calculator.yaml", *own, output=tmp_path / "up.log", cwd=ROOT)
    try:
        assert up.process.wait(timeout=3000) == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert len(steps) == 30
    for name in ("reward/called", "environment_reward"):
        first, last = (fmean(metrics[name] for metrics in some) for some in (steps[:3], steps[-5:]))
        assert first < 0.4 < 0.9 < last, name
    accuracies = [line["metrics"]["accuracy"] for line in lines if line["kind"] == "validation"]
    assert accuracies[0] < 0.4 < 0.9 < accuracies[-1]
    for metrics in steps:
        assert metrics["episode_roots/calculator"] == 1
        assert unknown(metrics) == []
    samples = SampleFiles(run / "logs", None).samples("train", 29)
    assert any('assistant calls: calculator({"expression": "' in sample.text for sample in samples)
