"""Whole runs, as a person starts them: `headrace up` with an example, and what its folder shows afterwards."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from benchmarks.gpu import shard_alone
from benchmarks.gpu.runner import last_lines
from benchmarks.gpu.sizes import EXAMPLE, EXAMPLES
from benchmarks.gpu.stage import Stage
from headrace.config import load
from headrace.run.journal import JOURNAL, Line, read_journal, surviving
from headrace.run.lineage import FOLDER, LineageFiles
from tests.support.light_services import instead_of
from tests.support.up import own_run

TINY_STEPS, STEPS, KILLED_AFTER = 3, 5, 2
POLL_S = 0.05
# What trainer and replica log.
VERIFIED, TRAVEL = r"version (\d+): (\d+) of (\d+) replicas verified", r"weights travel by (.*)"
PROVED = r"(?m)^(\S+ \S+) .* version \d+ is verified: (\{.*\})"
PAUSED = ("pausing", "receiving weights", "naming the version", "resuming")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Proof:
    """A refit that a replica verified, when (Unix seconds), and the seconds of its phases."""

    time: float
    seconds: dict[str, float]

    @property
    def pause(self) -> float:
        """While no token was generated."""
        return sum(self.seconds.get(phase, 0.0) for phase in PAUSED)


class Run:
    """One `headrace up` of `example` in the part's folder. What it says goes to the part's log."""

    def __init__(self, stage: Stage, example: Path, model: str, *overrides: str) -> None:
        folder = stage.folder / f"runs-{time.time_ns()}"
        given = [
            *own_run(folder, "run", Path(model)),
            *("checkpointing.enabled=false", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
            *([] if stage.on_gpu else ["trainer.device=cpu", "rollout.device=cpu"]),
            *overrides,
        ]
        self.config = load(example, given, {})
        environ = dict(os.environ)
        if shard_alone.asked():
            environ = instead_of(folder.with_name(f"{folder.name}-services"), trainer=f"{shard_alone.__name__}:trainer")
        self.process = psutil.Popen([sys.executable, "-m", "headrace.cli", "up", str(example), *given], env=environ)

    def end(self) -> None:
        """Wait for its end. Raises `RuntimeError` for one that failed; the part's log then has what its services said last."""
        if self.process.wait():
            for log in sorted(self.config.log_folder.glob("*.log")):
                sys.stderr.write(f"-- {log.name}\n{last_lines(log)}\n")
            raise RuntimeError(f"headrace up ended with exit code {self.process.returncode}")

    def wait_for(self, what: str, look: Callable[[], T]) -> T:
        """What `look` finds first. Raises `RuntimeError` if the run ends before."""
        while self.process.poll() is None:
            if found := look():
                return found
            time.sleep(POLL_S)
        self.end()
        raise RuntimeError(f"headrace up ended before {what}")

    def replica(self) -> psutil.Process | None:
        """The process of its only replica."""
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if "rollout" in process.cmdline():
                    return process
        return None

    @property
    def steps(self) -> list[Line]:
        """The steps that the newest weights descend from."""
        lines = surviving(read_journal(self.config.run_folder / JOURNAL))
        return [line for line in lines if line.kind == "train"]

    @property
    def groups(self) -> list[str]:
        """Those that these steps trained."""
        lineage = LineageFiles(self.config.checkpoint_folder / FOLDER)
        return [group.group for line in self.steps for group in lineage.read(line.step)]

    @property
    def proofs(self) -> list[Proof]:
        return [
            Proof(datetime.datetime.fromisoformat(when.replace(",", ".")).timestamp(), ast.literal_eval(seconds))
            for when, seconds in re.findall(PROVED, self.log("rollout-1"))
        ]

    def log(self, service: str) -> str:
        return (self.config.log_folder / f"{service}.log").read_text(errors="replace")


def tiny(stage: Stage, *overrides: str) -> None:
    model = stage.folder.parent / "tiny"
    subprocess.run([sys.executable, "-m", "headrace.cli", "model", "tiny", str(model)], check=True)
    steps = f"grpo.max_num_steps={TINY_STEPS}"
    run = Run(stage, EXAMPLES / "arithmetic_tiny.yaml", str(model), steps, *overrides)
    run.end()
    _report(stage, run, TINY_STEPS)
    refits = [(int(verified), int(members)) for _, verified, members in re.findall(VERIFIED, run.log("trainer"))]
    all_of_them = len(refits) >= TINY_STEPS and all(verified == members > 0 for verified, members in refits)
    stage.rows.add(
        "refits, and of how many replicas all were verified", str(refits), "", "all, one each step", all_of_them
    )


def over_nccl(stage: Stage) -> None:
    tiny(stage, *(["weight_channel.backend=nccl"] if stage.on_gpu else []))


def tensor_parallel(stage: Stage) -> None:
    """With two GPUs the replica has both, and the trainer computes on the CPU."""
    trainer = ["trainer.device=cpu"] if torch.cuda.device_count() < 3 else []
    tiny(stage, "policy.generation.vllm_cfg.tensor_parallel_size=2", *trainer)


def killed_replica(stage: Stage) -> None:
    """The example, with its only replica killed by SIGKILL between two steps: it is started again and refitted, and nothing is lost."""
    run = Run(stage, EXAMPLE, stage.model, f"grpo.max_num_steps={STEPS}", *stage.size.overrides)
    run.wait_for(f"{KILLED_AFTER} steps", lambda: len(run.steps) >= KILLED_AFTER)
    replica, killed = run.wait_for("a replica was there", run.replica), time.time()
    assert replica is not None
    replica.send_signal(signal.SIGKILL)
    run.end()
    _report(stage, run, STEPS)
    later = [proof.time for proof in run.proofs if proof.time > killed]
    after = later[0] - killed if later else "never"
    expected = "the start of an engine"
    stage.rows.add(
        "from SIGKILL to a verified refit of the replica", after, "s" if later else "", expected, bool(later)
    )


def _report(stage: Stage, run: Run, steps: int) -> None:
    """Rows of a run that has ended: what it trained, how fast, and its refits."""
    rows, trained, metrics = stage.rows, run.groups, [line.metrics for line in run.steps]
    expected = steps * run.config.algorithm.num_prompts_per_step
    rows.add("steps", len(metrics), "", str(steps), len(metrics) == steps)
    rows.add(
        "groups trained", len(trained), "", f"{expected}, each once", len(set(trained)) == len(trained) == expected
    )
    failed = metrics[-1]["failed_prompts_total"]
    rows.add("prompts failed", failed, "", "0", failed == 0)
    later = metrics[1:]  # replicas and trainer start in the first one
    for what, metric, unit in (
        ("a step", "timing/train/total_step_time", "s"),
        ("of that, training", "timing/train/policy_training", "s"),
        ("of that, waiting for a batch", "timing/train/exposed_generation", "s"),
        ("of that, the refit", "timing/train/weight_sync", "s"),
        ("the whole run", "performance/tokens_per_sec", "tokens/s"),
        ("training, share of the peak", "performance/train_fp_utilization", ""),
    ):
        if all(metric in of for of in later):
            rows.add(what, statistics.median(of[metric] for of in later), unit)
    how = re.findall(TRAVEL, run.log("trainer"))
    alarm = max(of.get("weight_channel_alarm", 0.0) for of in metrics)
    rows.add("weights travel by", how[-1] if how else "gloo", "", "nccl if no GPU is shared; no alarm", alarm == 0)
    proofs = run.proofs
    rows.add("the pause of a refit", 1000 * statistics.median(proof.pause for proof in proofs[1:]), "ms")
    exact = run.config.policy.precision == "float32"
    error = metrics[0].get("on_policy_token_mult_prob_error", metrics[0]["token_mult_prob_error"])
    bound = 1.001 if exact else 1.05
    rows.add("token_mult_prob_error of the initial weights", f"{error:.6f}", "", f"below {bound}", error < bound)
