"""`headrace up` in hostile shells: the run is the same as in any other, and the variables are in the table of docs/operations.md.

By day the demo of tests/e2e begins in one with many variables; here are others, and every variable alone. What is refused is in
tests/unit/cli/test_shell.py.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shells import LOUD, SHELLS, Shell

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: 1
  use_leave_one_out_baseline: false
  val_at_start: true
  val_period: 0
  async_grpo: {{enabled: true, max_trajectory_age_steps: 1}}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 64
  generation: {{max_new_tokens: 6, val_temperature: 0, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  train: {{dataset_name: arithmetic, env_name: math, size: 200}}
  validation: {{dataset_name: arithmetic, env_name: math, size: 40, seed: 1}}
env:
  math: {{type: math}}
reward: {{workers: 1}}
"""


def shells() -> list[object]:
    """Each variable of `SHELLS` alone, and all of a shell together."""
    many = [pytest.param(LOUD, id="loud"), pytest.param(Shell(SHELLS["quiet"]), id="quiet")]
    alone = [
        pytest.param(Shell({name: value}), id=f"{name}={value:.20}")
        for variables in SHELLS.values()
        for name, value in variables.items()
    ]
    streams = [
        pytest.param(Shell({}, lambda number=number: os.close(number)), id=f"{number}>&-") for number in range(3)
    ]
    return [*many, *alone, *streams]


@pytest.fixture(scope="module")
def answers() -> dict[str, float]:
    """What the validation of the initial weights found in the first shell: greedy answers, so those of every other."""
    return {}


@pytest.mark.nightly  # tests/e2e/test_demo.py is begun in the loud one
@pytest.mark.parametrize("shell", shells())
def test_a_run_is_the_same_in_a_hostile_shell(
    shell: Shell, tmp_path: Path, tiny_model: Path, answers: dict[str, float]
) -> None:
    config, said = tmp_path / "run.yaml", tmp_path / "up.out"
    config.write_text(CONFIG.format(folder=tmp_path, model=tiny_model))
    with said.open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "up", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", **shell.environ(tmp_path)},
            preexec_fn=shell.before,
        )
        try:
            assert run.wait(timeout=600) == 0, said.read_text(errors="replace")
        finally:
            run.terminate()
            run.wait()
    assert "restarting" not in said.read_text(errors="replace")
    folder = tmp_path / "runs" / "test"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [0]
    (first,) = [line["metrics"] for line in lines if line["kind"] == "validation" and line["step"] == 0]
    assert answers.setdefault("accuracy", first["accuracy"]) == first["accuracy"]
    assert (folder / "checkpoints" / "step_1" / "policy" / "model.safetensors").stat().st_size > 0
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in written if b"canary" in path.read_bytes()] == []


def test_the_table_has_what_is_tested() -> None:
    table = (ROOT / "docs" / "operations.md").read_text().partition("## What your shell sets")[2].partition("\n## ")[0]
    patterns = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)))
    refused = ("PYTHONWARNINGS", "PYTHONINSPECT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GRPC_POLL_STRATEGY")
    caches = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    tested = {*refused, *caches, *(name for variables in SHELLS.values() for name in variables)}
    assert sorted(name for name in tested if not any(fnmatch.fnmatchcase(name, one) for one in patterns)) == []
