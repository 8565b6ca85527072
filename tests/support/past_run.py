"""The folder of a run that has ended, without a pipeline that ran it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.run.history import recorded
from headrace.run.journal import JOURNAL, Journal


class Stopped(Exception):
    pass


def past_run(
    parent: Path, name: str, steps: int, better: float = 0.0, more: Mapping[str, float] | None = None, **keys: object
) -> Path:
    """A run that has finished: rewards of its steps, and a validation with `more` metrics. `keys` are those of its configuration."""
    folder = parent / name
    folder.mkdir(parents=True)
    lines = [f"run: {{id: {name}, dir: elsewhere}}", *(f"{key}: {value}" for key, value in keys.items())]
    (folder / "config.yaml").write_text("\n".join(lines))
    with recorded(folder, Stopped):
        journal = Journal(folder / JOURNAL)
        for step in range(steps):
            metrics = {"reward": step / 100 + better, "timing/train/total_step_time": 1.5, "kl_penalty": 0.25}
            journal.append("train", step, "a", metrics)
        journal.append("validation", steps, "a", {"accuracy": 0.5 + better, **(more or {})})
    return folder
