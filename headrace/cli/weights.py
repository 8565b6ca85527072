"""Weights as the command line names them: `RUN[@STEP]`, the directory of a model, or a model on the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from headrace.base.errors import ConfigError, ServiceError
from headrace.config import Config
from headrace.launch import runs
from headrace.run import checkpoints, history

LATEST, BEST = "latest", "best"

WeightsArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]|DIR",
        help="A run, by its folder or its id under ./runs, and one of its checkpoints: `latest` (the default), `best` by "
        "checkpointing.metric_name (it may be the initial model), a number, or 0 for the initial model. Or the directory of a model.",
    ),
]


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """The step that made weights, and the configuration of its run. The configuration names the present folder of the run."""

    config: Config
    step: int


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A model to evaluate, serve or export. `model` is its directory, or its name on the Hub. `name` is for people: `RUN@STEP` where a run
    made it."""

    name: str
    model: str
    run: RunCheckpoint | None = None


def find(name: str) -> NamedModel:
    """Return the weights that `name` names: those of a run, else of a directory, else of a model on the Hub, which is not contacted yet.

    Raises `ConfigError` for a step that the run doesn't have, and for a directory without a model.
    """
    run, at, step = name.rpartition("@")
    if not at or runs.find_saved(name) or Path(name).is_dir():  # a folder may have an @ in its name
        run, at, step = name, "", LATEST
    if not step:
        raise ConfigError(f"{name} names no step; give {LATEST}, {BEST} or a number after the @")
    if saved := runs.find_saved(run):
        return _of_run(run, saved, step)
    if at:
        raise ConfigError(f"{name} is not a run: neither {' nor '.join(map(str, runs.places(run)))} exists")
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{name} is neither a run nor a model: it has neither the {runs.SAVED} of a run nor the config.json of a model. "
                "The model of a checkpoint is in its folder policy/"
            )
        return NamedModel(path.resolve().name, name)
    return NamedModel(name, name)


def find_local(name: str) -> NamedModel:
    """Return weights that are in a directory, like `find`. Raises `ConfigError` for any others."""
    found = find(name)
    if not Path(found.model).is_dir():
        if found.run is not None:
            raise ConfigError(
                f"{name}: the initial model of the run is {found.model} (policy.model_name), which is not a directory here"
            )
        raise ConfigError(
            f"{name} is neither a run nor a directory: neither {' nor '.join(map(str, runs.places(name)))} exists"
        )
    return found


def _of_run(run: str, saved: Path, step: str) -> NamedModel:
    config = runs.load_saved(saved)
    version = _version(run, config, step)
    policy = checkpoints.policy_of(config.checkpoint_folder.absolute(), version)
    model = config.policy.model_name if version == 0 else str(policy)
    if version and not (Path(model) / "config.json").is_file():
        raise ServiceError(f"{run}@{version}: {model} holds no model; give another step")
    return NamedModel(f"{config.run_folder.name}@{version}", model, RunCheckpoint(config, version))


def _version(run: str, config: Config, step: str) -> int:
    """Return the version that `step` means. Raises `ConfigError` naming the existing versions."""
    folder = config.checkpoint_folder
    there = checkpoints.find_published(folder)
    listed = ", ".join(map(str, there)) or "none yet"
    if step in (LATEST, BEST) and not there:
        raise ConfigError(f"{run}: {folder} has no checkpoint; {run}@0 is the initial model")
    if step == LATEST:
        return there[-1]
    if step == BEST:
        metric = config.checkpointing.metric_name
        best = history.best_weights(config)
        if best is None:
            raise ConfigError(
                f"{run}@{BEST}: no checkpoint has {metric or 'a value'}, so the best is unknown; give one of {listed}, or {LATEST}"
            )
        return best[0]
    if not (step.isascii() and step.isdecimal()):
        raise ConfigError(f"{run}@{step}: {step!r} is not a step; give {LATEST}, {BEST} or a number ({listed})")
    if int(step) not in (0, *there):
        raise ConfigError(f"{run}@{step}: {folder} has no such checkpoint; it has {listed}, and 0 is the initial model")
    return int(step)
