"""Starts a run as `headrace up` in a process of its own, which outlives the one that started it."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from headrace.api import inputs
from headrace.base.errors import CodecError, ConfigError, ServiceError
from headrace.base.files import cannot_write, is_locked
from headrace.cli.common import say
from headrace.config import load
from headrace.config.data import GENERATED, DataSourceConfig
from headrace.config.yaml_text import dump_value
from headrace.launch import runs
from headrace.run import history
from headrace.run.folder import INPUTS, SAVED
from headrace.run.history import RUN_LOCK

LOG = "up.log"  # in the run's folder: what `headrace up` said
_LOCK = ".start.lock"  # there, too: held until `headrace up` has begun
_POLL_S = 0.1


def start(
    file: Path, overrides: Mapping[str, Any], reward: inputs.Reward | None = None, data: Any = None
) -> tuple[Path, subprocess.Popen[bytes]]:
    """Start the run and return, once its checks have passed, its folder and the process of `headrace up`. Raises `ConfigError` and
    `ServiceError` as `headrace up` does; nothing of a run that has never started is left then."""
    given = list(to_overrides(overrides))
    known = load(file, [*given, *_of_inputs(reward, data, Path(INPUTS))])
    with contextlib.ExitStack() as held:
        run_id = known.run.id or held.enter_context(
            runs.new_folder(Path(known.run.dir), file.stem, datetime.datetime.now())
        )
        folder = (Path(known.run.dir) / run_id).absolute()
        is_new = known.run.id is None or not folder.exists()
        follow = f"headrace.Run({str(folder)!r}) follows it"
        if is_locked(folder / RUN_LOCK):
            raise ServiceError(f"run {run_id} is already up; {follow}")
        # two starts of one run must not write each other's inputs, nor take the other's `headrace up` for their own
        held.enter_context(runs.held(folder / _LOCK, f"run {run_id} is being started", follow))
        try:
            given += _of_inputs(reward, data, folder / INPUTS, write=True)
            given += [] if known.run.id else [f"run.id={run_id}"]
            runs.prepare(file, given)
            return folder, _start(folder, file, given)
        finally:
            if is_new and not (folder / SAVED).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _of_inputs(reward: inputs.Reward | None, data: Any, folder: Path, *, write: bool = False) -> list[str]:
    """Return the overrides that make a run use what is given as objects, and write them into `folder`, if `write` is true."""
    found: dict[str, Any] = {}
    if reward is not None:
        name = inputs.name_of(reward)
        found[f"env.{name}.target"] = inputs.target_of(reward, folder) if write else f"{folder / inputs.REWARD}:{name}"
        found["data.train.env_name"] = name
    if data is not None:
        found["data.train.data_path"] = inputs.write_data(data, folder) if write else folder / inputs.DATA
        replaced = ("dataset_name", *GENERATED)
        found |= {f"data.train.{key}": DataSourceConfig.model_fields[key].default for key in replaced}
    return list(to_overrides(found))


def to_overrides(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `section.key=value` for each value, of nested mappings too. Raises `ConfigError` for a value that YAML can't hold."""
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from to_overrides(value, f"{name}.")
            continue
        value = str(value) if isinstance(value, Path) else value
        try:
            written = dump_value(value, flow=True)
        except yaml.YAMLError as error:
            kind = type(value).__name__
            raise ConfigError(
                f"{name}: a value of type {kind} can't be written as YAML; give text, numbers, lists or dicts"
            ) from error
        yield f"{name}={written}"


def _start(folder: Path, file: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    log = folder / LOG
    try:
        output = log.open("ab")
    except OSError as error:
        raise cannot_write(log, error) from error
    with output:
        said_before, begun = output.tell(), time.time()
        # In a session of its own: signals for a notebook's kernel or a terminal end neither. -P: as the command that pip installs.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace.cli", "up", str(file), *overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def said() -> str:
        return log.read_bytes()[said_before:].decode(errors="replace")

    try:
        while not _has_started(folder, begun, said()):
            if process.poll() is not None and not _has_started(folder, begun, said()):
                if process.returncode:
                    raise ServiceError(inputs.name_arguments(_error(said()), folder / INPUTS))
                say(Console(), said().strip(), keep="\n")  # nothing is left to train
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    return process


def _has_started(folder: Path, begun: float, said: str) -> bool:
    """Whether the run is up since `begun`, by the `headrace up` that has `said` this: another one may have been faster."""
    with contextlib.suppress(CodecError):  # of an earlier start: this one overwrites it
        record = history.read_record(folder)
        return record is not None and record.since >= begun and runs.HEADING.format(folder.name) in said
    return False


def _error(said: str) -> str:
    """Return the error in what `headrace up` said, or all of it."""
    _, error, text = f"\n{said}".rpartition("\nerror: ")
    return (text if error else said).strip() or "headrace up ended and said nothing"
