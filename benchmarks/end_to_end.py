"""Seconds per step and CPU seconds by process of the whole pipeline, beside TRL's GRPOTrainer on the same job in the same run.

    python -m benchmarks.end_to_end [--steps N] [--size 0.8M|10M] [--peer-python PYTHON]

The job: a Qwen2 of 0.8 or 10 M parameters, 8 prompts x 8 completions of exactly 64 tokens, one AdamW step each, the clipped loss
averaged over tokens, no KL, float32; the reward is the share of digits, given at once, or (0.8 M) after 10 ms a sample. The pipeline
runs as `headrace up` starts it: generation, training and an environment in a process of its own, threads at their default
(auto), weights at most one step old. TRL runs in one process, with one thread and with two, in a virtual
environment of its own (made in the cache folder on first use; it wants a newer transformers). The first steps of each are
left out.

`limit` is the CPU seconds of a step spread evenly over the cores, sooner than which no step can be done; `load` the machine's in the last
minute of the run, which is about the number of threads of compute where nothing else runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.cpu_times import PROCESSES, Meter
from benchmarks.peer import free_port, peer_environment, peer_python, process, run
from headrace.config import load, threads
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny

HERE = Path(__file__).parent
PROMPTS, GENERATIONS, TOKENS = 8, 8, 64
WARM_UP = 5


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and the environment's seconds for a sample that it is measured with."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    latencies_s: tuple[float, ...]


SIZES = {"0.8M": Size(128, 4, 4, 344, (0.0, 0.01)), "10M": Size(384, 6, 6, 960, (0.0,))}


@dataclasses.dataclass(frozen=True)
class Job:
    """What is run once with each. The model is in `folder`/model."""

    size: str
    latency_s: float
    steps: int
    folder: Path


@dataclasses.dataclass(frozen=True)
class Row:
    """`cpu_s` are CPU seconds of a step by process, `load` was the machine's at the end."""

    job: Job
    name: str
    threads: str
    step_s: float
    cpu_s: dict[str, float]
    load: float
    where: str = ""

    @property
    def limit_s(self) -> float:
        return sum(self.cpu_s.values()) / threads.usable_cores()

    def line(self) -> str:
        what = f"{self.job.size}, {self.name}, {self.threads} thread(s), {self.job.latency_s * 1000:.0f} ms a sample"
        return f"{what}: {self.step_s:.3f} s a step, limit {self.limit_s:.3f} s, load {self.load:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"steps of each run, of which {WARM_UP} are left out")
    parser.add_argument("--size", choices=SIZES, help="this model alone")
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that holds TRL 1.16")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARM_UP + 2}")
    console = Console()
    peer = arguments.peer_python or peer_python(console)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        for size in [arguments.size] if arguments.size else SIZES:
            folder = Path(name) / size
            make_model(folder / "model", SIZES[size])
            for latency_s in SIZES[size].latencies_s:
                job = Job(size, latency_s, arguments.steps, folder)
                for peer_threads in (1, 2):
                    rows.append(run_peer(job, peer, peer_threads))
                    console.print(rows[-1].line())
                rows.append(run_pipeline(job))
                console.print(rows[-1].line())
    Console(width=240).print(table(rows))


def make_model(directory: Path, size: Size) -> None:
    """Random weights, and no end token, so that every completion has its full length."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            intermediate_size=size.intermediate,
            max_position_embeddings=tiny.CONTEXT,
            initializer_range=0.08,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            dtype="float32",
        )
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def run_peer(job: Job, python: Path, peer_threads: int) -> Row:
    problems = job.folder / "problems.json"
    pairs = islice(arithmetic.training_pairs(2, random.Random(1)), PROMPTS * job.steps)
    problems.write_text(json.dumps([[{"role": "user", "content": arithmetic.text(pair)}] for pair in pairs]))
    words = [
        python,
        HERE / "end_to_end_peer.py",
        job.folder / "model",
        problems,
        job.steps,
        peer_threads,
        job.latency_s,
    ]
    done = json.loads(run([str(word) for word in words], peer_environment(peer_threads)).splitlines()[-1])
    cpu_s = {"its one process": mean_step(done["cpu_s"])}
    return Row(job, "TRL 1.16", str(peer_threads), mean_step(done["ends"]), cpu_s, psutil.getloadavg()[0])


def run_pipeline(job: Job) -> Row:
    port = free_port()
    run_id = f"latency-{job.latency_s * 1000:.0f}ms"
    config = job.folder / f"{run_id}.yaml"
    config.write_text(yaml.safe_dump(pipeline_config(job, run_id, port)))
    environment = [sys.executable, str(HERE / "end_to_end_environment.py"), str(port), str(job.latency_s)]
    journal = job.folder / "runs" / run_id / "metrics.jsonl"
    with process(environment):
        meter = Meter(journal, WARM_UP, job.steps - 1)
        meter.start()
        run([sys.executable, "-m", "headrace.cli", "up", str(config)], dict(os.environ))
        load_average, cpu_s = psutil.getloadavg()[0], meter.a_step()
    lines = [line for line in map(json.loads, journal.read_text().splitlines()) if line["kind"] == "train"]
    spent = [line["metrics"] for line in lines[WARM_UP:]]
    wrong = {m["mean_gen_tokens_per_sample"] for m in spent} - {float(TOKENS)}
    if len(lines) != job.steps or wrong:
        raise SystemExit(
            f"the pipeline made {len(lines)} of {job.steps} steps, with {wrong or TOKENS} tokens a completion"
        )
    parts = {"wait": "exposed_generation", "train": "policy_training", "refit": "weight_sync"}
    where = ", ".join(
        f"{name} {statistics.fmean(m[f'timing/train/{metric}'] for m in spent):.2f}" for name, metric in parts.items()
    )
    own = threads.of(load(config), threads.usable_cores(), os.environ, trains=True, generates=True)
    step_s = mean_step([line["time"] for line in lines])
    return Row(job, "Headrace", f"{own.trainer} + {own.rollout}", step_s, cpu_s, load_average, where)


def pipeline_config(job: Job, run_id: str, environment_port: int) -> dict[str, Any]:
    return {
        "run": {"id": run_id, "dir": str(job.folder / "runs")},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GENERATIONS,
            "max_num_steps": job.steps,
            "use_leave_one_out_baseline": False,
            "val_period": 0,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0, "prev_logprobs_source": "generation"},
        "policy": {
            "model_name": str(job.folder / "model"),
            "precision": "float32",
            "max_total_sequence_length": 128,
            "train_micro_batch_size": PROMPTS * GENERATIONS,
            "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.0}},
            "generation": {"max_new_tokens": TOKENS},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "size": 3 * PROMPTS * job.steps, "seed": 1},
            "default": {"env_name": "digits"},
        },
        "env": {"digits": {"target": f"127.0.0.1:{environment_port}"}},
        "replay": {"redis_port": free_port(), "port": 0},
        "reward": {"port": free_port()},
        "rollout": {"device": "cpu"},
        "trainer": {"device": "cpu"},
        "checkpointing": {"save_period": 1_000_000, "metric_name": None},
    }


def mean_step(ends: list[float]) -> float:
    """Mean seconds of a step, without the first ones. Steps of a pipeline come in bursts: a median would flatter it."""
    measured = ends[WARM_UP - 1 :]
    return (measured[-1] - measured[0]) / (len(measured) - 1)


def table(rows: list[Row]) -> Table:
    job = f"{PROMPTS} prompts x {GENERATIONS} completions x {TOKENS} tokens"
    made = Table(
        title=f"{job}; from {PROCESSES[0]} to all: CPU seconds of a step; limit: these, spread evenly over the cores",
        title_justify="left",
    )
    left = ("model", "", "of which, s")
    for name in (*left[:2], "threads", "ms a sample", "s/step", "tokens/s", "against TRL", "limit, s", "load", left[2]):
        made.add_column(name, justify="left" if name in left else "right")
    for name in (*PROCESSES, "all"):
        made.add_column(name, justify="right")
    for row in rows:
        best = min(r.step_s for r in rows if r.job == row.job and r.name != "Headrace")
        made.add_row(
            row.job.size,
            row.name,
            row.threads,
            f"{row.job.latency_s * 1000:.0f}",
            f"{row.step_s:.3f}",
            f"{PROMPTS * GENERATIONS * TOKENS / row.step_s:,.0f}",
            f"{best / row.step_s:.2f}x" if row.name == "Headrace" else "",
            f"{row.limit_s:.3f}",
            f"{row.load:.1f}",
            row.where,
            *(f"{row.cpu_s[name]:.3f}" if name in row.cpu_s else "" for name in PROCESSES),
            f"{sum(row.cpu_s.values()):.3f}",
        )
    return made


if __name__ == "__main__":
    main()
