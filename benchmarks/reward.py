"""Scores a second of one worker, in the sandboxes that the machine grants, without one, and without a process for each score; programs of
`code` beside others that sleep; then attached environments (`benchmarks.attached`).

    python -m benchmarks.reward [--scores N] [--rounds N] [--batches N]

Every trajectory gets a child of its own, forked from a worker that has loaded the scorers. What that costs is beside the same
scores in the process that asks, which is the limit, and in a child without a sandbox. Rounds alternate, so that a busy machine
slows them alike; figures are medians. Latency is that of one score with nothing else under way. Programs of `code` are submitted behind
eight that sleep, to two workers; the limit is the same without sleepers.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from typing import Any

import reasoning_gym
from rich.console import Console
from rich.table import Table

from benchmarks import attached
from headrace import Sample
from headrace.base.errors import ServiceError
from headrace.base.tagged_json import to_json
from headrace.config.data import DataSourceConfig
from headrace.config.environments import CodeConfig, MathConfig, ReasoningGymConfig
from headrace.env.wire import sample_to_wire
from headrace.v1 import trajectory_pb2 as pb
from headrace_services.reward.environments import make
from headrace_services.reward.pool import WorkerPool
from headrace_services.reward.sandbox import Level
from headrace_services.reward.scoring_worker import score_one

_TASK = "chain_sum"
_TIMEOUT_S = 60.0
_ENV = {"math": MathConfig(unsafe_no_sandbox=True), "gym": ReasoningGymConfig(unsafe_no_sandbox=True)}
_SOURCE = DataSourceConfig(dataset_name="reasoning_gym", task=_TASK, env_name="gym")

_CODE, _SLEEPERS = CodeConfig(), 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=100, help="trajectories a round, for each environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20, help="of each size a round, for attached environments")
    arguments = parser.parse_args()
    asyncio.run(_measure(arguments.scores, arguments.rounds))
    asyncio.run(_measure_sleepers(arguments.scores))
    asyncio.run(attached.measure(arguments.rounds, arguments.batches))


async def _measure(scores: int, rounds: int) -> None:
    entry = reasoning_gym.create_dataset(_TASK, size=1, seed=1)[0]
    gym = {"task": _TASK, "task_config": {}, "entry": to_json(entry)}
    trajectories = {
        "math": sample_to_wire(Sample("so it is \\boxed{\\frac{3}{4}}", {"answer": "0.75"}, environment="math")),
        "gym": sample_to_wire(Sample(str(entry["answer"]), gym, environment="gym")),
    }
    pools: dict[Level, WorkerPool] = {}
    for level in Level:
        pool = WorkerPool(_ENV, 1, [_SOURCE], [level])
        try:
            await pool.start()
            pools[level] = pool
        except ServiceError as error:
            Console().print(f"level {level} is left out: {error}")
    try:
        rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        alone: dict[str, list[float]] = defaultdict(list)
        environments = {name: make(name, env) for name, env in _ENV.items()}
        for _ in range(rounds):
            for name, trajectory in trajectories.items():
                started = time.perf_counter()
                for _ in range(scores):
                    _check(score_one(environments[name], trajectory))
                rates["in the process that asks"][name].append(scores / (time.perf_counter() - started))
                for level, pool in pools.items():
                    row = f"in a child, sandbox {level}"
                    started = time.perf_counter()
                    futures = [pool.submit([trajectory], _TIMEOUT_S)[0] for _ in range(scores)]
                    for result in await asyncio.gather(*futures):
                        _check(result)
                    rates[row][name].append(scores / (time.perf_counter() - started))
                    started = time.perf_counter()
                    _check(await pool.submit([trajectory], _TIMEOUT_S)[0])
                    alone[row].append(1000 * (time.perf_counter() - started))
    finally:
        for pool in pools.values():
            await pool.aclose()
    table = Table(title=f"Scores a second of one worker ({scores} a round, {rounds} rounds)")
    for column in ("", "math", f"reasoning_gym {_TASK}", "one score, ms"):
        table.add_column(column, justify="left" if not column else "right")
    for row, found in rates.items():
        latency = f"{statistics.median(alone[row]):.1f}" if alone[row] else ""
        table.add_row(row, *(f"{statistics.median(found[name]):,.0f}" for name in trajectories), latency)
    Console(width=100).print(table)


async def _measure_sleepers(scores: int) -> None:
    table = Table(title=f"{scores} programs of code, two workers, wall_s {_CODE.wall_s:g}")
    for column in ("", "the median done after, s", "the last done after, s"):
        table.add_column(column, justify="left" if not column else "right")
    for row, sleepers in (("alone", 0), (f"behind {_SLEEPERS} that sleep", _SLEEPERS)):
        pool = WorkerPool({"code": _CODE}, 2)
        await pool.start()
        try:
            started = time.perf_counter()
            for _ in range(sleepers):
                pool.submit([_program("import time; time.sleep(999)")], _TIMEOUT_S)
            good = [pool.submit([_program("print(1)")], _TIMEOUT_S)[0] for _ in range(scores)]
            took = []
            for result in asyncio.as_completed(good):
                _check(await result)
                took.append(time.perf_counter() - started)
        finally:
            await pool.aclose()
        table.add_row(row, f"{statistics.median(took):.1f}", f"{took[-1]:.1f}")
    Console(width=100).print(table)


def _program(text: str) -> pb.Trajectory:
    return sample_to_wire(Sample(text, {"inputs": [""], "outputs": ["1"]}, environment="code"))


def _check(result: Any) -> None:
    """Raises `RuntimeError` for anything but the reward 1, of a `Score` or of a result on the wire."""
    scored = result.status == (pb.STATUS_SCORED if isinstance(result, pb.Result) else "SCORED")
    if not scored or result.reward != 1:
        raise RuntimeError(f"a right answer was not scored as one: {result}")


if __name__ == "__main__":
    main()
