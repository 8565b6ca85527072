"""Learning beside TRL's GRPOTrainer: the same model, problems in the same order, hyper-parameters and seeds, in one picture.

    python -m benchmarks.vs_trl --model models/tiny [--seeds 3] [--steps 30] [--out FOLDER] [--peer-python PYTHON]

The job is that of `examples/arithmetic_tiny.yaml`: 32 prompts x 16 completions of two-digit sums, one AdamW step each at 1e-4, clip
0.2, token-level loss over the whole batch, no KL, float32. TRL generates and trains in turns in one process with two threads. Headrace
runs as `headrace up` starts it, one thread in the replica and one in the trainer: on-policy (age 0), where it does what TRL
does, and with weights up to one step old (age 1), where generation and training overlap. Seconds count from the start of the
command, so that starting up is in them; the table gives a step's seconds without the first ones. The line of each run of Headrace has
the milliseconds of CPU time (user and system) that each process spent on a trajectory in those steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_times import PROCESSES, Meter
from benchmarks.curves import dress, model_folder
from benchmarks.peer import free_port, peer_environment, peer_python, run
from headrace.config import Config, load
from headrace_services.trainer.data import PromptOrder, load_problems

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "arithmetic_tiny.yaml"
TRAJECTORIES = 32 * 16  # of a step
WARM_UP = 5
GOAL = 0.9
COLOURS = {"TRL 1.16": "#888888", "Headrace, age 0": "#4477aa", "Headrace, age 1": "#cc6677"}


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run: of each step its mean reward, and when it ended in seconds from the start of the command; of the pipeline, milliseconds of
    CPU time a trajectory by process."""

    name: str
    seed: int
    rewards: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu_ms: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def step_s(self) -> float:
        measured = self.seconds[WARM_UP:]
        return (measured[-1] - measured[0]) / (len(measured) - 1)

    def last(self, steps: int = 5) -> float:
        return statistics.fmean(self.rewards[-steps:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=model_folder, required=True, help="what `headrace model tiny` wrote")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help=f"steps of each run, more than {WARM_UP + 2}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs") / "vs_trl", help="folder for the picture and the numbers"
    )
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that holds TRL 1.16")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps}: at least {WARM_UP + 2}")
    console = Console()
    peer = arguments.peer_python or peer_python(console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    for seed in range(arguments.seeds):
        curves.append(run_peer(peer, arguments.model, arguments.steps, seed))
        console.print(line(curves[-1]))
        for age in (0, 1):
            curves.append(run_pipeline(arguments.model, arguments.steps, seed, age))
            console.print(line(curves[-1]))
        # after each seed: what was measured survives an interruption
        (arguments.out / "vs_trl.json").write_text(json.dumps([dataclasses.asdict(c) for c in curves]))
        draw(curves, arguments.out / "vs_trl.png")
    console.print(table(curves))
    console.print(f"picture: {arguments.out / 'vs_trl.png'}")


def line(curve: Curve) -> str:
    learnt = f"reward {curve.rewards[0]:.2f} -> {curve.last():.2f}, {curve.step_s:.2f} s a step"
    spent = ", ".join(f"{name} {ms:.2f}" for name, ms in curve.cpu_ms.items())
    cpu = f", load {os.getloadavg()[0]:.0f}; ms of CPU a trajectory: {spent}, all {sum(curve.cpu_ms.values()):.2f}"
    return f"{curve.name}, seed {curve.seed}: {learnt}{cpu if spent else ''}"


def settings(model: Path, steps: int, seed: int, age: int, folder: Path) -> list[str]:
    """What the pipeline's runs change in the example."""
    return [
        f"run.dir={folder}",
        f"run.id=age-{age}-seed-{seed}",
        f"policy.model_name={model}",
        f"grpo.seed={seed}",
        f"grpo.max_num_steps={steps}",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        f"grpo.async_grpo.enabled={'true' if age else 'false'}",
        f"grpo.async_grpo.max_trajectory_age_steps={age}",
        "checkpointing.save_period=1000000",
        f"replay.redis_port={free_port()}",
        "replay.port=0",
        f"reward.port={free_port()}",
    ]


def run_pipeline(model: Path, steps: int, seed: int, age: int) -> Curve:
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        folder = Path(name)
        began = time.time()
        words = settings(model, steps, seed, age, folder)
        journal = folder / f"age-{age}-seed-{seed}" / "metrics.jsonl"
        meter = Meter(journal, WARM_UP, steps - 1)
        meter.start()
        run([sys.executable, "-m", "headrace.cli", "up", str(EXAMPLE), *words], dict(os.environ))
        cpu_s = meter.a_step()
        lines = [entry for entry in map(json.loads, journal.read_text().splitlines()) if entry["kind"] == "train"]
    if len(lines) != steps:
        raise SystemExit(f"the pipeline made {len(lines)} of {steps} steps")
    return Curve(
        f"Headrace, age {age}",
        seed,
        tuple(entry["metrics"]["reward"] for entry in lines),
        tuple(entry["time"] - began for entry in lines),
        {name: 1000 * cpu_s[name] / TRAJECTORIES for name in PROCESSES if name in cpu_s},
    )


def run_peer(python: Path, model: Path, steps: int, seed: int) -> Curve:
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        config = load(EXAMPLE, settings(model, steps, seed, 0, Path(name)))
        job = Path(name) / "job.json"
        job.write_text(json.dumps(peer_job(config, steps)))
        began = time.time()
        words = [str(python), str(HERE / "vs_trl_peer.py"), str(job)]
        told = json.loads(run(words, peer_environment(threads=2)).splitlines()[-1])
    if len(told["rewards"]) != steps:
        raise SystemExit(f"TRL logged {len(told['rewards'])} of {steps} rewards")
    return Curve("TRL 1.16", seed, tuple(told["rewards"]), tuple(end - began for end in told["ends"]))


def peer_job(config: Config, steps: int) -> dict[str, Any]:
    """The pipeline's job in plain numbers: its problems in the order that its trainer would queue them."""
    algorithm, data = config.algorithm, config.data
    problems, _ = load_problems(data)
    order = PromptOrder(len(problems), algorithm.seed, data.shuffle, algorithm.max_num_epochs)
    chosen = [problems[order[place][1]] for place in range(steps * algorithm.num_prompts_per_step)]
    return {
        "model": config.policy.model_name,
        "problems": [
            {
                "messages": list(problem.messages),
                "answer": problem.extra_env_info["answer"],
            }
            for problem in chosen
        ],
        "prompts": algorithm.num_prompts_per_step,
        "generations": algorithm.num_generations_per_prompt,
        "steps": steps,
        "seed": algorithm.seed,
        "threads": 2,
        "lr": config.policy.optimizer.kwargs.lr,
        "max_new_tokens": config.policy.generation.max_new_tokens,
    }


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Reward against steps and against seconds: each seed pale, the mean of the seeds strong."""
    figure = Figure(figsize=(11, 4.5), dpi=160, layout="constrained")
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for name, colour in COLOURS.items():
        mine = [curve for curve in curves if curve.name == name]
        if not mine:
            continue
        steps = range(1, len(mine[0].rewards) + 1)
        mean = [statistics.fmean(values) for values in zip(*(c.rewards for c in mine), strict=True)]
        when = [statistics.fmean(values) for values in zip(*(c.seconds for c in mine), strict=True)]
        for curve in mine:
            by_step.plot(steps, curve.rewards, color=colour, lw=0.8, alpha=0.3)
            by_second.plot(curve.seconds, curve.rewards, color=colour, lw=0.8, alpha=0.3)
        by_step.plot(steps, mean, color=colour, lw=2, label=name)
        by_second.plot(when, mean, color=colour, lw=2, label=name)
    seeds = len({curve.seed for curve in curves})
    dress(by_step, f"Two-digit sums, tiny model, {seeds} seeds", "optimizer step")
    dress(by_second, below="seconds from the start of the command")
    by_step.set_ylabel("mean training reward", fontsize=11)
    by_step.legend(loc="lower right", frameon=False, fontsize=10)
    figure.savefig(path)


def table(curves: Sequence[Curve]) -> Table:
    made = Table(title="reward: mean and range over seeds", title_justify="left")
    for heading in ("", "first step", "last 5 steps", "s/step", f"seeds that reached {GOAL}", "after steps", "after s"):
        made.add_column(heading, justify="left" if not heading else "right")
    for name in COLOURS:
        mine = [curve for curve in curves if curve.name == name]
        if not mine:
            continue
        reached = [next((i for i, r in enumerate(c.rewards) if r >= GOAL), None) for c in mine]
        there = [(c, i) for c, i in zip(mine, reached, strict=True) if i is not None]
        made.add_row(
            name,
            spread([c.rewards[0] for c in mine], 2),
            spread([c.last() for c in mine], 2),
            spread([c.step_s for c in mine], 2),
            f"{len(there)} of {len(mine)}",
            spread([i + 1 for _, i in there], 0),
            spread([c.seconds[i] for c, i in there], 0),
        )
    return made


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
