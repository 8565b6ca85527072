"""Weights as the command line names them: `RUN[@STEP]`, the directory of a model, or a model on the hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from headrace import checkpoints
from headrace.cli import runs
from headrace.config import Config
from headrace.errors import ConfigError, ServiceError

LATEST, BEST = "latest", "best"

WeightsArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]|DIR",
        help="A run, by its folder or its id under ./runs, and which of its checkpoints: `latest` (the default), `best` by "
        "checkpointing.metric_name, a number, 0 for the initial model; or the directory of a model.",
        show_default=False,
    ),
]


@dataclasses.dataclass(frozen=True)
class RunCheckpoint:
    """The run that made weights, by its configuration, and the step. The configuration names the run's folder as it is now."""

    config: Config
    step: int


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A model to evaluate, serve or export. `model` is its directory, or its name on the hub; `name` is how people read it, `RUN@STEP`
    where a run made it."""

    name: str
    model: str
    run: RunCheckpoint | None = None


def find(name: str) -> NamedModel:
    """The weights that `name` names: a run's, else those of a directory, else of the hub, which nobody has asked yet.

    Raises `ConfigError` for a step that the run has not, and for a directory without a model.
    """
    run, at, step = name.rpartition("@")
    if not at or runs.saved_in(name) or Path(name).is_dir():  # a folder may have an @ in its name
        run, at, step = name, "", LATEST
    if not step:
        raise ConfigError(f"{name}: which step? give {LATEST}, {BEST} or a number after the @")
    if saved := runs.saved_in(run):
        return _of_run(run, saved, step)
    if at:
        raise ConfigError(f"{name}: no run there; there is neither {' nor '.join(map(str, runs.places(run)))}")
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{name}: no run and no model; there is neither a {runs.SAVED} of a run nor a config.json of a model in it. "
                "The model of a checkpoint is in its folder policy/"
            )
        return NamedModel(path.resolve().name, name)
    return NamedModel(name, name)


def find_local(name: str) -> NamedModel:
    """As `find`, for what needs a directory. Raises `ConfigError` for anything else."""
    found = find(name)
    if not Path(found.model).is_dir():
        if found.run is not None:
            raise ConfigError(
                f"{name}: the initial model of the run is {found.model} (policy.model_name), and there is no such directory from here"
            )
        raise ConfigError(
            f"{name}: neither a run nor a directory; there is neither {' nor '.join(map(str, runs.places(name)))}"
        )
    return found


def _of_run(run: str, saved: Path, step: str) -> NamedModel:
    config = runs.load_saved(saved)
    version = _version(run, config, step)
    policy = checkpoints.policy_of(config.checkpoint_folder.absolute(), version)
    model = config.policy.model_name if version == 0 else str(policy)
    if version and not (Path(model) / "config.json").is_file():
        raise ServiceError(f"{run}@{version}: {model} holds no model; name another step")
    return NamedModel(f"{config.run_folder.name}@{version}", model, RunCheckpoint(config, version))


def _version(run: str, config: Config, step: str) -> int:
    """The version that `step` means. Raises `ConfigError` naming those there are."""
    folder, settings = config.checkpoint_folder, config.checkpointing
    there = checkpoints.published(folder)
    listed = ", ".join(map(str, there)) or "none yet"
    if step in (LATEST, BEST) and not there:
        raise ConfigError(f"{run}: there is no checkpoint in {folder}; {run}@0 is the initial model")
    if step == LATEST:
        return there[-1]
    if step == BEST:
        metric = settings.metric_name
        best = checkpoints.best(folder, metric, higher_is_better=settings.higher_is_better)
        if best is None:
            why = "checkpointing.metric_name is null" if metric is None else f"no checkpoint has {metric}"
            raise ConfigError(f"{run}@{BEST}: {why}, so nothing says which is best; name one of {listed}, or {LATEST}")
        return best[0]
    if not (step.isascii() and step.isdecimal()):
        raise ConfigError(f"{run}@{step}: {step!r} is not a step; give {LATEST}, {BEST} or a number ({listed})")
    if int(step) not in (0, *there):
        raise ConfigError(f"{run}@{step}: no such checkpoint in {folder}; there are {listed}, and 0, the initial model")
    return int(step)
