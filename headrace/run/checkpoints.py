"""Decides which checkpoints in a folder belong to a run, by the chain of the trainers that wrote them.

Each start of a trainer is a *timeline*. Once the trainer has resumed, it appends a line to `chain.jsonl`, beside the checkpoints: its
timeline, and the version that it resumed from. This abandons everything that earlier trainers made beyond that version. So a trainer that
was frozen, and wakes up after its successor has started, can publish nothing that is ever resumed from. The buffer's `timelines` follow the
same rule.

    {"timeline": "1f0c…", "version": 0}
    {"timeline": "93ab…", "version": 40}     version 41 and later ones are of this timeline

A checkpoint ends with `SHA256SUMS`, the digests of its files. What was changed since is damage, which a trainer that starts finds and sets
aside (`damaged-step_4-93ab…`). Checkpoints of builds before the digests have none.

A trainer holds the lock of the folder (`.trainer.lock`) while it lives. The lock shows `headrace rewind` and people that a trainer is at
work. It never keeps a trainer from starting, because the holder may be frozen for good.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from headrace.base.errors import ServiceError
from headrace.base.files import UNREADABLE, fsync
from headrace.base.model_files import find_problem, problem_of_model

CHAIN, LOCK, STATE = "chain.jsonl", ".trainer.lock", "state.json"
SUMS = "SHA256SUMS"  # for `sha256sum -c` too
DAMAGE = "damage.txt"  # in a damaged checkpoint that was set aside: what is wrong with it

_PUBLISHED = re.compile(r"step_(0|[1-9][0-9]*)")
_ASIDE = re.compile(r"damaged-step_([0-9]+)-.+")
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
_HASHING = 4  # files at a time
DISCARDED = ".unfinished-removed-"  # begins the names of what could not be removed
# version (or, of what could not be removed, a number), timeline; builds from before the chain wrote no timeline
_UNFINISHED = re.compile(r"\.unfinished-(?:step_|leaving_|removed-)([0-9]+)(?:-([A-Za-z0-9_-]+))?")


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of a trainer: it resumed from `version`, on `timeline`."""

    timeline: str
    version: int


class State(msgspec.Struct):
    """The part of a checkpoint's state that is read here. The keys of `metrics` are those of `checkpointing.metric_name`
    (`val:accuracy`)."""

    timeline: str
    ancestors: tuple[str, ...] = ()
    metrics: dict[str, float] = {}


# -- decisions


def in_effect(starts: Iterable[Start]) -> list[Start]:
    """Return the starts that the newest weights descend from. Each start ends those before it that began at its version or later."""
    kept: list[Start] = []
    for start in starts:
        while kept and kept[-1].version >= start.version:
            kept.pop()
        kept.append(start)
    return kept


def find_timeline(starts: Iterable[Start], version: int) -> str | None:
    """Return the timeline that made the weights of `version` > 0; None if no start precedes it."""
    return next((start.timeline for start in reversed(in_effect(starts)) if start.version < version), None)


def on_chain(starts: Sequence[Start], found: Mapping[int, str | None]) -> list[int]:
    """Return the versions, ascending, that a trainer may resume from. `found` maps the version of each checkpoint to its timeline. A
    checkpoint whose timeline can't be read is kept, so that resuming from it reports the problem."""
    return sorted(
        version for version, timeline in found.items() if timeline is None or timeline == find_timeline(starts, version)
    )


def removable(starts: Sequence[Start], timeline: str, names: Iterable[str]) -> list[str]:
    """Return the unfinished checkpoints among `names` that the trainer on `timeline` removes: its own, those of timelines that have ended,
    and those of builds from before the chain. Those of the newest trainer, or of an unknown one, may still be being written."""
    if not starts or starts[-1].timeline != timeline:
        return []
    known = {start.timeline for start in starts} | {None}
    matches = ((name, _UNFINISHED.fullmatch(name)) for name in names)
    return [name for name, match in matches if match and match[2] in known]


def first_chain(found: Mapping[int, tuple[str, Sequence[str]]]) -> list[Start]:
    """Return the chain of a folder without a `chain.jsonl`: that of its newest checkpoint. `found` maps each version to its timeline and
    that timeline's ancestors."""
    if not found:
        return []
    newest, ancestors = found[max(found)]
    starts: list[Start] = []
    before = 0
    for version, (timeline, _) in sorted(found.items()):
        if timeline in (newest, *ancestors):
            if not starts or starts[-1].timeline != timeline:
                starts.append(Start(timeline, before))
            before = version
    return starts


def best_first(
    metrics: Mapping[int, Mapping[str, float]], metric_name: str | None, *, higher_is_better: bool
) -> list[int]:
    """Return the versions of the checkpoints with these metrics, the best by `metric_name` first.

    Of two equal ones the newer is better, and any metric is better than none. Without `metric_name`, newer is better.
    """
    sign = 1.0 if higher_is_better else -1.0

    def merit(version: int) -> tuple[bool, float, int]:
        value = metrics[version].get(metric_name) if metric_name else None
        return value is not None, sign * value if value is not None else 0.0, version

    return sorted(metrics, key=merit, reverse=True)


# -- the folder


def path_of(folder: Path, version: int) -> Path:
    """Return the folder of a checkpoint, whether it exists or not."""
    return folder / f"step_{version}"


def policy_of(folder: Path, version: int) -> Path:
    """Return the policy of a checkpoint: a directory that Hugging Face's libraries load."""
    return path_of(folder, version) / "policy"


def unfinished_name(version: int, timeline: str) -> str:
    return f".unfinished-step_{version}-{timeline}"


def leaving_name(version: int, timeline: str) -> str:
    return f".unfinished-leaving_{version}-{timeline}"


def read_chain(folder: Path) -> list[Start]:
    """Return every start so far. Raises `ServiceError` for lines that `append_start` did not write."""
    return read_starts(folder) or first_chain(
        {version: (state.timeline, state.ancestors) for version, state in _states(folder).items() if state}
    )


def read_starts(folder: Path) -> list[Start]:
    """Return every start in this folder so far: none where its checkpoints are from elsewhere. Raises as `read_chain` does."""
    path = folder / CHAIN
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a trainer may have died while writing the last line
        return [msgspec.json.decode(line, type=Start) for line in whole.splitlines()]
    except FileNotFoundError:
        return []
    except UNREADABLE as error:
        raise ServiceError(
            f"{path} can't be read ({error}); move it away, and a new one is made from the existing checkpoints"
        ) from error


def append_start(folder: Path, start: Start) -> None:
    """Add a start to the chain. Once this returns, it survives a power cut. Raises `OSError`, and `ServiceError` as `read_chain` does."""
    path = folder / CHAIN
    folder.mkdir(parents=True, exist_ok=True)
    lines = [start] if read_starts(folder) else [*read_chain(folder), start]
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # drops the line that a trainer was writing when it died
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    fsync(folder)


def find_published(folder: Path) -> list[int]:
    """Return the versions that a trainer may resume from, oldest first: complete checkpoints on the chain. Raises as `read_chain` does."""
    return on_chain(read_chain(folder), read_timelines(folder))


def metrics_name(timeline: str) -> str:
    """Return the name of the file for metrics of a checkpoint that the trainer on `timeline` learned after publishing it."""
    return f"metrics-{timeline}.json"


def later_metrics(folder: Path, version: int) -> list[str]:
    """Return the names of the `metrics_name` files in checkpoint `version`, the newest trainer's last. Raises as `read_chain` does."""
    names = [metrics_name(start.timeline) for start in read_chain(folder)]
    return [name for name in dict.fromkeys(names) if (path_of(folder, version) / name).exists()]


def read_state(checkpoint: Path) -> State:
    """Read the state in the folder of one checkpoint. Raises one of `UNREADABLE`."""
    return msgspec.json.decode((checkpoint / STATE).read_bytes(), type=State)


def read_metrics(folder: Path, version: int) -> dict[str, float]:
    """Return all known metrics of checkpoint `version`, by the names of `checkpointing.metric_name`. Raises `ServiceError` if they can't be
    read."""
    path = path_of(folder, version) / STATE
    try:
        metrics = read_state(path.parent).metrics
        for name in later_metrics(folder, version):
            path = path_of(folder, version) / name
            metrics = metrics | msgspec.json.decode(path.read_bytes(), type=dict[str, float])
    except UNREADABLE as error:
        raise ServiceError(f"{path} can't be read ({error}); name another checkpoint") from error
    return metrics


def best(folder: Path, metric_name: str | None, *, higher_is_better: bool) -> tuple[int, float] | None:
    """Return the published checkpoint that `best_first` puts first, and its value of the metric; None if no checkpoint has a value. Raises
    as `read_metrics` does."""
    metrics = {version: read_metrics(folder, version) for version in find_published(folder)}
    for version in best_first(metrics, metric_name, higher_is_better=higher_is_better):
        if metric_name in metrics[version]:
            return version, metrics[version][metric_name]
    return None


def damage(folder: Path, version: int) -> str | None:
    """Return what is wrong with the first file of checkpoint `version` that is cut off, empty or missing; None if there is none. Only
    beginnings of files are read (`find_change` reads all). A file of another build is whole."""
    path = path_of(folder, version)
    for part in sorted(path.rglob("*")):
        if part.suffix in (".json", ".safetensors") and (problem := find_problem(part)) is not None:
            return problem
    for model in ("policy", "value"):
        if (path / model / "config.json").exists():
            if not [*(path / model).glob("*.safetensors")]:
                return f"{path / model} has no weights"
            if (problem := problem_of_model(path / model)) is not None:
                return problem
    return None


def usable(folder: Path, damage: Callable[[Path, int], str | None] = damage) -> tuple[int | None, dict[int, str]]:
    """Return the newest checkpoint that a trainer can resume from, None if there is none yet; and what is wrong with the newer ones, by
    version. Raises `ServiceError` if all are damaged, and as `read_chain` does."""
    damaged: dict[int, str] = {}
    for version in reversed(find_published(folder)):
        problem = damage(folder, version)
        if problem is None:
            return version, damaged
        damaged[version] = problem
    if damaged:
        raise ServiceError(
            "every checkpoint of the run is damaged; restore one from a copy, or give run.id another name to start over:\n"
            + "\n".join(f"  {problem}" for problem in damaged.values())
        )
    return None, damaged


def write_sums(checkpoint: Path) -> None:
    """Write the SHA-256 of every file of a checkpoint into it, in the format of `sha256sum`, that of its state last. Raises `OSError`."""
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    names.sort(key=lambda name: (name == STATE, name))
    with ThreadPoolExecutor(_HASHING, thread_name_prefix="digests") as threads:
        sums = threads.map(digest_of, [checkpoint / name for name in names])
        (checkpoint / SUMS).write_text("".join(f"{found}  {name}\n" for found, name in zip(sums, names, strict=True)))


def find_change(checkpoint: Path, share: int = 0, shares: int = 1) -> str | None:
    """Return what is wrong with the first file of a checkpoint whose content is not what `write_sums` found; None if there is none, or no
    `SHA256SUMS`. All files are read; or about the part `share` of `shares` of their bytes."""
    try:
        sums = read_sums(checkpoint)
    except FileNotFoundError:
        return None
    except ServiceError as error:
        return str(error)

    def size(name: str) -> tuple[int, str]:
        try:
            return (checkpoint / name).stat().st_size, name
        except OSError:
            return 0, name

    def problem(name: str) -> str | None:
        path = checkpoint / name
        try:
            whole = digest_of(path) == sums[name]
        except OSError as error:
            return f"{path} can't be read ({error.strerror})"
        return None if whole else f"{path} is not what was written: its SHA-256 differs from that in {SUMS}"

    with ThreadPoolExecutor(_HASHING, thread_name_prefix="digests") as threads:
        found = threads.map(problem, sorted(sums, key=size, reverse=True)[share::shares])
        return next((each for each in found if each is not None), None)


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint, as `write_sums` found it. Raises `FileNotFoundError` for one from before the
    digests, `ServiceError` for anything that `write_sums` did not write."""
    try:
        lines = (checkpoint / SUMS).read_text().splitlines()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ServiceError(f"{checkpoint / SUMS} can't be read ({error})") from error
    parsed = [_SUM.fullmatch(line) for line in lines]
    sums = {match[2]: match[1] for match in parsed if match}
    if len(sums) < len(lines) or [*sums][-1:] != [STATE]:
        raise ServiceError(f"{checkpoint / SUMS} is not what was written")
    return sums


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_set_aside(folder: Path) -> list[str]:
    """Return a line about each damaged checkpoint that a trainer set aside, the oldest version first."""
    found = []
    for path in folder.glob("damaged-step_*"):
        if match := _ASIDE.fullmatch(path.name):
            why = ""
            with contextlib.suppress(OSError):  # an earlier build set it aside, or a user moved the file
                why = f" ({(path / DAMAGE).read_text(errors='replace').strip()})"
            found.append((int(match[1]), f"checkpoint {match[1]} is damaged{why}, and set aside as {path}"))
    return [line for _, line in sorted(found)]


def find_abandoned(folder: Path) -> dict[int, str]:
    """Return the complete checkpoints off the chain, each with its timeline. Raises as `read_chain` does."""
    found = read_timelines(folder)
    kept = on_chain(read_chain(folder), found)
    return {version: timeline for version, timeline in found.items() if timeline is not None and version not in kept}


def read_timelines(folder: Path) -> dict[int, str | None]:
    """Return the timeline of every complete checkpoint, on the chain or off it; None where it can't be read."""
    return {version: state.timeline if state else None for version, state in _states(folder).items()}


def _states(folder: Path) -> dict[int, State | None]:
    """Return the state of every complete checkpoint, on the chain or off it; None where it can't be read."""
    found: dict[int, State | None] = {}
    for path in folder.glob("step_*"):
        match = _PUBLISHED.fullmatch(path.name)
        if match and (path / STATE).is_file():
            try:
                found[int(match[1])] = read_state(path)
            except UNREADABLE:
                found[int(match[1])] = None
    return found


def cannot_write_checkpoint(folder: Path, error: BaseException) -> ServiceError:
    """Return the error for a checkpoint that could not be written to `folder`."""
    return ServiceError(
        f"can't write a checkpoint to {folder} ({error}); the earlier ones are untouched. Free space there, or set "
        "checkpointing.checkpoint_dir (for a snapshot, checkpointing.snapshot_dir)"
    )


class FolderLock:
    """The lock of a folder of checkpoints, held until the process ends or `release` is called."""

    def __init__(self, folder: Path) -> None:
        """Open the lock file, without taking the lock. Raises `OSError` if the folder can't be written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOCK).open("a+", encoding="utf-8")

    def take(self) -> str | None:
        """Take the lock and return None. If another process holds it, return a description of the holder, and take the lock as soon as it
        is free. Raises `OSError` where the file system has no locks."""
        if (holder := self.try_take()) is not None:
            threading.Thread(target=self._take_when_free, name="checkpoint lock", daemon=True).start()
            return holder
        self._sign()
        return None

    def try_take(self) -> str | None:
        """Take the lock if it is free now. Returns as `take` does."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            return self._file.read().strip() or "another process"
        return None

    def release(self) -> None:
        self._file.close()

    def _take_when_free(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # `release` closed the file meanwhile
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._sign()

    def _sign(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
