"""Copies each published checkpoint to the object store of `checkpointing.store`, in a thread beside the loop.

A thread sends the newest checkpoint that the store lacks, with what the run's folder has beside it, and removes there what retention
removes here. It sends one at a time: where checkpoints are made faster than they are sent, those between are left out. A store that fails
is tried again until it works, and the run goes on; meanwhile it is said (`headrace.run.object_store.list_problems`, `store_failures`). A
second thread gives the signs of life by which a trainer elsewhere knows that this one is at work.

Threads are daemons, so one that waits for a store keeps no process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from headrace.base.backoff import pause_after
from headrace.base.errors import CodecError, HeadraceError, ServiceError
from headrace.base.files import UNREADABLE
from headrace.config import Config
from headrace.run import checkpoints, stored_run
from headrace.run.checkpoints import Start, find_published
from headrace.run.object_store import STATUS, Manifest, Owner, RunStore, StoreStatus, write_status
from headrace.run.stored_run import Moved, is_of

from .checkpoint import select_superseded

log = logging.getLogger(__name__)

POLL_S = 0.1
# How often a trainer gives a sign of life, and how long another waits for one before it takes over.
BEAT_S, SILENCE_S, LOOK_S = 15.0, 60.0, 3.0
# Pauses after uploads that failed, beside those of the library in each.
FIRST_PAUSE_S, LAST_PAUSE_S = 5.0, 300.0
# At its end a run waits for the last upload as long as something of it arrives in this time.
END_S = 600.0
# How long the end of a trainer waits for a thread.
CLOSE_S = 3.0


class Uploads:
    """The uploads of one trainer. `claim` comes first, then `begin`, and `close` last; `wake` after each checkpoint."""

    def __init__(self, config: Config, store: RunStore, *, silence_s: float = SILENCE_S) -> None:
        self._config = config
        self._store = store
        self._folder = config.checkpoint_folder
        self._silence_s = silence_s
        self._starts: list[Start] = []  # the chain in the store
        self._timeline = ""
        self._stored: dict[int, Manifest] = {}
        self._removed: set[str] = set()  # folders of checkpoints
        self._wanted, self._idle = threading.Event(), threading.Event()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ended_by: ServiceError | None = None
        self._moved_at = time.monotonic()
        self._problem = ""
        self._lock = threading.Lock()
        self._metrics: dict[str, float] = {"store_failures": 0.0}

    @classmethod
    def of(cls, config: Config) -> Uploads | None:
        """Return those of a run; None if it has no store."""
        if (store := RunStore.of(config)) is not None:
            return cls(config, store)
        with contextlib.suppress(OSError):  # there is none, of a store that the run had
            (config.checkpoint_folder / STATUS).unlink()
        return None

    # -- the start

    def claim(self, buffer_timeline: str, stopped: Callable[[], bool]) -> bool:
        """See that this trainer may continue the run, and fetch its newest checkpoint if it is not here. Returns False if it was stopped.

        A trainer that worked in this folder, or with this buffer (whose newest timeline is `buffer_timeline`), gives way to this one, as
        without a store. Any other must have been silent for a while. Raises `ServiceError` if it is not, or the store can't be used.
        """
        self._store.try_out()
        self._starts = self._store.starts()
        if self._starts and not is_of(self._folder, self._starts):
            newest = self._starts[-1].timeline
            if newest != buffer_timeline and not self._is_silent(newest, stopped):
                return False
        try:
            stored_run.fetch_newest(self._config, self._store, log.info, stopped)
        except ServiceError:
            if stopped():
                return False
            raise
        return True

    def _is_silent(self, timeline: str, stopped: Callable[[], bool]) -> bool:
        """Wait until the trainer on `timeline` has been silent for long enough. Returns False if this one is stopped meanwhile."""
        first = self._store.read_owner(timeline)
        if first is None or first.ended:
            return True
        log.info(
            "%s: was last continued by %s; if that gives no sign of life for %g s, this trainer takes over",
            self._store.url, first.process, self._silence_s,
        )  # fmt: skip
        until = time.monotonic() + self._silence_s
        while time.monotonic() < until:
            if stopped():
                return False
            time.sleep(min(LOOK_S, self._silence_s / 10))
            now = self._store.read_owner(timeline)
            if now is None or now.ended:
                return True
            if now.beat != first.beat:
                raise ServiceError(
                    f"{self._store.url} is in use: {now.process} continues this run. Stop it first, or give run.id another name"
                )
        return True

    def begin(self, timeline: str) -> None:
        """Take the run in the store, for the trainer that has resumed on `timeline`, and start to send. Raises `ServiceError` if another
        trainer has taken it since `claim`."""
        chain = checkpoints.read_chain(self._folder)
        known = self._starts[-1] if self._starts else None
        self._timeline = timeline
        self._beat()  # a trainer that finds the start waits for it
        # a trainer that has started in this folder meanwhile adds its own start
        own = [start.timeline for start in chain].index(timeline)
        first = 0 if known is None else chain.index(known) + 1 if known in chain else own
        for start in chain[first : own + 1]:
            self._store.add_start(len(self._starts) + 1, start)
            self._starts.append(start)
        for name in self._store.manifests(self._starts).values():
            try:
                manifest = self._store.read_manifest(name)
                if (lost := self._store.find_lost(manifest)) is not None:
                    raise CodecError(lost)
                self._stored[manifest.version] = manifest
            except (CodecError, FileNotFoundError) as error:  # it is sent again, if it is here
                log.warning("%s", error)
        self._say("")
        self.wake()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._send_all, "uploads"), (self._beat_all, "signs of life"))
        ]
        for thread in self._threads:
            thread.start()

    # -- while the run goes on

    def wake(self) -> None:
        """Send what is new: a checkpoint, or a metric of one."""
        with self._lock:
            self._idle.clear()
            self._wanted.set()

    def poll(self) -> None:
        """Raise `ServiceError` if another trainer has taken over the run."""
        if self._ended_by is not None:
            raise self._ended_by

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        with self._lock:
            metrics, self._metrics = self._metrics, {"store_failures": 0.0}
        return metrics

    async def finish(self) -> None:
        """Wait until all is in the store that is to be there. Raises `ServiceError` if nothing has arrived for `END_S`, and as `poll`."""
        self._moved_at = time.monotonic()
        while not self._idle.is_set():
            self.poll()
            if time.monotonic() - self._moved_at >= END_S:
                raise ServiceError(
                    f"{self._problem or self._lacking()}; nothing arrived for {END_S:g} s. The next start sends it from {self._folder}"
                )
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """End the threads, with the part of a file that is being sent. The store learns that this trainer is gone."""
        self._closing.set()
        self._wanted.set()
        for thread in self._threads:
            thread.join(CLOSE_S)

    # -- in threads

    def _send_all(self) -> None:
        failures = 0
        while not self._closing.is_set() and self._ended_by is None:
            self._wanted.clear()
            try:
                more = self._send_next()
                failures = 0
                if self._problem:
                    self._say("")
            except (HeadraceError, *UNREADABLE, RuntimeError) as error:  # such as of a thread that can't be started
                if self._closing.is_set():
                    return
                failures += 1
                log.warning("%s: %s", self._lacking(), error)
                self._say(f"{self._lacking()}: {error}")
                with self._lock:
                    self._metrics["store_failures"] += 1.0
                self._closing.wait(pause_after(failures, FIRST_PAUSE_S, LAST_PAUSE_S))
                continue
            with self._lock:
                if more or self._wanted.is_set():
                    continue
                self._idle.set()
            self._wanted.wait()

    def _send_next(self) -> bool:
        """Send the newest checkpoint that the store lacks, or do what else there is to do. Returns whether there may be more."""
        metrics = self._read_metrics()
        superseded = select_superseded(metrics, self._config.checkpointing)
        here = [version for version in find_published(self._folder) if version in metrics]
        wanted = [version for version in here if version not in self._stored and version not in superseded]
        if wanted:
            try:
                self._send(wanted[-1])
            except (OSError, ServiceError):
                if checkpoints.path_of(self._folder, wanted[-1]).exists():
                    raise
            return True  # or retention has removed it, and there is a newer one
        for version in here:
            if version in self._stored and self._stored[version].metrics != metrics[version]:
                self._publish(msgspec.structs.replace(self._stored[version], metrics=metrics[version]))
        return self._clean(superseded)

    def _read_metrics(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each checkpoint here or in the store."""
        metrics = {version: dict(manifest.metrics) for version, manifest in self._stored.items()}
        for version in find_published(self._folder):
            try:
                metrics[version] = checkpoints.read_metrics(self._folder, version)
            except ServiceError:
                if checkpoints.path_of(self._folder, version).exists():
                    raise
        return metrics

    def _send(self, version: int) -> None:
        began = time.monotonic()
        with stored_run.collect(self._config, version) as (manifest, paths):
            moved = Moved(manifest.size, lambda what: log.info("sending checkpoint %d: %s", version, what))

            def progress(size: int) -> None:
                if self._closing.is_set():
                    raise ServiceError("the trainer ends; its next start sends the rest")
                moved(size)
                self._moved_at = moved.at

            self._store.send(manifest, paths, progress)
            self._publish(manifest)
        took = time.monotonic() - began
        with self._lock:
            self._metrics["timing/train/checkpoint_upload"] = took
        log.info("checkpoint %d is in %s, sent in %.1f s", version, self._store.url, took)
        self._say("")

    def _publish(self, manifest: Manifest) -> None:
        self._require_newest()
        self._store.write_manifest(manifest)
        self._stored[manifest.version] = manifest
        self._removed.discard(manifest.folder)

    def _clean(self, superseded: list[int]) -> bool:
        """Remove from the store what retention removes, and what was sent of checkpoints that were never published. Undo what late requests
        of earlier trainers did (law 4). Returns whether one of their checkpoints is to be sent again."""
        for version in superseded:
            if version in self._stored:
                self._remove(self._stored[version].folder)
                del self._stored[version]
        is_lost = self._restore()
        for folder in self._store.list_remains(self._removed):
            self._remove(folder)
        return is_lost

    def _remove(self, folder: str) -> None:
        self._require_newest()
        self._store.remove_checkpoint(folder)
        self._removed.add(folder)

    def _restore(self) -> bool:
        """Publish what earlier trainers made, and this one keeps, as it was. Returns whether files of one are gone: it is sent again, if it
        is here."""
        inherited = [manifest for manifest in self._stored.values() if manifest.timeline != self._timeline]
        lost = [manifest for manifest in inherited if self._store.find_lost(manifest) is not None]
        for manifest in inherited:
            if manifest in lost:
                log.warning("%s has lost checkpoint %d", self._store.url, manifest.version)
                del self._stored[manifest.version]
            elif not self._store.has_manifest(manifest):
                self._publish(manifest)
        return bool(lost)

    def _require_newest(self) -> None:
        """Raise `ServiceError`, and end this trainer, if another has taken over the run."""
        if (lost := len(self._starts) - self._store.count_starts()) > 0:
            raise ServiceError(self._store.say_lost(f"{lost} of the run's {len(self._starts)} starts"))
        if lost < 0:
            newest = self._store.starts()[-1]
            self._ended_by = ServiceError(
                f"{self._store.url}: another trainer has taken over the run (timeline {newest.timeline}, from version {newest.version}). "
                "Stop the other, or move this folder away and start this one again"
            )
            raise self._ended_by

    def _beat_all(self) -> None:
        while not self._closing.wait(BEAT_S):
            try:
                self._require_newest()
                self._beat()
            except HeadraceError as error:
                if self._ended_by is not None:
                    return
                log.warning("no sign of life could be given: %s", error)
        with contextlib.suppress(ServiceError):  # then another trainer waits a while
            self._beat(ended=True)

    def _beat(self, ended: bool = False) -> None:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        self._store.write_owner(self._timeline, Owner(process, secrets.token_hex(8), ended))

    # -- what is said

    def _lacking(self) -> str:
        newest, there = max(find_published(self._folder), default=None), max(self._stored, default=None)
        if newest is None or newest in self._stored:
            return f"{self._store.url} is not up to date"
        return f"checkpoint {newest} is not in {self._store.url} (it has {'none' if there is None else there})"

    def _say(self, problem: str) -> None:
        self._problem = problem
        status = StoreStatus(self._store.url, max(self._stored, default=None), problem)
        try:
            write_status(self._folder, status)
        except OSError as error:
            log.warning("%s is not up to date: %s", self._folder, error)
