"""Seconds per step and tokens per second of the whole pipeline, beside TRL's GRPOTrainer on the same job in the same run.

    python -m benchmarks.end_to_end [--steps N] [--peer-python PYTHON]

The job: a Qwen2 of 0.8 M parameters, 8 prompts x 8 completions of exactly 64 tokens, one AdamW step each, the clipped loss
averaged over tokens, no KL, float32; the reward is the share of digits, given at once, or after 10 ms a sample. The pipeline
runs as `headrace up` starts it: generation, training and an environment in a process of its own, one compute thread in the
replica and one in the trainer, weights at most one step old. TRL runs in one process, with one thread and with two, in a virtual
environment of its own (made in the cache folder on first use; it wants a newer transformers). The first steps of each are
left out.
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

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.peer import free_port, peer_environment, peer_python, process, run
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny

HERE = Path(__file__).parent
PROMPTS, GENERATIONS, TOKENS = 8, 8, 64
WARM_UP = 5
LATENCIES_S = (0.0, 0.01)


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    threads: str
    latency_s: float
    step_s: float
    where: str = ""

    def line(self) -> str:
        return f"{self.name}, {self.threads} thread(s), {self.latency_s * 1000:.0f} ms a sample: {self.step_s:.3f} s a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help=f"steps of each run, of which {WARM_UP} are left out")
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that holds TRL 1.16")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARM_UP + 2}")
    console = Console()
    peer = arguments.peer_python or peer_python(console)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        folder = Path(name)
        make_model(folder / "model")
        for latency_s in LATENCIES_S:
            for threads in (1, 2):
                rows.append(run_peer(peer, folder, arguments.steps, threads, latency_s))
                console.print(rows[-1].line())
            rows.append(run_pipeline(folder, arguments.steps, latency_s))
            console.print(rows[-1].line())
    console.print(table(rows))


def make_model(directory: Path) -> None:
    """Hidden 128, 4 layers, random weights, and no end token, so that every completion has its full length."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=344,
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


def run_peer(python: Path, folder: Path, steps: int, threads: int, latency_s: float) -> Row:
    problems = folder / "problems.json"
    pairs = islice(arithmetic.training_pairs(2, random.Random(1)), PROMPTS * steps)
    problems.write_text(json.dumps([[{"role": "user", "content": arithmetic.text(pair)}] for pair in pairs]))
    words = [python, HERE / "end_to_end_peer.py", folder / "model", problems, steps, threads, latency_s]
    done = run([str(word) for word in words], peer_environment(threads))
    return Row("TRL 1.16", str(threads), latency_s, mean_step(json.loads(done.splitlines()[-1])))


def run_pipeline(folder: Path, steps: int, latency_s: float) -> Row:
    port = free_port()
    run_id = f"latency-{latency_s * 1000:.0f}ms"
    config = folder / f"{run_id}.yaml"
    config.write_text(yaml.safe_dump(pipeline_config(folder, run_id, steps, port)))
    environment = [sys.executable, str(HERE / "end_to_end_environment.py"), str(port), str(latency_s)]
    with process(environment):
        run([sys.executable, "-m", "headrace.cli", "up", str(config)], dict(os.environ))
    journal = (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, journal) if line["kind"] == "train"]
    spent = [line["metrics"] for line in lines[WARM_UP:]]
    wrong = {m["mean_gen_tokens_per_sample"] for m in spent} - {float(TOKENS)}
    if len(lines) != steps or wrong:
        raise SystemExit(f"the pipeline made {len(lines)} of {steps} steps, with {wrong or TOKENS} tokens a completion")
    parts = {"wait": "exposed_generation", "train": "policy_training", "refit": "weight_sync"}
    where = ", ".join(
        f"{name} {statistics.fmean(m[f'timing/train/{metric}'] for m in spent):.2f}" for name, metric in parts.items()
    )
    return Row("Headrace", "1 + 1", latency_s, mean_step([line["time"] for line in lines]), where)


def pipeline_config(folder: Path, run_id: str, steps: int, environment_port: int) -> dict[str, Any]:
    return {
        "run": {"id": run_id, "dir": str(folder / "runs")},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GENERATIONS,
            "max_num_steps": steps,
            "use_leave_one_out_baseline": False,
            "val_period": 0,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0, "prev_logprobs_source": "generation"},
        "policy": {
            "model_name": str(folder / "model"),
            "precision": "float32",
            "max_total_sequence_length": 128,
            "train_micro_batch_size": PROMPTS * GENERATIONS,
            "optimizer": {"kwargs": {"lr": 1e-3, "weight_decay": 0.0}},
            "generation": {"max_new_tokens": TOKENS},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "size": 3 * PROMPTS * steps, "seed": 1},
            "default": {"env_name": "digits"},
        },
        "env": {"digits": {"target": f"127.0.0.1:{environment_port}"}},
        "replay": {"redis_port": free_port(), "port": 0},
        "reward": {"port": free_port()},
        "rollout": {"num_threads": 1},
        "trainer": {"num_threads": 1, "device": "cpu"},
        "checkpointing": {"save_period": 1_000_000, "metric_name": None},
    }


def mean_step(ends: list[float]) -> float:
    """Mean seconds of a step, without the first ones. Steps of a pipeline come in bursts: a median would flatter it."""
    measured = ends[WARM_UP - 1 :]
    return (measured[-1] - measured[0]) / (len(measured) - 1)


def table(rows: list[Row]) -> Table:
    made = Table(title=f"{PROMPTS} prompts x {GENERATIONS} completions x {TOKENS} tokens", title_justify="left")
    for name in ("", "compute threads", "latency ms", "s/step", "tokens/s", "against TRL", "where a step goes, s"):
        made.add_column(name, justify="left" if name in ("", "where a step goes, s") else "right")
    for row in rows:
        best = min(r.step_s for r in rows if r.latency_s == row.latency_s and r.name != "Headrace")
        made.add_row(
            row.name,
            row.threads,
            f"{row.latency_s * 1000:.0f}",
            f"{row.step_s:.3f}",
            f"{PROMPTS * GENERATIONS * TOKENS / row.step_s:,.0f}",
            f"{best / row.step_s:.2f}x" if row.name == "Headrace" else "",
            row.where,
        )
    return made


if __name__ == "__main__":
    main()
