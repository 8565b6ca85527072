"""`headrace eval` as a person starts it, with a small replica in place of vLLM: tests/e2e has the real one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import load
from headrace.launch import runs
from tests.support.light_services import instead_of
from tests.support.processes import descendants, gone
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
run: {{id: adder, dir: {folder}}}
ppo: {{max_num_steps: 5}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 64
  generation: {{max_new_tokens: 4, val_temperature: 0}}
data:
  train: {{dataset_name: arithmetic, env_name: math, size: 20}}
  validation: {{dataset_name: arithmetic, env_name: math, size: 12, seed: 1}}
env:
  math: {{type: math}}
reward: {{workers: 1}}
trainer: {{num_threads: 1}}
"""


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder of a run that was never up: it has its initial model alone."""
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path, model=tiny_model))
    return runs.save(load(file, environ={})).parent


def start(run: Path, *arguments: object, **services: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace.cli", "eval", *map(str, arguments)]
    with (run.parent / "out").open("wb") as out, (run.parent / "err").open("wb") as err:
        environ = instead_of(run.parent / "services", **services)
        return subprocess.Popen(command, stdout=out, stderr=err, env={**environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.nightly  # tests/e2e evaluates a checkpoint on the real services every day, unit tests say what NAME@0 is
def test_an_initial_model_is_evaluated_and_nothing_is_left(run: Path) -> None:
    sums, results = run.parent / "sums.jsonl", run.parent / "results.json"
    sums.write_text("".join(json.dumps({"input": f"{i}+1", "output": str(i + 1)}) + "\n" for i in range(5)))
    arguments = (f"{run}@0", "validation", sums, "--samples", 2, "--temperature", 1, "--json", results)
    process = start(run, *arguments, rollout="small_rollout")
    assert process.wait(timeout=500) == 0, (run.parent / "err").read_text()
    found = json.loads(results.read_text())
    assert (found["model"], found["samples"], found["temperature"], found["threshold"]) == ("adder@0", 2, 1.0, 1.0)
    asked = {"validation": 12, "sums": 5}
    for name, prompts in asked.items():
        each = found["data_sets"][name]
        assert (each["evaluated"], each["failed"], each["samples"]) == (prompts, 0, 2)
        assert set(each["pass_at"]) == {"1", "2"}
        assert 1 <= each["length"] <= 4
    said = (run.parent / "out").read_text()
    assert "17 evaluated" in said
    assert "pass@2" in said
    folder = Path(found["folder"])
    assert folder.parent == run / "evals"
    assert (folder / "logs" / "val_data_step0.jsonl.gz").exists()
    assert {path.name for path in run.iterdir()} == {"config.yaml", "evals"}, "the run itself is as it was"


def test_ctrl_c_stops_what_was_started(run: Path) -> None:
    process = start(run, f"{run}@0", reward="idle_reward", rollout="idle_rollout", trainer="talking_trainer")
    wait_until(lambda: "rollout-1: starting" in (run.parent / "out").read_text())
    started = descendants(process.pid)
    assert len(started) >= 4
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130
    assert [command for pid, command in started.items() if not gone(pid)] == []
    assert "there are no results" in (run.parent / "out").read_text()
