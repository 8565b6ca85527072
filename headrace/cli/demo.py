"""`headrace demo`: the first run, in any folder."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import typer

from headrace.base.errors import ConfigError
from headrace.cli.common import Overrides
from headrace.cli.model import model
from headrace.cli.up import up

EXAMPLES, MODEL = Path("examples"), Path("models/tiny")
_ENGINES = (
    "pip install 'headrace[cuda]' for a machine with a GPU, or "
    "pip install --extra-index-url https://download.pytorch.org/whl/cpu 'headrace[cpu]'"
)


def demo(overrides: Overrides = None) -> None:
    """Train a small model on two-digit sums: about two minutes on two CPU cores.

    Where they are missing, copies the examples to `examples` and makes the model in `models/tiny`. Then runs `headrace up
    examples/arithmetic_tiny.yaml`.
    """
    if find_spec("vllm") is None:
        raise ConfigError(f"the package 'vllm' is not installed: {_ENGINES}")
    if not EXAMPLES.exists():
        # a folder without __init__.py; an editable install lists a name besides that isn't one
        (installed,) = filter(os.path.isdir, import_module("headrace_examples").__path__)
        shutil.copytree(installed, EXAMPLES, ignore=shutil.ignore_patterns("__pycache__"))
        typer.echo(f"{EXAMPLES}: the examples, to try and to change")
    if not MODEL.exists():
        model("tiny", MODEL)
    up(EXAMPLES / "arithmetic_tiny.yaml", overrides)
