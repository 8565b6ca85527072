"""Checkpoints on disk (a folder `step_{version}` exists completely or not at all), each with its ledger of trained prompts.

A checkpoint is written under a name that no reader looks at, flushed to disk file by file, and renamed. Whatever stops the
writer (SIGKILL, a full disk, a power cut) leaves the earlier checkpoints intact; the next writer removes the remains. Layout:

    step_12/policy/       Hugging Face checkpoint: config, safetensors, tokenizer
    step_12/value/        of ppo: the value model's backbone as a Hugging Face checkpoint, and its head (value_head.safetensors)
    step_12/training/     torch.distributed.checkpoint: counters, and of each trained model its optimizer and schedule
    step_12/ledger.json   {step: [group ids]} of the steps trained since the checkpoint before it
    step_12/trained.roaring  `order` of every prompt that the weights were trained on (`Ledger.encode`)
    step_12/ended.bitmap  `order` of every group that ended failed or filtered (`headrace.replay.Ended`)
    step_12/failures.bitmap  `order` of those that failed
    step_12/state.json    `CheckpointState`; the last file to be written

As long as the buffer keeps its data, it knows what the ledger knows. If it loses writes (an empty volume, a power cut, a failover), or is
rewound to an older checkpoint, that checkpoint's ledger says which prompts its weights have seen: every other prompt is enqueued again,
and none is trained twice.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pyroaring import BitMap

from headrace.config.services import CheckpointingConfig
from headrace.errors import ServiceError
from headrace.replay import Ended
from headrace_services.trainer.files import atomic_write, cannot_write_checkpoint, fsync

T = TypeVar("T")

TRAINED = "trained.roaring"
ENDED = "ended.bitmap"
FAILURES = "failures.bitmap"

_PUBLISHED = re.compile(r"step_(0|[1-9][0-9]*)")
_UNFINISHED = ".unfinished-"


class Ledger:
    """The prompts that the weights were trained on: the `order` of each so far (`trained`), and, step by step, the groups since the last
    published checkpoint (`steps`). A roaring bitmap takes at most about two bytes per prompt, and much less where they are dense."""

    def __init__(self, trained: Iterable[int] = ()) -> None:
        self.trained = BitMap(trained)
        self.steps: dict[int, list[str]] = {}

    @classmethod
    def decode(cls, trained: bytes) -> Ledger:
        """The ledger that `encode` was called on, without its steps. Raises `ServiceError` for anything else."""
        try:
            return cls(BitMap.deserialize(trained))
        except (ValueError, IndexError) as error:
            raise ServiceError(f"the checkpoint's ledger can't be read ({error})") from error

    def encode(self) -> bytes:
        packed = self.trained.copy()
        packed.run_optimize()
        data: bytes = packed.serialize()
        return data

    def record(self, step: int, groups: Sequence[str], orders: Sequence[int]) -> None:
        """Record that `step` was trained on these groups, whose prompts have these orders. Raises `ServiceError` for a prompt that is
        already recorded: none is trained twice in the history of the weights (law 1)."""
        for order in orders:
            if order < 0 or order in self.trained:
                raise ServiceError(f"prompt {order} of the run's order came to the trainer a second time (law 1)")
            self.trained.add(order)
        self.steps[step] = list(groups)

    def published(self) -> None:
        """Forget `steps`, because the checkpoint that contains them is safe on disk."""
        self.steps = {}

    @property
    def last(self) -> int:
        """The highest `order` trained, -1 if there is none."""
        return int(self.trained.max()) if self.trained else -1

    def missing(self, last: int, ended: BitMap) -> Iterator[int]:
        """Every `order` up to `last` that was neither trained nor `ended`, ascending."""
        return iter(BitMap(range(last + 1)) - self.trained - ended)


def ended_orders(ended: Ended) -> BitMap:
    """The `order` of every group that ended without being trained, from the bits of `ended.bitmap`, most significant first. Raises
    `ServiceError` if their number differs from the counts."""
    orders = np.flatnonzero(np.unpackbits(np.frombuffer(ended.bitmap, dtype=np.uint8)))
    if len(orders) != ended.failed + ended.filtered:
        raise ServiceError(
            f"the checkpoint counts {ended.failed} failed and {ended.filtered} filtered groups, but holds the places of {len(orders)}"
        )
    return BitMap(array("I", orders.astype(np.uint32).tobytes()))


class CheckpointState(BaseModel):
    """The state of the run when the weights of `version` were published.

    `ancestors` are the timelines that the weights descend from, oldest first, without `timeline` itself; `incarnation` is the buffer's;
    `cursor` is one more than the highest `order` trained; `failed` and `filtered` count the groups that ended without being trained;
    `retries` counts the retries of failed groups that the journal had by then (None: written by a build that knew of none);
    `consumed_samples` and `total_valid_tokens` count the trajectories that the weights were trained on, and their tokens that counted;
    `metrics` are named as `checkpointing.metric_name` names them (`val:accuracy`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    version: int
    timeline: str
    incarnation: str = ""
    ancestors: tuple[str, ...] = ()
    cursor: int
    failed: int = 0
    filtered: int = 0
    retries: int | None = None
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


_GROUPS_BY_STEP = TypeAdapter(dict[int, list[str]])


class Checkpoints:
    """The checkpoints of a run, in one folder that the trainer's ranks share. Only rank 0 of one trainer calls the methods that write."""

    def __init__(self, folder: Path, settings: CheckpointingConfig) -> None:
        self._folder = folder
        self._settings = settings

    def published(self) -> list[int]:
        """Versions that can be loaded, oldest first."""
        if not self._folder.is_dir():
            return []
        names = (_PUBLISHED.fullmatch(path.name) for path in self._folder.iterdir() if (path / "state.json").is_file())
        return sorted(int(match[1]) for match in names if match)

    def newest(self) -> int | None:
        return max(self.published(), default=None)

    def path(self, version: int) -> Path:
        return self._folder / f"step_{version}"

    def state(self, version: int) -> CheckpointState:
        """The state file. Raises `ServiceError` if it is not what `publish` writes."""
        return self._read(version, "state.json", CheckpointState.model_validate_json)

    def ledger(self, version: int) -> dict[int, list[str]]:
        """Group ids of each step trained since the checkpoint before. Raises `ServiceError` as `state` does."""
        return self._read(version, "ledger.json", _GROUPS_BY_STEP.validate_json)

    def file(self, version: int, name: str) -> bytes:
        """The content of one of the `files` that it was published with. Raises `ServiceError` as `state` does."""
        return self._read(version, name, bytes)

    def begin(self, version: int) -> Path:
        """Remove what earlier writers left and make an empty folder for the learner's files.

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
            for remains in self._folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(remains)
            unfinished.mkdir()
        return unfinished

    def unfinished(self, version: int) -> Path:
        """The folder that `begin(version)` makes, into which every rank saves."""
        return self._folder / f"{_UNFINISHED}step_{version}"

    def publish(
        self,
        state: CheckpointState,
        ledger: Mapping[int, Sequence[str]],
        keep: Collection[int] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Turn the folder from `begin`, now complete, into a checkpoint; then remove those that retention no longer keeps.

        `files` (contents by name) become part of it. Versions in `keep` stay: their metrics are still to come.
        Once this returns, the checkpoint survives a power cut. Raises `ServiceError` for a full disk.
        """
        unfinished, final = self.unfinished(state.version), self.path(state.version)
        with _disk_errors(self._folder):
            (unfinished / "ledger.json").write_bytes(
                _GROUPS_BY_STEP.dump_json({step: [*ids] for step, ids in ledger.items()})
            )
            for name, content in (files or {}).items():
                (unfinished / name).write_bytes(content)
            (unfinished / "state.json").write_text(state.model_dump_json(indent=2))
            _fsync_all(unfinished)
            unfinished.rename(final)
            fsync(self._folder)
            self._retain(keep)
        return final

    def add_metrics(self, version: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that became known after `publish`; retention uses them from now on. A no-op without such a checkpoint."""
        if version not in self.published():
            return
        state = self.state(version)
        known = state.model_copy(update={"metrics": {**state.metrics, **metrics}})
        path = self.path(version) / "state.json"
        with _disk_errors(self._folder):
            with atomic_write(path) as unfinished:
                unfinished.write_text(known.model_dump_json(indent=2))
                fsync(unfinished)
            self._retain()

    def _read(self, version: int, name: str, parse: Callable[[bytes], T]) -> T:
        path = self.path(version) / name
        try:
            return parse(path.read_bytes())
        except (OSError, ValidationError) as error:
            reason = str(error).replace("\n", " ")
            raise ServiceError(
                f"{path} can't be read ({reason}); remove {path.parent} to go on from an earlier checkpoint"
            ) from error

    def _retain(self, keep: Collection[int] = ()) -> None:
        """Remove checkpoints by `superseded`; the newest always stays."""
        metrics = {version: self.state(version).metrics for version in self.published()}
        for version in set(superseded(metrics, self._settings)) - set(keep):
            removed = self._folder / f"{_UNFINISHED}removed-{version}"
            self.path(version).rename(removed)  # half a checkpoint must never be found under its name
            shutil.rmtree(removed)


def superseded(metrics: Mapping[int, Mapping[str, float]], settings: CheckpointingConfig) -> list[int]:
    """Versions that retention removes, oldest first: all but the newest and the `keep_top_k` best by `metric_name`.

    Of two equal ones the newer is better, and any metric is better than none. Without `metric_name`, newer is better.
    """
    if settings.keep_top_k is None:
        return []
    sign = 1.0 if settings.higher_is_better else -1.0

    def merit(version: int) -> tuple[bool, float, int]:
        value = metrics[version].get(settings.metric_name) if settings.metric_name else None
        return value is not None, sign * value if value is not None else 0.0, version

    kept = {*sorted(metrics, key=merit, reverse=True)[: settings.keep_top_k], max(metrics, default=None)}
    return sorted(set(metrics) - kept)


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_write_checkpoint(folder, error) from error


def _fsync_all(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            fsync(Path(parent) / name)
        fsync(Path(parent))
