"""Pythons of their own, for packages that ask for others than Headrace's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_REQUIREMENTS = Path(__file__).parents[2] / "requirements"
# of a registry that can't be reached from here, as pip names them
_UNREACHABLE = re.compile(r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError")


def own_python(folder: Path, name: str) -> Path:
    """A Python in `folder` with what `requirements/NAME.txt` names. Skips the test if the registry can't be reached."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pip(python, "install", "--requirement", str(_REQUIREMENTS / f"{name}.txt"))
    return python


def pip(python: Path, *arguments: str) -> None:
    """Skips the test if the registry can't be reached."""
    _install(python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def uv(python: Path, *arguments: str) -> None:
    """`uv pip install` of the uv that this Python has. Skips the test if the registry can't be reached."""
    _install(python.with_name("uv"), "pip", "install", "--quiet", "--python", str(python), *arguments)


def _install(*argv: str | Path) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode and (unreachable := _UNREACHABLE.search(done.stderr)):
        pytest.skip(f"the registry can't be reached from here ({unreachable[0]})")
    assert done.returncode == 0, done.stderr
