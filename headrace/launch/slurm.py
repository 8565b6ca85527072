"""Writes a Slurm job that runs a whole pipeline on several nodes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from headrace.base import devices
from headrace.base.errors import ConfigError
from headrace.config import Config

_BODY = "slurm_job.sh"
_ON_CPU = "cpu"


@dataclasses.dataclass(frozen=True)
class Node:
    """What a node has of a run: the devices of the trainer's ranks, and those of each replica. Without GPUs, `cpu` for each."""

    ranks: tuple[str, ...]
    replicas: tuple[str, ...]


def place(*, ranks: int, replicas: int, slice_size: int, nodes: int, gpus: int) -> list[Node] | None:
    """Return what each of `nodes` has, or None if there is no room. Nodes with ranks have equally many, as torchrun needs, and come first;
    they are as few as can be. A replica has its `slice_size` GPUs on one node. With `gpus` 0, GPUs aren't counted: ranks and replicas are
    spread."""
    if not gpus:
        trained_on = max(n for n in range(1, nodes + 1) if ranks % n == 0)
        each = ranks // trained_on
        return [
            Node((_ON_CPU,) * each * (node < trained_on), (_ON_CPU,) * len(range(nodes - 1 - node, replicas, nodes)))
            for node in range(nodes)
        ]
    trained_on = next((n for n in range(-(-ranks // gpus), nodes + 1) if n and ranks % n == 0), 0)
    if not trained_on:
        return None
    found, left = [], replicas
    for node in range(nodes):
        taken = ranks // trained_on if node < trained_on else 0
        fit = min(left, (gpus - taken) // slice_size)
        starts = range(taken, taken + fit * slice_size, slice_size)
        slices = (",".join(map(str, range(at, at + slice_size))) for at in starts)
        found.append(Node(tuple(map(str, range(taken))), tuple(slices)))
        left -= fit
    return None if left else found


def write_job(
    config: Config, path: Path, overrides: Sequence[str], *, nodes: int, gpus: int, folder: Path, programs: Path
) -> str:
    """Return the text of a script for `sbatch` that runs the configuration of `path` with `overrides` on `nodes` of `gpus` GPUs each, with
    TLS and tokens. Paths of the configuration start in `folder`, and `programs` are those of the virtual environment; all nodes see both.

    Raises `ConfigError` without `run.id`, for a single node, and if the run has no place there.
    """
    if config.run.id is None:
        raise ConfigError("run.id is not set: give run.id=NAME, by which the next job continues the run")
    if nodes < 2:
        raise ConfigError(
            f"--nodes {nodes}: on one node `headrace up` is the job: sbatch --gpus-per-node={gpus} --signal=B:TERM@900 --wrap "
            + shlex.quote(f"exec {shlex.join(['headrace', 'up', str(path), *overrides])}")
        )
    wanted = {
        "trainer.num_processes": config.trainer.num_processes,
        "rollout.replicas": config.rollout.replicas,
        "policy.generation.vllm_cfg.tensor_parallel_size": config.policy.generation.vllm_cfg.tensor_parallel_size,
    }
    ranks, replicas, slice_size = wanted.values()
    if 0 < gpus < slice_size:
        raise ConfigError(devices.say_one_node(slice_size, f"{gpus} GPUs of a node (--gpus-per-node)"))
    placed = place(ranks=ranks, replicas=replicas, slice_size=slice_size, nodes=nodes, gpus=gpus)
    if placed is None:
        numbers = ", ".join(f"{key} {value}" for key, value in wanted.items())
        raise ConfigError(
            f"the run ({numbers}) has no place on {nodes} nodes of {gpus} GPUs: nodes with ranks have equally many, and a replica has its "
            "GPUs on one node; change these numbers, --nodes or --gpus-per-node"
        )
    body = (resources.files(__package__) / _BODY).read_text(encoding="utf-8")
    return "\n".join([*_head(config, path, overrides, placed, gpus, folder, programs), body])


def _head(
    config: Config,
    path: Path,
    overrides: Sequence[str],
    placed: Sequence[Node],
    gpus: int,
    folder: Path,
    programs: Path,
) -> list[str]:
    name = config.run.id
    assert name is not None
    run_folder = str((folder / config.run.dir / name).resolve())
    return [
        "#!/usr/bin/env bash",
        f"# The run {name} on {len(placed)} nodes, written by `headrace deploy slurm`. Submit it again and the next job continues the run,",
        "# once this one has ended. The nodes share a file system; the first has redis-server on its PATH.",
        f"#SBATCH --job-name=headrace-{name}",
        "#SBATCH --dependency=singleton",
        f"#SBATCH --nodes={len(placed)}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --exclusive",
        "#SBATCH --signal=B:TERM@900",
        "set -euo pipefail",
        "",
        f"cd {shlex.quote(str(folder))}",
        f"bin={shlex.quote(str(programs))} config={shlex.quote(str(path))}",
        f"overrides=({' '.join(map(shlex.quote, overrides))})",
        f"run_folder={shlex.quote(run_folder)} in_url={quote(run_folder)}",
        "# by node: the trainer's ranks and their GPUs, and the GPUs of each replica",
        _array("ranks", (str(len(node.ranks)) for node in placed)),
        _array("trainer_devices", (_ON_CPU if not gpus else ",".join(node.ranks) for node in placed)),
        _array("replicas", (" ".join(node.replicas) for node in placed)),
        f"trainer_nodes={sum(bool(node.ranks) for node in placed)}",
        f"redis_port={config.replay.redis_port} reward_port={config.reward.port or 50390} agents_port={config.agents.port or 8394} "
        "rendezvous_port=29500",
    ]


def _array(name: str, values: Iterable[str]) -> str:
    quoted = " ".join(f'"{value}"' for value in values)
    return f"{name}=({quoted})"
