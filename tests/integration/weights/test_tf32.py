"""Float32 on a GPU: an attention in TF32 is no float32, the probe sees it, and the engine's environment prevents it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.config import Config
from headrace_services.refit.probe import Differences, tolerance
from headrace_services.rollout.engine import prepare_environment
from tests.support import tf32
from tests.support.forks import ROOT

FLOAT32 = Config.model_validate({"policy": {"precision": "float32"}})


def verifies(found: Differences) -> bool:
    bounds = tolerance(FLOAT32)
    return found.largest <= bounds.largest and found.mean <= bounds.mean


@pytest.mark.parametrize(("convert", "verified"), [(lambda values: values, True), (tf32.truncated, False)])
def test_attention_in_tf32_is_not_verified(convert: Callable[[torch.Tensor], torch.Tensor], verified: bool) -> None:
    found = tf32.moved(f"verified-{verified}", tf32.attention(convert))
    assert verifies(found) == verified, found


@pytest.mark.nightly  # imports vLLM with Triton, and interprets its kernels
def test_vllms_kernels_compute_float32_in_the_engines_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("TRITON_F32_DEFAULT", None)

    def computed() -> tuple[Differences, float]:
        command = [sys.executable, "-m", "tests.support.tf32"]
        said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
        answer = json.loads(said.splitlines()[-1])
        return Differences(*answer["probe"]), answer["experts"]

    probe, experts = computed()
    assert not verifies(probe), probe
    assert experts > 1e-3
    monkeypatch.setattr(os, "environ", environment)
    prepare_environment(FLOAT32, tmp_path)
    probe, experts = computed()
    assert verifies(probe), probe
    assert experts < 1e-4
