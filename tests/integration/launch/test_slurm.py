"""A job of `headrace deploy slurm` on two machines: the real services, with TLS and tokens, a trainer of two ranks and two replicas."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.parent import die_with_parent
from tests.chaos import runs
from tests.support.command import said

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]  # `tests/unit/test_slurm.py` has the job's decisions

SHORT = (
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
)
SIZES = ("grpo.val_at_start=false", "grpo.val_at_end=false", "trainer.num_processes=2", "rollout.replicas=2")


@pytest.mark.parametrize("killed", [None, "1"], ids=["", "a rank of the trainer is killed"])
def test_a_job_trains_on_two_nodes(tmp_path: Path, tiny_model: Path, killed: str | None) -> None:
    if lacks := runs.missing():
        pytest.skip(lacks)
    job = tmp_path / "job.sh"
    settings = ("run.id=two", f"run.dir={tmp_path}", f"policy.model_name={tiny_model}", "checkpointing.save_period=100")
    example = runs.ROOT / "examples" / "arithmetic_tiny.yaml"
    job.write_text(said("deploy", "slurm", example, *settings, *SHORT, *SIZES, "--gpus-per-node", "0"))
    command = [
        *runs.NAMESPACES,
        sys.executable,
        "-m",
        "tests.support.slurm",
        tmp_path,
        job,
        *([killed] if killed else []),
    ]
    kill = functools.partial(die_with_parent, signal.SIGKILL)
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, preexec_fn=kill)
    logs = {log.name: log.read_text() for log in (tmp_path / "two" / "logs").glob("*.log")}
    assert done.returncode == 0, done.stderr + "\n".join(f"== {name}\n{text[-3000:]}" for name, text in logs.items())
    steps = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    # a step whose snapshot had not been written is trained again
    assert sorted({line["step"] for line in steps if line["kind"] == "train"}) == [0, 1, 2]
    assert all(line["step"] > 0 for line in steps if line["kind"] == "rewind")
    assert ("continuing from the snapshot of version" in logs["trainer-0.log"]) == (killed is not None)
    assert ("continues from its checkpoint" in done.stderr) == (killed is not None)
    assert {"trainer-0.log", "trainer-1.log", "rollout-1.log", "rollout-2.log"} <= logs.keys()
