"""The numbers of CPU threads for the trainer's ranks and the replicas of a run, on the cores that they share."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from headrace.base import control_groups
from headrace.config import Config

VARIABLE = "OMP_NUM_THREADS"
# Generation is a quarter of the work on a trained token: one forward pass, where training has a forward and a backward pass.
_GENERATION = 4


@dataclasses.dataclass(frozen=True)
class Threads:
    """The threads of each rank of the trainer (None leaves it to torch), and of each worker process of a replica."""

    trainer: int | None
    rollout: int

    def __str__(self) -> str:
        return f"trainer {self.trainer or 'as torch has it'}, each replica {self.rollout}"


def of(config: Config, cores: int, environ: Mapping[str, str], *, trains: bool, generates: bool) -> Threads:
    """Return what `trainer.num_threads` and `rollout.num_threads` set; where they are auto, OMP_NUM_THREADS or else a share of `cores`.

    `trains` and `generates`: whether these cores do the training and the generation.
    """
    trainer, rollout = config.trainer.num_threads, config.rollout.num_threads
    generation = config.policy.generation.vllm_cfg
    ranks = config.trainer.num_processes if trains and config.data.evaluate is None else 0
    workers = config.rollout.replicas * generation.tensor_parallel_size if generates else 0
    of_rank, of_worker = shares(cores, ranks=ranks, workers=workers)
    given = environ.get(VARIABLE, "")
    if given.isdecimal() and int(given) > 0:
        of_rank = of_worker = int(given)
    if trainer == "auto":
        trainer = of_rank if trains else None
    if rollout == "auto":
        rollout = of_worker if generates else 1
    return Threads(trainer, rollout)


def cost_of_variable(
    config: Config, cores: int, environ: Mapping[str, str], *, trains: bool, generates: bool
) -> str | None:
    """Return what OMP_NUM_THREADS changes in the thread counts that `of` returns, and the remedy; None if nothing."""
    found = of(config, cores, environ, trains=trains, generates=generates)
    without = of(config, cores, {}, trains=trains, generates=generates)
    if found == without:
        return None
    return (
        f"{VARIABLE}={environ[VARIABLE]} in this shell replaces num_threads auto: {found}; without it {without}, on {cores} cores. Unset "
        "it, or set trainer.num_threads and rollout.num_threads"
    )


def shares(cores: int, *, ranks: int, workers: int) -> tuple[int, int]:
    """Return the threads of each rank and of each worker of a replica, at least one.

    Generation gets a quarter of the cores, and training the rest. If a quarter is less than a core, one thread of generation is idle for
    most of a step. Training then gets all cores, and they share one.
    """
    generation = cores // _GENERATION if ranks else cores
    training = cores - generation if workers else cores
    return max(1, training // max(1, ranks)), max(1, generation // max(1, workers))


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by the quotas of its control groups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(affinity, quota())))


def quota() -> float:
    """Return the number of cores that the process's control groups allow; infinity without a limit."""
    limits = (_limit(folder, version) for folder, version in control_groups.folders("cpu"))
    return min((limit for limit in limits if limit is not None), default=math.inf)


def _limit(folder: Path, version: Literal[1, 2]) -> float | None:
    try:
        if version == 2:
            allowed, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            allowed, period = (file.read_text(encoding="utf-8") for file in files)
    except OSError:  # the root has no limit
        return None
    return None if allowed.strip() in ("max", "-1") else int(allowed) / int(period)
