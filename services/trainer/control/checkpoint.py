"""Checkpoints on disk, each with its ledger of trained prompts. A folder `step_{version}` exists completely or not at all.

A checkpoint is written under a name that readers ignore, flushed to disk file by file, and renamed. Whatever stops the writer (SIGKILL, a
full disk, a power cut) leaves the earlier checkpoints intact. The next trainer removes the remains. If another trainer of the run wakes up
late, the chain beside the checkpoints decides which of them are the run's (`headrace.run.checkpoints`). Layout:

    step_12/policy/       Hugging Face checkpoint: config, safetensors, tokenizer
    step_12/policy/adapter/  with `policy.lora_cfg`: the adapter in PEFT's format; the weights beside it are merged with it
    step_12/value/        with ppo: the value model's backbone as a Hugging Face checkpoint, and its head (value_head.safetensors)
    step_12/training/     counters, and each trained model's optimizer and schedule (`learning.optimizer`)
    step_12/ledger.json   {step: [group ids]} of the steps trained since the checkpoint before it
    step_12/trained.roaring  `order` of every prompt that the weights were trained on (`Ledger.encode`)
    step_12/ended.bitmap  `order` of every group that ended failed or filtered (`headrace.replay.Ended`)
    step_12/failures.bitmap  `order` of every group that failed
    step_12/state.json    `CheckpointState`
    step_12/SHA256SUMS    the digests of all files above; the last to be written
    step_12/metrics-{timeline}.json  metrics that the trainer on that timeline added later (`add_metrics`)

As long as the buffer keeps its data, it has the ledger's information too. If it loses writes (an empty volume, a power cut, a failover), or
is rewound to an older checkpoint, that checkpoint's ledger shows which prompts its weights have seen. Every other prompt is enqueued again,
and none is trained twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pyroaring import BitMap

from headrace.base.errors import Restartable, ServiceError
from headrace.base.files import fsync
from headrace.base.scratch import scratch_folder
from headrace.config.services import CheckpointingConfig
from headrace.replay import Ended
from headrace.run import checkpoints as folders
from headrace.run.checkpoints import DAMAGE, STATE, FolderLock, Start, cannot_write_checkpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

LEDGER = "ledger.json"
TRAINED = "trained.roaring"
ENDED = "ended.bitmap"
FAILURES = "failures.bitmap"


class Ledger:
    """The prompts that the weights were trained on.

    `trained` has the `order` of each. A roaring bitmap takes at most about two bytes per prompt, and much less for dense ones. `steps` has
    the groups of each step since the newest checkpoint.
    """

    def __init__(self, trained: Iterable[int] = ()) -> None:
        self.trained = BitMap(trained)
        self.steps: dict[int, list[str]] = {}

    @classmethod
    def decode(cls, trained: bytes) -> Ledger:
        """Return the ledger that `encode` was called on, without its steps. Raises `ServiceError` for anything else."""
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
        already recorded: the weights must never be trained on a prompt twice (law 1)."""
        for order in orders:
            if order < 0 or order in self.trained:
                raise ServiceError(f"prompt {order} of the run's order came to the trainer a second time (law 1)")
            self.trained.add(order)
        self.steps[step] = list(groups)

    def cut(self) -> dict[int, list[str]]:
        """Return `steps` for a new checkpoint, and start the steps of the next one."""
        steps, self.steps = self.steps, {}
        return steps

    @property
    def last(self) -> int:
        """The highest `order` trained, -1 if there is none."""
        return int(self.trained.max()) if self.trained else -1

    def missing(self, last: int, ended: BitMap) -> Iterator[int]:
        """Return every `order` up to `last` that was neither trained nor `ended`, ascending."""
        return iter(BitMap(range(last + 1)) - self.trained - ended)


def ended_orders(ended: Ended) -> BitMap:
    """Return the `order` of every group that ended untrained, from the bits of `ended.bitmap`, most significant first. Raises
    `ServiceError` if their number differs from the counts."""
    orders = np.flatnonzero(np.unpackbits(np.frombuffer(ended.bitmap, dtype=np.uint8)))
    if len(orders) != ended.failed + ended.filtered:
        raise ServiceError(
            f"the checkpoint counts {ended.failed} failed and {ended.filtered} filtered groups, but has the places of {len(orders)}"
        )
    return BitMap(array("I", orders.astype(np.uint32).tobytes()))


class CheckpointState(BaseModel):
    """The state of the run when the weights of `version` were published.

    `ancestors` are the timelines that the weights descend from, oldest first, without `timeline` itself. `incarnation` is the buffer's.
    `cursor` is one more than the highest `order` trained. `failed` and `filtered` count the groups that ended untrained. `retries` counts
    the retries of failed groups that the journal had by then (None: written by a build without retries). `consumed_samples` and
    `total_valid_tokens` count the trajectories that the weights were trained on, and the tokens that counted. `prompts` is the digest of
    the run's prompts (None: written by a build without digests). `metrics` have names as in `checkpointing.metric_name` (`val:accuracy`).
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
    prompts: str | None = None
    metrics: dict[str, float] = {}


def write_state(
    folder: Path, state: CheckpointState, ledger: Mapping[int, Sequence[str]], files: Mapping[str, bytes]
) -> None:
    """Write what a checkpoint has beside the learner's files, its state last. Raises `OSError`."""
    (folder / LEDGER).write_bytes(_GROUPS_BY_STEP.dump_json({step: [*ids] for step, ids in ledger.items()}))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / STATE).write_text(state.model_dump_json(indent=2))


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = str(error).replace("\n", " ")
        raise ServiceError(
            f"{path} can't be read ({reason}); remove {path.parent} to continue from an earlier checkpoint"
        ) from error


def read_state(folder: Path) -> CheckpointState:
    """Return the state with which a checkpoint was published. Raises `ServiceError` if it is not what `write_state` writes."""
    return _read(folder / STATE, CheckpointState.model_validate_json)


def read_ledger(folder: Path) -> dict[int, list[str]]:
    """Return the group ids of each step trained since the checkpoint before. Raises as `read_state` does."""
    return _read(folder / LEDGER, _GROUPS_BY_STEP.validate_json)


_GROUPS_BY_STEP = TypeAdapter(dict[int, list[str]])
_METRICS = TypeAdapter(dict[str, float], config=ConfigDict(allow_inf_nan=False))


class Checkpoints:
    """The checkpoints of a run, in one folder that the trainer's ranks share.

    Only rank 0 calls the methods that write, each with its timeline. A trainer whose successor has started is refused, and the successor's
    files are not touched.
    """

    def __init__(self, folder: Path, settings: CheckpointingConfig) -> None:
        self._folder = folder
        self._settings = settings
        self._damaged: dict[int, str] = {}  # what `newest` found

    def lock(self) -> FolderLock:
        """Take the folder's lock for as long as this process lives. If another process holds it, or the file system has no locks, warn and
        continue. Raises `ServiceError` if the folder can't be written."""
        with disk_errors(self._folder):
            lock = FolderLock(self._folder)
        try:
            holder = lock.take()
        except OSError as error:
            log.warning(
                "%s can't be locked (%s), so two trainers of this run at work would go unnoticed", self._folder, error
            )
            return lock
        if holder is not None:
            log.warning(
                "%s is in use (%s): another trainer of this run still exists, perhaps frozen. This one takes over; what the other "
                "publishes from now on is set aside. Stop the other",
                self._folder, holder,
            )  # fmt: skip
        return lock

    def start(self, timeline: str, version: int) -> None:
        """Record that a trainer continues from `version` on `timeline`. Remove what others left unfinished, so that they can't complete it
        any more (`_retain`). Set aside what they made beyond that version, and what is damaged there. All of this survives a power cut once
        it has returned.

        Raises `ServiceError`. If another trainer has removed or abandoned that checkpoint, it raises `Restartable` and changes nothing.
        """
        if version and version not in self.find_published():
            raise Restartable(
                f"{self.path(version)}, which this trainer should continue from, is gone or abandoned: another trainer of the run is "
                "at work. Stop it, and start this one again: it resumes from the newest checkpoint"
            )
        with disk_errors(self._folder):
            folders.append_start(self._folder, Start(timeline, version))
            self._remove_remains(timeline)
            # the state of a damaged one may not say which timeline it is of
            damaged = [each for each in self.find_published() if each > version and self._problem(each) is not None]
            for off in (*folders.find_abandoned(self._folder), *damaged):
                self._set_aside(off, timeline, self._problem(off))

    @contextlib.contextmanager
    def trial(self) -> Iterator[Path]:
        """Yield a folder in which saving can be tried. Raises `ServiceError` if it can't be made; it is removed at the end."""
        with contextlib.ExitStack() as stack:
            with disk_errors(self._folder):
                folder = stack.enter_context(scratch_folder(".trial-", self._folder))
            yield folder

    def find_published(self) -> list[int]:
        """Return the versions that a trainer may continue from, oldest first."""
        return folders.find_published(self._folder)

    def newest(self, changed: Callable[[Path], str | None] | None = None) -> int | None:
        """Return the newest version that a trainer can continue from. Newer ones are damaged; each is named in a warning, and `start` sets
        it aside. `changed` is as `checkpoints.find_change`; without it only beginnings of files are read. Raises `ServiceError` if all are
        damaged."""

        def damage(folder: Path, version: int) -> str | None:
            problem = _damage(folder, version)
            return changed(folders.path_of(folder, version)) if problem is None and changed is not None else problem

        version, self._damaged = folders.usable(self._folder, damage)
        for newer, problem in self._damaged.items():
            log.warning("%s is damaged, and the checkpoint before it is used: %s", self.path(newer), problem)
        return version

    def path(self, version: int) -> Path:
        return folders.path_of(self._folder, version)

    def state(self, version: int) -> CheckpointState:
        """Return the state, with the metrics that were added later. If several trainers added a metric, the newest trainer's value counts.
        Raises `ServiceError` if it is not what `publish` writes."""
        state = read_state(self.path(version))
        metrics = dict(state.metrics)
        for name in folders.later_metrics(self._folder, version):
            metrics |= _read(self.path(version) / name, _METRICS.validate_json)
        return state.model_copy(update={"metrics": metrics})

    def ledger(self, version: int) -> dict[int, list[str]]:
        """Return the group ids of each step trained since the previous checkpoint. Raises `ServiceError` as `state` does."""
        return read_ledger(self.path(version))

    def file(self, version: int, name: str) -> bytes:
        """Return the content of one of the `files` that it was published with. Raises `ServiceError` as `state` does."""
        return _read(self.path(version) / name, bytes)

    def begin(self, version: int, timeline: str) -> Path:
        """Make an empty folder for the learner's files.

        Raises `ServiceError` if `version` is published already, if another trainer has taken over, or if the folder can't be made.
        """
        self.require_newest(timeline)
        unfinished = self.locate_unfinished(version, timeline)
        with disk_errors(self._folder):
            self._make_way(version, timeline)
            self._remove_remains(timeline)
            unfinished.mkdir()
        return unfinished

    def locate_unfinished(self, version: int, timeline: str) -> Path:
        """Return the folder that `begin(version, timeline)` makes, into which every rank saves."""
        return self._folder / folders.unfinished_name(version, timeline)

    def publish(
        self,
        state: CheckpointState,
        ledger: Mapping[int, Sequence[str]],
        keep: Collection[int] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Turn the folder from `begin`, now complete, into a checkpoint. Then remove the checkpoints that retention no longer keeps.

        `files` (contents by name) become part of it. Versions in `keep` stay, because their metrics are still to come. Once this returns,
        the checkpoint survives a power cut. Raises `ServiceError` if the disk is full, or if another trainer has taken over.
        """
        self.require_newest(state.timeline)
        with disk_errors(self._folder):
            write_state(self.locate_unfinished(state.version, state.timeline), state, ledger, files or {})
        return self._complete(state.version, state.timeline, keep)

    def leads_to(self, snapshot: Path) -> bool:
        """Return whether a complete snapshot (`snapshots`) continues from the newest checkpoint, and on the chain."""
        state, published = read_state(snapshot), max(self.find_published(), default=0)
        continued = min(read_ledger(snapshot), default=None) == published
        return continued and state.timeline == folders.find_timeline(folders.read_chain(self._folder), state.version)

    def adopt(self, version: int, copy: Callable[[Path], None]) -> None:
        """Turn a complete snapshot of `version`, to which the checkpoints lead, into the newest of them. `copy` gets the folder for its
        files. Raises as `publish` does.

        This has a timeline of its own. The trainer that made the snapshot may only be frozen; from here on it publishes nothing more, and
        has no part in the folder that becomes the checkpoint.
        """
        timeline = f"snapshot-{secrets.token_hex(8)}"
        with disk_errors(self._folder):
            folders.append_start(self._folder, Start(timeline, version))
        copy(self.begin(version, timeline))
        self._complete(version, timeline)

    def _complete(self, version: int, timeline: str, keep: Collection[int] = ()) -> Path:
        unfinished, final = self.locate_unfinished(version, timeline), self.path(version)
        with disk_errors(self._folder):
            folders.write_sums(unfinished)
            _fsync_all(unfinished)
            self.require_newest(timeline)
            self._make_way(version, timeline)
            unfinished.rename(final)
            fsync(self._folder)
            self.require_newest(timeline)
            self._retain(timeline, keep)
        return final

    def add_metrics(self, version: int, timeline: str, metrics: Mapping[str, float]) -> None:
        """Add metrics that became known after `publish`. Retention uses them from now on. A no-op without such a checkpoint. Raises
        `ServiceError` as `publish` does.

        A trainer may freeze anywhere in here and wake up after its successor has begun. So the metrics go into this trainer's own file, in
        the folder that was the checkpoint's while this trainer was the newest: a successor renames that folder before it makes another.
        """
        with contextlib.ExitStack() as stack, disk_errors(self._folder):
            folder: int | None = None
            with contextlib.suppress(FileNotFoundError):
                folder = os.open(self.path(version), os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, folder)
            self.require_newest(timeline)
            if folder is None or version not in self.find_published():
                return
            _add_metrics(folder, folders.metrics_name(timeline), metrics)
            self.require_newest(timeline)
            self._retain(timeline)

    def _retain(self, timeline: str, keep: Collection[int] = ()) -> None:
        """Remove the superseded checkpoints. The newest always stays. An older one whose metrics can't be read is set aside.

        A trainer may freeze anywhere in here and wake up after its successor has begun. So what it removes goes into an unfinished folder
        that it made while it was the newest. A successor removes that folder as it starts, and then nothing can be moved into it any more.
        """
        with self._while_newest(timeline):
            metrics = self._metrics(timeline)
            for version in set(select_superseded(metrics, self._settings)) - set(keep):
                removed = self.locate_unfinished(version, timeline)
                removed.mkdir()
                self.require_newest(timeline)
                self.path(version).rename(removed / "checkpoint")  # no reader must find half of it under its name
                self._discard(removed, timeline)

    def _metrics(self, timeline: str) -> dict[int, dict[str, float]]:
        """Return the metrics of every published checkpoint."""
        versions, metrics = self.find_published(), {}
        for version in versions:
            try:
                metrics[version] = self.state(version).metrics
            except ServiceError as error:
                self.require_newest(timeline)  # else its successor may have removed it
                if version == versions[-1]:
                    raise
                self._set_aside(version, timeline, str(error))
        return metrics

    def require_newest(self, timeline: str) -> None:
        """Raise `ServiceError` unless the newest start in the chain is this timeline's."""
        starts = folders.read_chain(self._folder)
        if not starts or starts[-1].timeline != timeline:
            newest = (
                f"timeline {starts[-1].timeline} continued from version {starts[-1].version}"
                if starts
                else "the chain is empty"
            )
            raise ServiceError(
                f"{self._folder}: this trainer's timeline {timeline} is not the newest of the chain ({newest}): another trainer has taken "
                "over the run, or `headrace rewind` has rewound it. Stop the other, or start this one again: it resumes from the newest "
                "checkpoint"
            )

    def _make_way(self, version: int, timeline: str) -> None:
        """Set the checkpoint of this version aside if it is off the chain. Raises `ServiceError` if it is on the chain."""
        if version in folders.find_abandoned(self._folder):
            self._set_aside(version, timeline, self._problem(version))
        if self.path(version).exists():
            raise ServiceError(
                f"checkpoint {self.path(version)} exists already; remove it, or set checkpointing.checkpoint_dir to a "
                "folder that only this run uses"
            )

    def _problem(self, version: int) -> str | None:
        return self._damaged.get(version) or _damage(self._folder, version)

    def _set_aside(self, version: int, timeline: str, problem: str | None) -> None:
        """Give the checkpoint, abandoned or with a `problem`, a name that no trainer chooses. It goes there by way of an unfinished folder,
        for `_retain`'s reason."""
        with self._while_newest(timeline):
            kind, of = ("abandoned", self.state(version).timeline) if problem is None else ("damaged", timeline)
            aside = self._folder / f"{kind}-step_{version}-{of}"
            leaving = self._folder / folders.leaving_name(version, timeline)
            leaving.mkdir()
            self.require_newest(timeline)
            self.path(version).rename(leaving / "checkpoint")
            if problem is not None:
                (leaving / "checkpoint" / DAMAGE).write_text(problem)
            (leaving / "checkpoint").rename(aside)
            leaving.rmdir()
        why = f"is damaged ({problem})"
        if problem is None:
            why = f"was published by a trainer (timeline {of}) after another had taken over"
        self._damaged.pop(version, None)
        log.warning("checkpoint %d %s: set aside as %s", version, why, aside)

    @contextlib.contextmanager
    def _while_newest(self, timeline: str) -> Iterator[None]:
        """If something fails in the context and a successor has started, raise the error of `require_newest` instead: the successor has
        removed the file."""
        try:
            yield
        except (FileNotFoundError, ServiceError):
            self.require_newest(timeline)
            raise

    def _remove_remains(self, timeline: str) -> None:
        names = [path.name for path in self._folder.glob(".unfinished-*")]
        for name in folders.removable(folders.read_chain(self._folder), timeline, names):
            self._discard(self._folder / name, timeline)

    def _discard(self, path: Path, timeline: str) -> None:
        """Remove an unfinished folder. What can't be removed now (on NFS, what somebody has open) loses the name that its trainer knows.
        Each later checkpoint and start tries again."""
        try:
            shutil.rmtree(path)
        except OSError as error:
            self.require_newest(timeline)  # else a successor has removed it
            log.warning("%s can't be removed now (%s); the next checkpoint tries again", path, error)
            if path.exists() and not path.name.startswith(folders.DISCARDED):
                path.rename(self._folder / f"{folders.DISCARDED}{time.time_ns()}-{timeline}")


def _damage(folder: Path, version: int) -> str | None:
    """Return as `folders.damage`, for the ledger too."""
    if (problem := folders.damage(folder, version)) is not None:
        return problem
    path = folders.path_of(folder, version) / TRAINED
    try:
        Ledger.decode(path.read_bytes())
    except FileNotFoundError:
        return None  # another build wrote it, which is told when it is read
    except (OSError, ServiceError) as error:
        return f"{path}: {error}"
    return None


def _add_metrics(folder: int, name: str, metrics: Mapping[str, float]) -> None:
    """Add to the file `name` in the folder with this descriptor, whatever its name is by now. The file is complete at any time."""

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags, 0o666, dir_fd=folder)

    known: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError), open(name, "rb", opener=opened) as before:
        known = _METRICS.validate_json(before.read())
    with open(f".{name}", "wb", opener=opened) as file:
        file.write(_METRICS.dump_json(known | dict(metrics), indent=2))
        file.flush()
        os.fsync(file.fileno())
    os.rename(f".{name}", name, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def select_superseded(metrics: Mapping[int, Mapping[str, float]], settings: CheckpointingConfig) -> list[int]:
    """Return the versions that retention removes, oldest first: all but the newest and the `keep_top_k` best by `metric_name`."""
    if settings.keep_top_k is None:
        return []
    ranked = folders.best_first(metrics, settings.metric_name, higher_is_better=settings.higher_is_better)
    kept = {*ranked[: settings.keep_top_k], max(metrics, default=None)}
    return sorted(set(metrics) - kept)


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise the `ServiceError` of a checkpoint that can't be written to `folder` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise cannot_write_checkpoint(folder, error) from error


def _fsync_all(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            fsync(Path(parent) / name)
        fsync(Path(parent))
