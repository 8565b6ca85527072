"""`headrace demo`: the first run, in any folder."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path

import typer

from headrace.base.errors import ConfigError
from headrace.base.scratch import scratch_folder
from headrace.cli.common import Overrides, check_engine
from headrace.cli.model import model
from headrace.cli.up import up

EXAMPLES, MODEL = Path("examples"), Path("models/tiny")
_EXAMPLE = EXAMPLES / "arithmetic_tiny.yaml"


def demo(overrides: Overrides = None) -> None:
    """Train a small model on two-digit sums: about two minutes on two CPU cores.

    Where they are missing, copies the examples to `examples` and makes the model in `models/tiny`. Then runs `headrace up
    examples/arithmetic_tiny.yaml`. Whenever it is stopped, it can be started again.
    """
    check_engine("demo")
    if not _EXAMPLE.exists():
        _copy_examples()
        typer.echo(f"{EXAMPLES}: the examples, to try and to change")
    if not (MODEL / "config.json").exists():
        model("tiny", MODEL)
    up(_EXAMPLE, overrides)


def _copy_examples() -> None:
    """Make the folder of examples, all of it or nothing."""
    # a folder without __init__.py; an editable install lists a name besides that isn't one
    (installed,) = filter(os.path.isdir, import_module("headrace_examples").__path__)
    with scratch_folder(f".{EXAMPLES}-", Path()) as outer:
        copy = outer / EXAMPLES
        shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            copy.rename(EXAMPLES)
        except OSError as error:
            raise ConfigError(
                f"{EXAMPLES} exists and has no {_EXAMPLE.name} ({error.strerror}); start the demo in another folder"
            ) from error
