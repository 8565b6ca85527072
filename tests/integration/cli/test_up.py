"""`headrace up` on the real pipeline: how it ends, what it leaves, and what it does when a service dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import descendants, eventually, gone

from tests.conftest import free_port

pytestmark = pytest.mark.slow

CONFIG = """
run: {{id: test, dir: {folder}/runs}}
grpo:
  num_prompts_per_step: 2
  num_generations_per_prompt: 2
  max_num_steps: {steps}
  use_leave_one_out_baseline: false
  val_period: 2
  max_val_samples: 4
  async_grpo: {{enabled: true, max_trajectory_age_steps: 1}}
loss_fn: {{reference_policy_kl_penalty: 0}}
policy:
  model_name: {model}
  precision: float32
  max_total_sequence_length: 64
  train_micro_batch_size: 8
  generation: {{max_new_tokens: 6, vllm_cfg: {{kv_cache_memory_bytes: 67108864}}}}
data:
  train: {{dataset_name: arithmetic, env_name: math, size: 2000}}
  validation: {{dataset_name: arithmetic, env_name: math, size: 20, seed: 1}}
env:
  math: {{type: math}}
replay: {{port: 0, redis_port: {redis_port}}}
reward: {{port: 0, http_port: 0, workers: 1}}
trainer: {{num_threads: 1}}
checkpointing: {{save_period: 2}}
"""


class Up:
    """A running `headrace up` whose output goes to a file."""

    def __init__(self, folder: Path, model: Path, steps: int, *overrides: str) -> None:
        self.folder = folder / "runs" / "test"
        self.config = folder / "run.yaml"
        self.config.write_text(CONFIG.format(folder=folder, model=model, steps=steps, redis_port=free_port()))
        self.output = folder / "up.out"
        with self.output.open("wb") as out:
            argv = [sys.executable, "-m", "headrace.cli", "up", str(self.config), *overrides]
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def said(self) -> str:
        return self.output.read_text()

    def wait_for(self, line: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None or line in self.said(), self.said()
            return line in self.said()

        eventually(said, within_s=200)

    def pid_of(self, *words: str) -> int:
        return next(pid for pid, command in descendants(self.process.pid).items() if all(w in command for w in words))


@pytest.fixture
def up(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(steps: int, *overrides: str) -> Up:
        started.append(Up(tmp_path, tiny_model, steps, *overrides))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(timeout=120)


def test_a_run_ends_with_its_table_and_leaves_nothing_running(up: Callable[..., Up]) -> None:
    run = up(4)
    run.wait_for("step 1:")
    left = descendants(run.process.pid)
    assert run.process.wait(timeout=200) == 0, run.said()
    assert all(gone(pid) for pid in left)
    assert "validation accuracy" in run.said()
    assert str(run.folder / "checkpoints" / "step_4" / "policy") in run.said().splitlines()[-1]
    assert (run.folder / "checkpoints" / "step_4" / "policy" / "model.safetensors").exists()
    assert (run.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps
    assert {path.name for path in (run.folder / "logs").iterdir()} >= {
        "replay.log",
        "reward.log",
        "rollout-1.log",
        "trainer.log",
    }


def test_a_run_that_ended_goes_on_by_its_id(up: Callable[..., Up]) -> None:
    first = up(2)
    assert first.process.wait(timeout=200) == 0, first.said()
    again = up(2, "grpo.max_num_steps=4")
    assert again.process.wait(timeout=200) == 0, again.said()
    assert "changed: grpo.max_num_steps: 2 -> 4" in again.said()
    state = json.loads((again.folder / "checkpoints" / "step_4" / "state.json").read_text())
    assert state["version"] == 4
    steps = [json.loads(line) for line in (again.folder / "metrics.jsonl").read_text().splitlines()]
    trained = [entry["step"] for entry in steps if entry["kind"] == "train"]
    assert trained == [0, 1, 2, 3]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
@pytest.mark.parametrize("moment", ["rollout-1: starting", "step 1:"])
def test_however_it_is_stopped_no_process_is_left(up: Callable[..., Up], signum: int, code: int, moment: str) -> None:
    run = up(100_000)
    run.wait_for(moment)
    left = descendants(run.process.pid)
    run.process.send_signal(signum)
    assert run.process.wait(timeout=120) == code
    assert [command for pid, command in left.items() if not gone(pid)] == []


def test_a_run_goes_on_after_any_of_its_services_was_killed(up: Callable[..., Up]) -> None:
    run = up(100_000)
    run.wait_for("step 2:")
    for service in ("rollout", "reward", "replay", "trainer"):
        victim = run.pid_of("headrace.cli", f" {service} ")
        os.kill(victim, signal.SIGKILL)
        assert gone(victim)
        name = "rollout-1" if service == "rollout" else service
        run.wait_for(f"{name}: killed by signal 9; starting it again")
        before = last_step(run)
        eventually(lambda before=before: last_step(run) > before + 1, within_s=240)  # type: ignore[misc]

    # each step ends with a refit, during which the replica is STALE
    eventually(
        lambda: re.search(r"^rollout-\w+ +HEALTHY +\d+ .* http://127\.0\.0\.1:\d+ *$", status_of(run), re.MULTILINE),
        within_s=60,
    )


def status_of(run: Up) -> str:
    """What `headrace status` says through a pipe."""
    argv = [sys.executable, "-m", "headrace.cli", "status", "--run", str(run.folder)]
    status = subprocess.run(argv, capture_output=True, text=True)
    assert status.returncode == 0, status.stderr
    return status.stdout


def last_step(run: Up) -> int:
    steps = [line.split()[1] for line in run.said().splitlines() if line.startswith("step ") and "reward" in line]
    return int(steps[-1].rstrip(":"))
