"""Puts versions of the weights into the run's store for replicas that pull them (`headrace.run.weight_store`), beside the loop.

Between two steps the weights are copied to host memory, as replicas get them. A thread sends what has changed of them. Once all of it is
there, the buffer names the version to the replicas, and what no replica may begin work with any more is removed. The trainer waits for
none of this: while one version is sent, the next are left out. A store that fails is tried again, and it is said
(`headrace.run.object_store.list_problems`, `offer_failures`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from headrace.base.backoff import pause_after
from headrace.base.errors import Fenced, HeadraceError
from headrace.config import Config
from headrace.records.trajectory import Float32, Int32
from headrace.replay import BufferRetry, ReplayClient, Replica
from headrace.run.object_store import OFFERS, RunStore, StoreStatus, write_status
from headrace.run.weight_store import PublishedWeights

from ...refit.checksum import checksum
from ...refit.probe import Differences
from ...refit.rendezvous import Offer
from ...refit.transfer import copy

if TYPE_CHECKING:
    import torch

    from ...refit.manifest import Manifest
    from ...refit.sender import WeightSource

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 2.0, 60.0
CLOSE_S = 3.0

Probe = tuple[Int32, Float32, Differences]  # its tokens, their log-probabilities under the weights, and the tolerance
Copied = tuple[list["torch.Tensor"], list["torch.Tensor"]]
Torch = Callable[[Callable[[], Copied]], Awaitable[Copied]]


class Offers:
    """The versions that one trainer, on `timeline`, offers to replicas that pull."""

    def __init__(
        self, config: Config, store: RunStore, replay: ReplayClient, retry: BufferRetry, timeline: str
    ) -> None:
        self._published = PublishedWeights(store, timeline)
        self._store, self._replay, self._retry, self._timeline = store, replay, retry, timeline
        self._reach = config.algorithm.ahead_steps
        self._timeout_s = config.weight_channel.timeout_s
        self._folder = config.checkpoint_folder
        self._newest: int | None = None  # that was copied
        self._offered: int | None = None
        self._all_failures = self._told_failures = 0.0
        self._failures, self._not_before = 0, 0.0
        self._is_first = True
        self._fenced: Fenced | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, config: Config, replay: ReplayClient, retry: BufferRetry, timeline: str) -> Offers | None:
        """Return those of a trainer; None if the run has no store."""
        with contextlib.suppress(OSError):  # there is none, or it is of an earlier trainer
            (config.checkpoint_folder / OFFERS).unlink()
        url = config.run_store
        return None if url is None else cls(config, RunStore(url), replay, retry, timeline)

    def is_due(self, replicas: Iterable[Replica], version: int) -> bool:
        """Return whether some replica pulls, `version` was not sent yet, and nothing else is being sent."""
        if version == self._newest or self._is_busy or time.monotonic() < self._not_before:
            return False
        return any(replica.pulls and replica.takes_part for replica in replicas)

    @property
    def _is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def poll(self) -> None:
        """Raise the error of a trainer that was replaced."""
        if self._fenced is not None:
            raise self._fenced

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        failures, self._told_failures = self._all_failures - self._told_failures, self._all_failures
        return {"offer_failures": failures}

    async def offer(
        self, version: int, source: WeightSource, manifest: Manifest, probe: Probe, in_torch: Torch
    ) -> None:
        """Copy `source`, the weights of `version`, and begin to send them."""
        flats, tensors = await in_torch(lambda: copy(manifest, source))
        self._newest = version
        arguments = (version, manifest, flats, tensors, probe, asyncio.get_running_loop())
        self._thread = threading.Thread(target=self._send, args=arguments, name="offers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, with the block that is being sent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _send(
        self,
        version: int,
        manifest: Manifest,
        flats: list[torch.Tensor],
        tensors: list[torch.Tensor],
        probe: Probe,
        events: asyncio.AbstractEventLoop,
    ) -> None:
        began = time.monotonic()
        token_ids, logprobs, tolerance = probe
        try:
            others = self._published.list_others() if self._is_first else []
            checksums = [int(checksum(tensor)) for tensor in tensors]
            parts = [flat.numpy().data for flat in flats]
            digest = self._published.publish(version, manifest.encode(), checksums, parts, self._closing.is_set)
            terms = Offer(digest, token_ids, self._timeout_s).encode()
            name, values = secrets.token_hex(8), logprobs.tolist()
            said = self._retry(lambda: self._replay.offer(name, version, self._timeline, terms, values, *tolerance))
            asyncio.run_coroutine_threadsafe(said, events).result()
            log.info(
                "version %d is in %s: %.1f of %.1f MB sent in %.1f s",
                version, self._store.url, self._published.sent_bytes / 1e6, manifest.nbytes / 1e6, time.monotonic() - began,
            )  # fmt: skip
            self._offered = version
            self._store.remove(others)  # law 4: the buffer has taken the offer, so none of them is of a later trainer
            self._is_first = False
            self._published.clean(self._reach)
            if self._failures:
                self._failures = 0
                self._say("")
        except Fenced as error:
            self._fenced = error
        except (HeadraceError, OSError, RuntimeError) as error:  # such as of a thread that can't be started
            if self._closing.is_set():
                return
            self._failures += 1
            self._all_failures += 1.0
            self._not_before = time.monotonic() + pause_after(self._failures, FIRST_PAUSE_S, LAST_PAUSE_S)
            self._newest = None
            there = "none" if self._offered is None else self._offered
            problem = (
                f"version {version} of the weights can't be pulled from {self._store.url} (it has {there}): {error}"
            )
            log.warning("%s", problem)
            self._say(problem)

    def _say(self, problem: str) -> None:
        try:
            write_status(self._folder, StoreStatus(self._store.url, self._offered, problem), OFFERS)
        except OSError as error:
            log.warning("%s is not up to date: %s", self._folder / OFFERS, error)
