"""What of a run is in an object store: a checkpoint with all that a trainer reads to continue from it, and how it comes back."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.base.errors import CodecError, ConfigError, Restartable, ServiceError
from headrace.base.files import cut_torn_line, fsync, link_or_copy, write_private
from headrace.base.scratch import scratch_folder
from headrace.config import Config
from headrace.config.yaml_text import dump_value, parse
from headrace.run import checkpoints, group_files, prompt_counts
from headrace.run.checkpoints import CHAIN, STATE, FolderLock, Start, find_timeline
from headrace.run.folder import INPUTS, SAVED
from headrace.run.fork import copy_groups
from headrace.run.history import RECORD, RunRecord, read_record
from headrace.run.journal import JOURNAL, list_files
from headrace.run.lineage import FOLDER, LineageFiles
from headrace.run.object_store import Manifest, RunStore, StoredFile
from headrace.run.start import START

# Files of a run's folder that are written anew: each is sent as it is at a moment. A start writes the first three itself.
_OF_A_START = (SAVED, START, RECORD)
_REWRITTEN = (*_OF_A_START, prompt_counts.FILE)
_PARTS = ("checkpoint", "lineage", "run")
_FETCHING = ".fetching"  # in the folder of checkpoints: what has been fetched of one that is not complete
_SAY_EVERY_S = 10.0


@contextlib.contextmanager
def collect(config: Config, version: int) -> Iterator[tuple[Manifest, Mapping[str, Path]]]:
    """Yield the manifest of a published checkpoint, and the paths of its files. They stay there while the context is open, whatever becomes
    of the checkpoint and the run's folder meanwhile: where the file system can, they are links.

    Raises `FileNotFoundError` if the checkpoint is gone, `OSError`, and `ServiceError` if it can't be read.
    """
    source = config.checkpoint_folder
    with scratch_folder(".uploading-", source) as folder:
        # later metrics, finished or not, are in the manifest, which can be renewed
        later = shutil.ignore_patterns("metrics-*.json", ".metrics-*.json")
        published = checkpoints.path_of(source, version)
        shutil.copytree(published, folder / "checkpoint", ignore=later, copy_function=link_or_copy)
        (folder / "lineage").mkdir()
        for step, path in LineageFiles(source / FOLDER).files():
            if step < version:
                link_or_copy(path, folder / "lineage" / path.name)
        _copy_run(config.run_folder, folder / "run")
        sums: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):  # an earlier build wrote the checkpoint
            sums = {
                f"checkpoint/{name}": digest for name, digest in checkpoints.read_sums(folder / "checkpoint").items()
            }
        paths = _list_files(folder)
        files = {
            name: StoredFile(path.stat().st_size, sums.get(name) or checkpoints.digest_of(path))
            for name, path in paths.items()
        }
        state = checkpoints.read_state(folder / "checkpoint")
        metrics = checkpoints.read_metrics(source, version)
        yield Manifest(config.run.id or "", version, state.timeline, time.time(), files, metrics), paths


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint in the store, or on its way, by their names."""
    found = (path for part in _PARTS for path in sorted((folder / part).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path for path in found}


def _copy_run(source: Path, target: Path) -> None:
    """Copy what is read of a run's folder while its trainer writes there."""
    target.mkdir()
    copy_groups(source / group_files.FOLDER, target / group_files.FOLDER)
    _copy_journal(source / JOURNAL, target)
    for name in _REWRITTEN:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if (source / INPUTS).is_dir():
        shutil.copytree(source / INPUTS, target / INPUTS)


def _copy_journal(journal: Path, target: Path) -> None:
    before: list[Path] | None = None
    while (segments := list_files(journal)) != before:  # the trainer has begun a new one meanwhile
        before = segments
        for segment in segments:
            shutil.copyfile(segment, target / segment.name)
    for segment in segments[-1:]:
        cut_torn_line(target / segment.name)  # the trainer may have been writing it


# -- getting it back


def is_of(folder: Path, starts: Sequence[Start]) -> bool:
    """Whether the newest of the store's `starts` is that of a trainer on this folder of checkpoints."""
    return starts[-1] in checkpoints.read_starts(folder)


def fetch_newest(
    config: Config,
    store: RunStore,
    say: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    *,
    started: bool = True,
) -> int | None:
    """If the run was continued where its folder is not, fetch the newest whole checkpoint, and what a start reads beside it. Returns its
    version; None if there is nothing to fetch. `say` is called with what it does, and with what is wrong with a damaged checkpoint. Before
    a run has `started` here, its saved configuration is of another start, and gives way to that of the checkpoint, with which this start's
    is compared.

    Raises `ServiceError` if the folder has checkpoints that the store's do not descend from, if all in the store are damaged, or if it is
    `stopped` meanwhile.
    """
    folder, starts = config.checkpoint_folder, store.starts()
    there = store.manifests(starts)
    if not starts or is_of(folder, starts):
        return None
    here = checkpoints.find_published(folder)
    if here:
        timeline = checkpoints.read_timelines(folder)[here[-1]]
        if checkpoints.read_starts(folder) or timeline not in (None, find_timeline(starts, here[-1])):
            newest = f"checkpoint {max(there)}" if there else "a start without a checkpoint"
            raise ServiceError(
                f"{store.url} has {newest} of a trainer that did not work in {folder}, which has checkpoint {here[-1]}: the run went on "
                "elsewhere. Move this folder away, and the next start fetches the run; or give run.id another name"
            )
        if timeline is not None and max(there, default=0) <= here[-1]:
            return None
    if not there:
        return None
    if not started:
        (config.run_folder / SAVED).unlink(missing_ok=True)
    return _fetch_whole(store, there, folder, config.run_folder, say, stopped)


def fetch(store: RunStore, version: int | None, folder: Path, say: Callable[[str], None]) -> int:
    """Make `folder` a copy of the run, with checkpoint `version`, by default the newest whole one. Returns the version. Where this is cut,
    the next call goes on. Raises `ConfigError` if the folder exists otherwise, or the store has no such checkpoint."""
    if folder.exists() and not (folder / "checkpoints" / _FETCHING).exists():
        raise ConfigError(f"{folder} already exists; give another folder")
    there = store.manifests(store.starts())
    if (version is not None and version not in there) or not there:
        what = "no checkpoint" if version is None else f"no checkpoint {version}"
        raise ConfigError(f"{store.url} has {what}; it has {', '.join(map(str, there)) or 'none'}")
    wanted = there if version is None else {version: there[version]}
    found = _fetch_whole(store, wanted, folder / "checkpoints", folder, say)
    if (record := read_record(folder)) is not None:  # it says that the run is up: it was, elsewhere
        write_private(folder / RECORD, msgspec.json.encode(RunRecord(record.started, "stopped", time.time())))
    return found


def _forget_folders(saved: Path) -> None:
    """Remove from a saved configuration, if there is one, the folders of the machine that it is from."""
    if not saved.exists():
        return
    values = parse(saved.read_text(encoding="utf-8"), str(saved))
    for section, key in (("checkpointing", "checkpoint_dir"), ("logger", "log_dir")):
        values.get(section, {}).pop(key, None)
    write_private(saved, dump_value(values).encode())


def _fetch_whole(
    store: RunStore,
    manifests: Mapping[int, str],
    folder: Path,
    run_folder: Path,
    say: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    problems: list[str] = []
    for version, name in sorted(manifests.items(), reverse=True):
        try:
            manifest = store.read_manifest(name)
            say(f"fetching checkpoint {version} ({_size(manifest.size)}) from {store.url}")
            problem = _fetch(store, manifest, folder, run_folder, say, stopped)
            if problem is None:
                return version
            store.read_manifest(name)
        except FileNotFoundError:  # retention has removed it meanwhile
            continue
        except CodecError as error:
            problem = str(error)
        say(f"checkpoint {version} in the store is damaged: {problem}")
        problems.append(problem)
    if not problems:
        raise Restartable(f"{store.url}: its checkpoints were replaced by newer ones meanwhile; try again")
    raise ServiceError(
        "\n".join(
            [
                "every checkpoint to fetch is damaged; name another, or give run.id another name to start over:",
                *problems,
            ]
        )
    )


def _fetch(
    store: RunStore,
    manifest: Manifest,
    folder: Path,
    run_folder: Path,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> str | None:
    """Fetch a checkpoint. The folder has it completely or not at all. Returns what is wrong with it in the store, or None."""
    if f"checkpoint/{STATE}" not in manifest.files:
        return f"{store.url}: the manifest of checkpoint {manifest.version} names no {STATE}"
    final, moved = checkpoints.path_of(folder, manifest.version), Moved(manifest.size, say)

    def progress(size: int) -> None:
        if stopped():
            raise ServiceError(f"stopped while a checkpoint was fetched; the next start goes on in {folder}")
        moved(size)

    with _fetching(folder) as unfinished:
        if final.exists():  # the last fetch was cut as it ended
            shutil.rmtree(unfinished / "checkpoint", ignore_errors=True)
            final.rename(unfinished / "checkpoint")
        for name, path in _list_files(unfinished).items():
            if name not in manifest.files:
                path.unlink()
        if (problem := store.fetch(manifest, unfinished, progress)) is None:
            _install(manifest, unfinished, folder, run_folder)
        return problem


def _install(manifest: Manifest, unfinished: Path, folder: Path, run_folder: Path) -> None:
    """Bring what was fetched to its places, the checkpoint last. Once this returns, it survives a power cut."""
    checkpoint = unfinished / "checkpoint"
    if manifest.metrics != checkpoints.read_state(checkpoint).metrics:
        (checkpoint / checkpoints.metrics_name(manifest.timeline)).write_bytes(msgspec.json.encode(manifest.metrics))
    _forget_folders(unfinished / "run" / SAVED)
    (folder / CHAIN).unlink(missing_ok=True)  # of starts that led to no checkpoint
    targets, parents = {"lineage": folder / FOLDER, "run": run_folder}, set[Path]()
    for name, path in _list_files(unfinished).items():
        part, _, rest = name.partition("/")
        if part not in targets or (rest in _OF_A_START and (run_folder / rest).exists()):
            continue
        if rest in _OF_A_START:
            path.chmod(0o600)  # an address may hold a password
        place = targets[part] / rest
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
        fsync(place)
        parents.add(place.parent)
    for path in (*parents, checkpoint, *checkpoint.rglob("*")):
        fsync(path)
    checkpoint.rename(checkpoints.path_of(folder, manifest.version))
    fsync(folder)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _fetching(folder: Path) -> Iterator[Path]:
    """Yield the folder in which a checkpoint of `folder` is put together. What a fetch that was cut left there, the next one uses. Raises
    `ServiceError` if another process is at it, or the disk is full."""
    place = folder / _FETCHING
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(place)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                if (holder := lock.try_take()) is not None:
                    raise ServiceError(f"{place} is in use: {holder} fetches this run; wait for it, or stop it")
            yield place
        finally:
            lock.release()
            with contextlib.suppress(OSError):  # it is gone, or holds what the next one uses
                place.rmdir()
    except OSError as error:
        raise ServiceError(
            f"can't write {folder} ({error}); free space there, and the next try goes on from what was fetched"
        ) from error


class Moved:
    """How much of `total` bytes has been moved. `at` is when the last part was, on the monotonic clock."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.total, self.done = total, 0
        self.at = self._said = time.monotonic()
        self._say = say

    def __call__(self, size: int) -> None:
        self.done += size
        self.at = time.monotonic()
        if self.at - self._said >= _SAY_EVERY_S:
            self._said = self.at
            self._say(f"{_size(self.done)} of {_size(self.total)}")


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
