"""What the files of a finished run tell."""

from __future__ import annotations

from pathlib import Path

from headrace.config.root import Config
from headrace.run.journal import Journal, Line, surviving
from headrace_services.trainer.control.checkpoint import TRAINED, Checkpoints, Ledger


def journal(run: Path) -> list[Line]:
    return Journal(run / "metrics.jsonl").read()


def audit(config: Config, steps: int) -> None:
    """Laws 1, 2 and 3."""
    checkpoints = Checkpoints(config.checkpoint_folder, config.checkpointing)
    newest = checkpoints.newest()
    assert newest == steps
    batch = config.algorithm.num_prompts_per_step
    trained = Ledger.decode(checkpoints.file(newest, TRAINED)).trained
    assert len(trained) == steps * batch, "every step trained whole groups, none twice"
    for version in checkpoints.find_published():
        for step, groups in checkpoints.ledger(version).items():
            assert len(groups) == len(set(groups)) == batch, f"step {step}"
    train = [line for line in surviving(journal(config.run_folder)) if line.kind == "train"]
    assert [line.step for line in train] == list(range(steps))
    assert all(line.metrics["max_trajectory_age"] <= config.algorithm.max_age for line in train)
