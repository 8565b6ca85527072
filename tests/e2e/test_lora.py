"""The adapter of `examples/lora_arithmetic.yaml` through the whole pipeline: it learns, engines compute what the trainer does, and what is
exported is what the trainer had."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoModelForCausalLM

from tests.support.command import headrace
from tests.support.up import ROOT, Up, own_run

STEPS = 12


@pytest.mark.nightly  # an engine and a dozen steps; steps, checkpoints and merged weights have tests of a second
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("refit", ["merged", "adapter"])
def test_an_adapter_learns(refit: str, tmp_path: Path, warm_model: Path) -> None:
    from peft import PeftModel

    run = tmp_path / "lora"
    own = [*own_run(tmp_path, run.name, warm_model), f"policy.lora_cfg.refit={refit}"]
    short = [f"grpo.max_num_steps={STEPS}", "grpo.val_period=0", "grpo.max_val_samples=100"]
    up = Up(ROOT / "examples" / "lora_arithmetic.yaml", *own, *short, output=tmp_path / "up.log", cwd=ROOT)
    try:
        assert up.process.wait(timeout=1500) == 0, up.said()
    finally:
        if up.process.poll() is None:
            up.stop(signal.SIGTERM)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert len(steps) == STEPS
    assert fmean(metrics["reward"] for metrics in steps[-3:]) > fmean(metrics["reward"] for metrics in steps[:3]) + 0.05
    name = "on_policy_token_mult_prob_error"
    apart = [metrics[name] for metrics in steps if name in metrics]
    assert apart
    assert max(apart) < 1 + 1e-5
    exported = tmp_path / "exported"
    assert headrace("export", run, "-o", exported).returncode == 0
    merged = AutoModelForCausalLM.from_pretrained(exported)
    base = AutoModelForCausalLM.from_pretrained(warm_model)
    unloaded = PeftModel.from_pretrained(base, exported / "adapter").merge_and_unload()
    for (name, ours), (_, theirs) in zip(merged.named_parameters(), unloaded.named_parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-6, name
