"""Makes a run that continues from a checkpoint of another one, under a name of its own.

The fork has the checkpoint with the chain that led to it, the lineage, metrics and samples of the steps before it, and what became of
every prompt so far. It has no buffer: its trainer rebuilds one from the checkpoint's ledger, so it trains on none of the prompts again,
and the two runs share nothing. Files that nobody writes to are linked rather than copied, where the file system can.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from headrace.base.errors import ConfigError, ServiceError
from headrace.base.files import fsync, link_or_copy
from headrace.config import Config
from headrace.config.keys import look
from headrace.config.yaml_text import dump_value, parse
from headrace.run import checkpoints, group_files, prompt_counts
from headrace.run.checkpoints import STATE, SUMS
from headrace.run.folder import INPUTS, SAVED
from headrace.run.history import RECORD, RunRecord
from headrace.run.journal import JOURNAL, read_journal, surviving, write_line
from headrace.run.lineage import FOLDER, NAME, LineageFiles
from headrace.run.sample_files import Kind, SampleFiles

_TRIES = 3


def fork(config: Config, version: int, folder: Path, unshared: Sequence[str]) -> None:
    """Make `folder` the fork of the run of `config` at checkpoint `version`. Its id is the folder's name, and its configuration has none of
    the keys `unshared`.

    Raises `ConfigError` if the checkpoint doesn't exist, or the folder does. Raises `ServiceError` if the folder can't be written; nothing
    of it is left then.
    """
    there = checkpoints.find_published(config.checkpoint_folder)
    if version not in there:
        raise ConfigError(
            f"{config.checkpoint_folder} has no checkpoint {version}; it has {', '.join(map(str, there)) or 'none'}. A run from the "
            "initial model is not a fork: give its YAML to `headrace up`"
        )
    if folder.exists():
        raise ConfigError(f"{folder} already exists; give another name")
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a fork that was killed
    try:
        unfinished.mkdir(parents=True, mode=0o700)
        retries = _copy_checkpoint(config.checkpoint_folder, version, unfinished / "checkpoints", folder.name)
        _write(unfinished / JOURNAL, b"".join(_journal(config, version, retries)))
        copy_groups(config.run_folder / group_files.FOLDER, unfinished / group_files.FOLDER)
        _copy_samples(SampleFiles.of(config), version, unfinished / "logs")
        if (config.run_folder / prompt_counts.FILE).exists():
            shutil.copyfile(config.run_folder / prompt_counts.FILE, unfinished / prompt_counts.FILE)
        if (config.run_folder / INPUTS).is_dir():  # not linked: they may be edited
            shutil.copytree(config.run_folder / INPUTS, unfinished / INPUTS)
        now = time.time()
        _write(unfinished / RECORD, msgspec.json.encode(RunRecord(now, "stopped", now)))
        _write(unfinished / SAVED, _configuration(config, folder, unshared).encode())
        unfinished.rename(folder)
        fsync(folder.parent)
    except OSError as error:
        raise ServiceError(f"can't write {folder} ({error}); free space there, or give another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_checkpoint(source: Path, version: int, target: Path, run_id: str) -> int:
    """Copy the checkpoint, its chain and its lineage. Returns how many retries of failed groups it knows of."""
    place = checkpoints.path_of(target, version)
    unfinished = shutil.ignore_patterns(".metrics-*")
    shutil.copytree(checkpoints.path_of(source, version), place, ignore=unfinished, copy_function=link_or_copy)
    state = json.loads((place / STATE).read_bytes()) | {"run_id": run_id}
    (place / STATE).unlink()  # the source's file stays as it is
    data = json.dumps(state).encode()
    _write(place / STATE, data)
    if (place / SUMS).exists():
        lines = (place / SUMS).read_text().splitlines()[:-1]  # that of the state is the last
        (place / SUMS).unlink()
        digest = hashlib.sha256(data).hexdigest()
        _write(place / SUMS, "".join(f"{line}\n" for line in [*lines, f"{digest}  {STATE}"]).encode())
    for start in checkpoints.in_effect(checkpoints.read_chain(source)):
        if start.version < version:
            checkpoints.append_start(target, start)
    (target / FOLDER).mkdir()
    for step, path in LineageFiles(source / FOLDER).files():
        if step < version and NAME.fullmatch(path.name):
            link_or_copy(path, target / FOLDER / path.name)
    return state.get("retries") or 0


def _journal(config: Config, version: int, retries: int) -> Iterator[bytes]:
    """Yield the lines of the steps that led to the checkpoint, and of the retries that it knows of."""
    lines = read_journal(config.run_folder / JOURNAL)
    kept = {
        id(line)
        for line in surviving(lines)
        if line.step < version or (line.kind, line.step) == ("validation", version)
    }
    known = {id(line) for line in [line for line in lines if line.kind == "retry"][:retries]}
    yield from (write_line(line).encode() for line in lines if id(line) in kept | known)


def _copy_samples(source: SampleFiles, version: int, folder: Path) -> None:
    """Copy the samples of the steps that led to the checkpoint, and of the validations up to it."""
    target = SampleFiles(folder, None)
    target.make_folder()
    for kind in get_args(Kind):
        for step in source.steps(kind):
            if step < version or (kind != "train" and step == version):
                with contextlib.suppress(FileNotFoundError):  # its run has removed it meanwhile
                    link_or_copy(source.path(kind, step), target.path(kind, step))


def copy_groups(source: Path, target: Path) -> None:
    """Make `target` a copy of a folder of what became of every group. Raises `OSError`."""
    for tries in range(_TRIES):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        try:
            for file in group_files.list_files(source):
                link_or_copy(file.path, target / file.name)
        except FileNotFoundError:  # the trainer of the source has merged it with others meanwhile
            if tries == _TRIES - 1:
                raise
        else:
            return


def _configuration(config: Config, folder: Path, unshared: Sequence[str]) -> str:
    """Return the configuration that the run saved, for the fork."""
    saved = config.run_folder / SAVED
    values = parse(saved.read_text(encoding="utf-8"), str(saved))
    run = values["run"]
    run.update(id=folder.name, dir=str(folder.absolute().parent))
    if run.get("started_in"):  # as seen from the fork's folder
        started_in = (config.run_folder.resolve() / run["started_in"]).resolve()
        run["started_in"] = os.path.relpath(started_in, folder.absolute().parent.resolve() / folder.name)
    for key in ("checkpointing.checkpoint_dir", "logger.log_dir", *unshared):
        section, _, name = key.rpartition(".")
        holder = look(values, section)
        if isinstance(holder, dict):
            holder.pop(name, None)
    return dump_value(_moved(values, str(config.run_folder.absolute() / INPUTS), str(folder.absolute() / INPUTS)))


def _moved(value: Any, source: str, target: str) -> Any:
    """Return the value with the paths in the folder `source` as those in `target`."""
    if isinstance(value, dict):
        return {key: _moved(inner, source, target) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, source, target) for inner in value]
    is_inside = isinstance(value, str) and value.startswith(f"{source}/")
    return target + value.removeprefix(source) if is_inside else value


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
    fsync(path)
