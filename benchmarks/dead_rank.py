"""What the death of one of the trainer's ranks costs: seconds until the next new step, what is done again, and whether the losses are those
of a run in which nothing died.

    python -m benchmarks.dead_rank [--steps 24] [--kill-after 17] [--model models/tiny]

The run of `long_run.py`, on-policy, so that it repeats to the last bit, with two ranks over gloo. Rank 1 gets SIGKILL once the journal has
the step `--kill-after`. When torchrun has ended, it is started again after a second, as `headrace up` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks import long_run
from headrace.config import Config, load
from headrace.replay import ReplayClient
from headrace.run.journal import JOURNAL, Line, read_journal, surviving
from tests.support.ports import free_port

RANKS = 2
RESTART_S = 1.0
TIMEOUT_S = 900.0
# how the run saves in each case; the rank dies in all but the first
CASES: dict[str, dict[str, Any]] = {
    "nothing dies": {"save_period": 10},
    "checkpoints, every 10 steps": {"save_period": 10},
    "checkpoints, every step": {"save_period": 1},
    "snapshots in memory": {"save_period": 10, "snapshot_dir": "/dev/shm"},
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`step_s` is the median of a step before the kill, `next_step_s` the time from the kill to the next step that was not taken before.
    `losses` are those of the surviving weights, by step."""

    step_s: float
    next_step_s: float
    steps_again: int
    groups_again: int
    losses: dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kill-after", type=int, default=17)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="what `headrace model tiny` wrote")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for checkpointing in CASES.values():
        with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
            kill_after = arguments.kill_after if outcomes else arguments.steps
            outcomes.append(measure(Path(folder), arguments.model, arguments.steps, kill_after, checkpointing))
    Console(width=120).print(table(outcomes))


def measure(folder: Path, model: Path, steps: int, kill_after: int, checkpointing: dict[str, Any]) -> Outcome:
    """Train so many steps in `folder`, and kill rank 1 once step `kill_after` was taken. Raises `SystemExit` if the run does not end."""
    environment_port, file = free_port(), folder / "run.yaml"
    settings = long_run.configuration(folder, model, steps, environment_port)
    settings["grpo"] |= {"max_num_steps": steps, "async_grpo": {"enabled": False}}
    settings["trainer"]["num_processes"] = RANKS
    settings["checkpointing"] |= checkpointing
    file.write_text(yaml.safe_dump(settings))
    config = load(file, [], {})
    commands = long_run.commands(file, environment_port)
    commands["trainer"] = ["-m", "headrace_services.trainer.launch", str(RANKS), *commands["trainer"]]
    deadline, killed_at, next_step_s, before = time.monotonic() + TIMEOUT_S, 0.0, 0.0, 0
    with contextlib.ExitStack() as stack:
        for name, words in commands.items():  # the trainer is the last
            trainer = long_run.started(stack, folder / f"{name}.log", words)
        while trainer.poll() != 0:
            if time.monotonic() > deadline:
                raise SystemExit(f"no end after {TIMEOUT_S:g} s:\n{(folder / 'trainer.log').read_text()[-3000:]}")
            if trainer.poll() is not None:
                time.sleep(RESTART_S)
                trainer = long_run.started(stack, folder / "trainer.log", commands["trainer"])
            time.sleep(long_run.POLL_S / 5)
            newest = max((line.step for line in _steps(config)), default=-1)
            if newest >= kill_after and not killed_at:
                before, killed_at = newest, time.monotonic()
                _rank(trainer.pid, 1).kill()
            if killed_at and not next_step_s and newest > before:
                next_step_s = time.monotonic() - killed_at
        groups_again = asyncio.run(_requeued(config))
    lines = _steps(config)
    seconds = [
        line.metrics["timing/train/total_step_time"] for line in lines if 2 < line.step <= before or not killed_at
    ]
    losses = {line.step: line.metrics["loss"] for line in surviving(read_journal(config.run_folder / JOURNAL))}
    return Outcome(statistics.median(seconds), next_step_s, len(lines) - steps, groups_again, losses)


def _steps(config: Config) -> list[Line]:
    return [line for line in read_journal(config.run_folder / JOURNAL) if line.kind == "train"]


def _rank(launcher: int, rank: int) -> psutil.Process:
    ranks = psutil.Process(launcher).children()
    return next(process for process in ranks if process.environ().get("RANK") == str(rank))


async def _requeued(config: Config) -> int:
    """The groups that were generated again, for whatever reason."""
    async with contextlib.aclosing(await ReplayClient.connect(config.redis_url, config.run.id)) as replay:
        return sum((await replay.stats())["requeues"].values())


def table(outcomes: list[Outcome]) -> Table:
    straight = outcomes[0]
    made = Table("", *CASES, title=f"{RANKS} ranks over gloo, one is killed", title_justify="left")
    made.add_row("s a step, median before it", *(f"{each.step_s:.3f}" for each in outcomes))
    made.add_row("s from the kill to the next new step", "", *(f"{each.next_step_s:.1f}" for each in outcomes[1:]))
    made.add_row("steps taken again", *(str(each.steps_again) for each in outcomes))
    made.add_row("groups generated again", *(str(each.groups_again) for each in outcomes))
    equal = (sum(each.losses[step] == loss for step, loss in straight.losses.items()) for each in outcomes[1:])
    made.add_row("losses equal to the last bit", "", *(f"{count} of {len(straight.losses)}" for count in equal))
    return made


if __name__ == "__main__":
    main()
