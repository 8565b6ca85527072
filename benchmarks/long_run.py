"""Memory, disk and CPU seconds per step of a long run, by quarter: whether anything grows that should not.

    python -m benchmarks.long_run [--steps 10000] [--model models/tiny]

The real trainer, replay service with its embedded server, hub and an environment, each a process of its own, and a replica without vLLM
(`light_replica.py`): 2 prompts x 2 completions of at most 4 tokens, one AdamW step and one refit each, age bound 1, a checkpoint every 50
steps of which the newest two stay. The page of curves is drawn while the run goes on.

Memory is resident, in MB, as it stands at the end of a quarter. Disk is in MB then. The journal and the lineage hold every step, and grow
with them; the buffer's append-only file grows until it is rewritten. A busy machine stretches seconds, but hardly CPU seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.processes import memory_mb, of_run
from headrace.base.parent import die_with_parent
from headrace.config import load
from headrace.run.journal import JOURNAL, read_bytes
from tests.support.ports import free_port

PROMPTS, GENERATIONS = 2, 2
QUARTERS = 4
KEPT_STEPS = 50  # whose samples stay
POLL_S = 0.05
STOP_S = 60.0


@dataclasses.dataclass(frozen=True)
class Quarter:
    """What a run used at the end of a quarter. Seconds per step are those of the quarter; `cpu_ms` are milliseconds, by process."""

    steps: int
    step_s: float
    cpu_ms: dict[str, float]
    memory_mb: dict[str, float]
    disk_mb: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="what `headrace model tiny` wrote")
    arguments = parser.parse_args()
    if arguments.steps < QUARTERS:
        parser.error(f"--steps {arguments.steps}: at least {QUARTERS}")
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        quarters = measure(Path(folder), arguments.model, arguments.steps)
    Console(width=120).print(table(quarters))


def measure(folder: Path, model: Path, steps: int) -> list[Quarter]:
    """Train so many steps in `folder`. Raises `SystemExit` with the last words of a process that ends before."""
    environment_port = free_port()
    file = folder / "long.yaml"
    file.write_text(yaml.safe_dump(configuration(folder, model, steps, environment_port)))
    run_folder = load(file, [], {}).run_folder
    quarters: list[Quarter] = []
    with contextlib.ExitStack() as stack:
        processes = {
            name: started(stack, folder / f"{name}.log", words)
            for name, words in commands(file, environment_port).items()
        }
        done = offset = 0
        began, spent = time.time(), of_run()  # of the quarter; of the first, when its first step ended
        while len(quarters) < QUARTERS:
            time.sleep(POLL_S)
            for name, process in processes.items():
                if process.poll() is not None:
                    log = (folder / f"{name}.log").read_text()[-3000:]
                    raise SystemExit(f"{name} ended with {process.returncode} after {done} steps:\n{log}")
            news = read_bytes(run_folder / JOURNAL, offset)
            offset += len(news)
            if not done and _steps(news):
                began, spent = time.time(), of_run()
            first = max(1, quarters[-1].steps if quarters else 0)
            done += _steps(news)
            if done >= (len(quarters) + 1) * steps // QUARTERS and done > first:
                now, total = time.time(), of_run()
                cpu_ms = {name: 1e3 * (total[name] - spent[name]) / (done - first) for name in total}
                quarters.append(
                    Quarter(done, (now - began) / (done - first), cpu_ms, dict(of_run(memory_mb)), disk_mb(run_folder))
                )
                began, spent = now, total
    return quarters


def _steps(journal: bytes) -> int:
    return journal.count(b'"kind": "train"')


def commands(file: Path, environment_port: int) -> dict[str, list[str]]:
    """The arguments of Python for each process of a run, by its name."""
    serve = ["env", "serve", f"{Path(__file__).parent / 'end_to_end_rewards.py'}:digits", "--port"]
    return {
        "environment": ["-m", "headrace.cli", *serve, str(environment_port)],
        "reward": ["-m", "headrace.cli", "reward", "-c", str(file)],
        "replay": ["-m", "headrace.cli", "replay", "-c", str(file)],
        "replica": ["-m", "benchmarks.light_replica", str(file)],
        "trainer": ["-m", "headrace.cli", "trainer", "-c", str(file)],
    }


def configuration(folder: Path, model: Path, steps: int, environment_port: int) -> dict[str, Any]:
    return {
        "run": {"id": "long", "dir": str(folder / "runs")},
        "grpo": {
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": GENERATIONS,
            "max_num_steps": 2 * steps,  # it is stopped, so that the last quarter ends with a trainer that still runs
            "max_num_epochs": 2 * steps,
            "use_leave_one_out_baseline": False,
            "val_period": 0,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1, "in_flight_weight_updates": True},
        },
        "loss_fn": {"reference_policy_kl_penalty": 0},
        "policy": {
            "model_name": str(model.resolve()),
            "precision": "float32",
            "max_total_sequence_length": 32,
            "optimizer": {"kwargs": {"lr": 1e-5}},
            "generation": {"max_new_tokens": 4},
        },
        "data": {
            "train": {"dataset_name": "arithmetic", "size": 1000, "seed": 1},
            "default": {"env_name": "digits"},
        },
        "env": {"digits": {"target": f"127.0.0.1:{environment_port}"}},
        "replay": {"redis_port": free_port(), "port": 0},
        "reward": {"port": free_port()},
        "trainer": {"device": "cpu", "num_threads": 1},
        "checkpointing": {"save_period": 50, "keep_top_k": 2, "metric_name": None},
        "logger": {"keep_step_data": KEPT_STEPS},
    }


def started(stack: contextlib.ExitStack, log: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """A process that ends with `stack`."""
    output = stack.enter_context(log.open("ab"))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], stdout=output, stderr=output, env=environment, preexec_fn=die_with_parent
    )

    def stop() -> None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    return process


def disk_mb(folder: Path) -> dict[str, float]:
    """Of each file and folder in `folder`."""
    return {path.name: sum(map(_nbytes, [path, *path.rglob("*")])) / 1e6 for path in sorted(folder.iterdir())}


def _nbytes(path: Path) -> int:
    try:
        return 0 if path.is_dir() else path.lstat().st_size
    except FileNotFoundError:  # it has just been removed or renamed
        return 0


def table(quarters: list[Quarter]) -> Table:
    made = Table(title=f"{PROMPTS} prompts x {GENERATIONS} completions a step", title_justify="left")
    made.add_column("at the end of")
    for quarter in quarters:
        made.add_column(f"step {quarter.steps:,}", justify="right")
    made.add_row("s a step, of the quarter", *(f"{quarter.step_s:.3f}" for quarter in quarters), end_section=True)
    for what, field in (("CPU ms a step", "cpu_ms"), ("MB of memory", "memory_mb"), ("MB of disk", "disk_mb")):
        used = [getattr(quarter, field) for quarter in quarters]
        names = list(dict.fromkeys(name for each in used for name in each))
        for name in names:
            cells = (f"{each[name]:,.1f}" if name in each else "" for each in used)
            made.add_row(f"{what}, {name}", *cells, end_section=name == names[-1])
    return made


if __name__ == "__main__":
    main()
