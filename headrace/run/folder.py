"""The saved configuration in a run's folder. The folder may have been moved, renamed or copied since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.config import Config, load

SAVED = "config.yaml"


def load_saved(saved: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that a run saved in its folder, for the folder in which it is now. Raises `ConfigError`."""
    return load(saved, overrides, environ).relocate(saved.resolve().parent)


def resume_hint(config: Config) -> str:
    """Return the command that makes the run in this folder continue."""
    folder = config.run_folder
    if folder.name == config.run.id:
        return f"headrace up {folder / SAVED}"
    return (
        f"rename the folder to {config.run.id}; or start a new run from its weights, with run.id=NAME "
        f"policy.model_name={folder}/checkpoints/step_<version>/policy"
    )
