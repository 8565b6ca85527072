"""The saved configuration in a run's folder. The folder may have been moved, renamed or copied since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.base.errors import ConfigError
from headrace.base.scratch import scratch_folder
from headrace.config import Config, load
from headrace.config.in_yaml import escape
from headrace.config.yaml_text import parse

SAVED = "config.yaml"
INPUTS = "inputs"  # rewards and data sets that a run was given as Python objects


def load_saved(saved: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Return the configuration that a run saved in its folder, for the folder in which it is now. Raises `ConfigError`."""
    return load(saved, overrides, environ).relocate(saved.resolve().parent)


def load_anywhere(saved: Path) -> Config:
    """Return what `load_saved` does, for a reader who may lack the variables of the environment that the run had: what came from them is
    the text of its expression, or, where such a text is no valid value, the default. Raises `ConfigError`."""
    try:
        return load_saved(saved, environ={})
    except ConfigError:
        values = parse(saved.read_text(encoding="utf-8", errors="replace"), str(saved))
        if _without_variables(values, escape) == values:
            raise
    for replace in (escape, None):
        with scratch_folder("headrace-config-") as folder:
            copy = folder / SAVED
            copy.write_text(yaml.safe_dump(_without_variables(values, replace)), encoding="utf-8")
            try:
                return load(copy, environ={}).relocate(saved.resolve().parent)
            except ConfigError:
                if replace is None:
                    raise
    raise AssertionError("the last way returns or raises")


def _without_variables(value: Any, replace: Callable[[str], str] | None) -> Any:
    """Return the values with each text that reads a variable replaced, or left out."""
    if isinstance(value, dict):
        return {
            key: _without_variables(inner, replace)
            for key, inner in value.items()
            if replace or not _reads_variable(inner)
        }
    if isinstance(value, list):
        return [_without_variables(inner, replace) for inner in value if replace or not _reads_variable(inner)]
    return replace(value) if replace and _reads_variable(value) else value


def _reads_variable(value: Any) -> bool:
    return isinstance(value, str) and "${oc.env:" in value


def resume_hint(config: Config) -> str:
    """Return the command that makes the run in this folder continue."""
    folder = config.run_folder
    if folder.name == config.run.id:
        return f"headrace up {folder / SAVED}"
    return (
        f"rename the folder to {config.run.id}; or start a new run from its weights, with run.id=NAME "
        f"policy.model_name={folder}/checkpoints/step_<version>/policy"
    )
