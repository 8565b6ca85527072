"""Checkpoints on disk: a folder `step_{version}` is there whole or not at all.

A checkpoint is written under a name that no reader looks at, forced to the disk file by file, and renamed. Whatever stops the
writer (SIGKILL, a full disk, a power cut) leaves the checkpoints before it as they were, and the remains are removed by the
next one who writes. Layout:

    step_12/policy/       Hugging Face checkpoint: config, safetensors, tokenizer
    step_12/value/        of ppo: the value model's backbone as a Hugging Face checkpoint, and its head (value_head.safetensors)
    step_12/training/     torch.distributed.checkpoint: counters, and of each trained model its optimizer and schedule
    step_12/ledger.json   {step: [group ids]} of the steps trained since the checkpoint before it
    step_12/trained.roaring  places in the order of prompts that the weights were trained on (`Orders.encode`)
    step_12/ended.bitmap  places of groups that ended failed or filtered (`headrace.replay.Ended`)
    step_12/state.json    where the run stood; the last file to be written
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from headrace.config.services import Checkpointing
from headrace.errors import ServiceError
from services.trainer.errors import cannot_write
from services.trainer.files import force, whole_file

Ledger = dict[int, list[str]]
T = TypeVar("T")

TRAINED = "trained.roaring"
ENDED = "ended.bitmap"

_PUBLISHED = re.compile(r"step_(0|[1-9][0-9]*)")
_UNFINISHED = ".unfinished-"


class State(BaseModel):
    """Where the run stood when the weights of `version` were published.

    `ancestors` are the timelines the weights descend from, oldest first, without `timeline` itself; `cursor` is the next
    `order` of prompts to enqueue; `failed` and `filtered` count the groups that ended without being trained; `incarnation`
    is that of the buffer they came through; `consumed_samples` and `total_valid_tokens` say how many trajectories the weights were
    trained on, and how many of their tokens counted; `metrics` are named as `checkpointing.metric_name` names them
    (`val:accuracy`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: int
    timeline: str
    incarnation: str = ""
    ancestors: tuple[str, ...] = ()
    cursor: int
    failed: int = 0
    filtered: int = 0
    consumed_samples: int = 0
    total_valid_tokens: int = 0
    run_id: str
    metrics: dict[str, float] = {}

    @model_validator(mode="before")
    @classmethod
    def _of_this_build(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and "trained" in fields:
            raise ValueError(
                "an older build wrote it, whose ledger this one doesn't read: finish the run with that build"
            )
        return fields


_STATE = TypeAdapter(State)
_LEDGER = TypeAdapter(Ledger)


class Checkpoints:
    """The checkpoints of a run, in one folder that the trainer's ranks share. Only one trainer writes to it."""

    def __init__(self, folder: Path, settings: Checkpointing) -> None:
        self._folder = folder
        self._settings = settings

    def published(self) -> list[int]:
        """Versions that can be loaded, oldest first; whatever was not finished is not among them."""
        if not self._folder.is_dir():
            return []
        names = (_PUBLISHED.fullmatch(path.name) for path in self._folder.iterdir() if (path / "state.json").is_file())
        return sorted(int(match[1]) for match in names if match)

    def newest(self) -> int | None:
        return max(self.published(), default=None)

    def path(self, version: int) -> Path:
        return self._folder / f"step_{version}"

    def state(self, version: int) -> State:
        """Raises `ServiceError` for a state file that is not what `publish` writes."""
        return self._read(version, "state.json", _STATE)

    def ledger(self, version: int) -> Ledger:
        """Group ids of each step trained since the checkpoint before. Raises `ServiceError` as `state` does."""
        return self._read(version, "ledger.json", _LEDGER)

    def file(self, version: int, name: str) -> bytes:
        """One of the `files` that it was published with. Raises `ServiceError` as `state` does."""
        path = self.path(version) / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from error

    def begin(self, version: int) -> Path:
        """Remove what earlier writers left and make an empty folder for the learner's files (rank 0).

        Raises `ServiceError` if `version` is published already or the folder can't be made.
        """
        if self.path(version).exists():
            raise ServiceError(
                f"checkpoint {self.path(version)} exists already; remove it, or set checkpointing.checkpoint_dir to a "
                "folder of this run's own"
            )
        unfinished = self.unfinished(version)
        with _disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            unfinished.mkdir()
        return unfinished

    def unfinished(self, version: int) -> Path:
        """The folder that `begin(version)` makes: where every rank saves to."""
        return self._folder / f"{_UNFINISHED}step_{version}"

    def publish(
        self,
        state: State,
        ledger: Mapping[int, Sequence[str]],
        keep: Collection[int] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Make the folder that `begin` gave, now full, a checkpoint; then drop what retention no longer keeps (rank 0).

        `files` (contents by name) are part of it. Versions in `keep` stay: their metrics are still to come.
        When this returns the checkpoint outlives a power cut. Raises `ServiceError` for a full disk.
        """
        unfinished, final = self.unfinished(state.version), self.path(state.version)
        with _disk_errors(self._folder):
            (unfinished / "ledger.json").write_bytes(_LEDGER.dump_json({step: [*ids] for step, ids in ledger.items()}))
            for name, content in (files or {}).items():
                (unfinished / name).write_bytes(content)
            (unfinished / "state.json").write_text(state.model_dump_json(indent=2))
            _force_to_disk(unfinished)
            unfinished.rename(final)
            force(self._folder)
            self._retain(keep)
        return final

    def add_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Metrics that became known after `publish` (rank 0); retention goes by them from now on. No such checkpoint: nothing."""
        if version not in self.published():
            return
        state = self.state(version)
        known = state.model_copy(update={"metrics": {**state.metrics, **metrics}})
        path = self.path(version) / "state.json"
        with _disk_errors(self._folder):
            with whole_file(path) as unfinished:
                unfinished.write_text(known.model_dump_json(indent=2))
                force(unfinished)
            self._retain()

    def _read(self, version: int, name: str, adapter: TypeAdapter[T]) -> T:
        path = self.path(version) / name
        try:
            return adapter.validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise _unreadable(path, error) from error

    def _retain(self, keep: Collection[int] = ()) -> None:
        """Law: the newest always stays."""
        metrics = {version: self.state(version).metrics for version in self.published()}
        for version in set(superseded(metrics, self._settings)) - set(keep):
            doomed = self._folder / f"{_UNFINISHED}removed-{version}"
            self.path(version).rename(doomed)  # half a checkpoint must never be found under its name
            shutil.rmtree(doomed)

    def _remove_unfinished(self) -> None:
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path)


def superseded(metrics: Mapping[int, Mapping[str, float]], settings: Checkpointing) -> list[int]:
    """Versions that go, oldest first: all but the newest and the `keep_top_k` best by `metric_name`.

    The newer of two equals is better, and any metric better than none. Without a name, newer is better.
    """
    if settings.keep_top_k is None:
        return []
    sign = 1.0 if settings.higher_is_better else -1.0

    def merit(version: int) -> tuple[bool, float, int]:
        value = metrics[version].get(settings.metric_name) if settings.metric_name else None
        return value is not None, sign * value if value is not None else 0.0, version

    kept = {*sorted(metrics, key=merit, reverse=True)[: settings.keep_top_k], max(metrics, default=None)}
    return sorted(set(metrics) - kept)


def _unreadable(path: Path, error: Exception) -> ServiceError:
    reason = str(error).replace("\n", " ")
    return ServiceError(f"{path} can't be read ({reason}); remove {path.parent} to go on from an earlier checkpoint")


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from error


def _force_to_disk(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            force(Path(parent) / name)
        force(Path(parent))
