"""A training step of two ranks, which shard the model (FSDP2), beside that of one: the same loss and gradient."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.sizes import SIZES
from benchmarks.gpu.stage import Stage
from benchmarks.gpu.step import EXACT, Steps, training_config
from benchmarks.train_step import distance
from headrace_services.trainer.distributed.ranks import join_ranks

TOLERANCE = 1e-4  # in float32 only the order of sums differs
COMPARED = ("loss", "grad_norm")


def two_ranks(stage: Stage) -> None:
    found = {}
    for ranks in (1, 2):
        out = stage.folder / f"{ranks}-ranks.pt"
        of_size = [name for name, size in SIZES.items() if size is stage.size]
        command = ["-m", "benchmarks.gpu.ranks", stage.device, *of_size, stage.model, str(out)]
        launch = [] if ranks == 1 else ["-m", "headrace_services.trainer.launch", str(ranks)]
        subprocess.run([sys.executable, *launch, *command], check=True)
        found[ranks] = torch.load(out)
    one, two = found[1], found[2]
    for name in COMPARED:
        apart = abs(two["metrics"][name] - one["metrics"][name]) / abs(one["metrics"][name])
        stage.rows.add(f"{name} of two ranks beside one", apart, "of it", f"below {TOLERANCE:g}", apart < TOLERANCE)
    apart = distance(two["gradient"], one["gradient"])
    stage.rows.add(
        "gradient of two ranks beside one", apart, "of its length", f"below {TOLERANCE:g}", apart < TOLERANCE
    )
    for ranks, of_ranks in found.items():
        stage.rows.add(f"policy training, {ranks} rank{'s' * (ranks > 1)}", of_ranks["seconds"], "s")


def main() -> None:
    device, size, model, out = sys.argv[1:]
    stage = Stage(device, SIZES[size], Path(out).parent, model, Rows(Path(out).with_suffix(".rows")))
    config = training_config(stage, *EXACT, "trainer.gpu_memory_fraction=null")
    with join_ranks(config) as ranks:
        steps = Steps(stage, config, ranks)
        gradient, metrics = steps.first()
        steps.one()
        if ranks.rank == 0:
            torch.save(
                {"gradient": gradient, "metrics": metrics, "seconds": steps.learner.seconds["policy_training"]}, out
            )


if __name__ == "__main__":
    main()
