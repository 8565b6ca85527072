"""Fetches the weights of a replica that pulls them from the run's store (`headrace.run.weight_store`), while it generates with older ones.

Others that pull are asked before the store, and get what is here (`peers`). Nothing of a version gets into the engine before all of it is
here, as the trainer sent it. Then the replica takes part in a refit of its own (`WeightReceiver.take_part`), with the same proof as in one
of the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.base.backoff import pause_after
from headrace.base.errors import CodecError, ReplayError, ServiceError
from headrace.base.scratch import scratch_folder
from headrace.base.tasks import cancel
from headrace.config import Config
from headrace.replay import Epoch, ReplayClient
from headrace.run.object_store import RunStore, check_package
from headrace.run.weight_store import NotBegun, PulledWeights

from ..refit.manifest import Manifest
from ..refit.rendezvous import Offer, Pulled
from .peers import AskedPeer, Peers, Served

T = TypeVar("T")

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0


class Puller:
    """What one replica pulls. `problem` is why the newest try failed, or None."""

    def __init__(self, config: Config, replay: ReplayClient, url: str, folder: Path) -> None:
        """`url` is that of the run's store, and `folder` takes the weights. Raises `MissingPackage`."""
        check_package(url)
        self.problem: str | None = None
        self.served = Served(self._serve)
        self._peers = Peers(config)
        self._said: set[str] = set()  # replicas of which a problem was said
        self._replay = replay
        self._url, self._file = url, folder / "weights"
        self._weights: PulledWeights | None = None  # the store may not be there before the first offer
        self._reach = config.algorithm.ahead_steps
        self._ready: Epoch | None = None  # whose weights are in the file
        self._wanted: tuple[str, int] | None = None  # timeline and version of what is being fetched
        self._task: asyncio.Task[None] | None = None
        self._failures, self._not_before = 0, 0.0
        self._stopped = False

    @classmethod
    @contextlib.contextmanager
    def of(cls, config: Config, replay: ReplayClient) -> Iterator[Puller | None]:
        """Yield that of a replica; None if it gets its weights from the trainer."""
        if config.rollout.weights_from == "trainer":
            yield None
            return
        assert config.run_store is not None  # the configuration is refused otherwise
        with scratch_folder("headrace-weights-") as folder:
            yield cls(config, replay, config.run_store, folder)

    async def look(self, replica: str, held: tuple[str, int] | None) -> Epoch | None:
        """Return the refit that the replica may carry out now, if any: the weights are here. `held` are those in its engine, if they are
        verified. Begins to fetch the newest if it lacks them."""
        offer = await self._replay.offered(replica)
        newest = None if offer is None else (offer.timeline, offer.version)
        if self._ready is not None:
            ready = (self._ready.timeline, self._ready.version)
            if ready == held or self._is_over(ready, newest):
                self._ready = None
        if self._task is not None and self._task.done():
            self._task = None
        self._stopped = self._wanted is not None and self._is_over(self._wanted, newest)
        free = self._ready is None and self._task is None and time.monotonic() >= self._not_before
        if offer is not None and newest != held and free:
            self._stopped, self._wanted = False, newest
            self._task = asyncio.create_task(self._fetch(replica, offer))
        if self._ready is None:
            return None
        return msgspec.structs.replace(self._ready, members=(replica,), acknowledged=(replica,))

    def _is_over(self, weights: tuple[str, int], newest: tuple[str, int] | None) -> bool:
        """Whether a rewind has ended this timeline, or no work may begin under this version once the newest is trained."""
        return newest is None or newest[0] != weights[0] or newest[1] > weights[1] + self._reach

    def fail(self, why: str) -> None:
        """Note that what was pulled, or was to be, did not become the engine's weights. There is a pause before the next try."""
        self._failures += 1
        self._not_before = time.monotonic() + pause_after(self._failures, FIRST_PAUSE_S, LAST_PAUSE_S)
        self._ready, self.problem = None, why

    @property
    def fetched_from(self) -> dict[str, int]:
        """The bytes that came from other replicas and from the store."""
        return {} if self._weights is None else self._weights.fetched_from

    def succeed(self) -> None:
        self._failures, self.problem = 0, None

    async def aclose(self) -> None:
        self._stopped = True
        if self._task is not None:
            await cancel([self._task])
        self._peers.close()
        self.served.close()

    def _serve(self, timeline: str, version: int, name: str, wait_s: float) -> bytes | None:
        if self._weights is None:
            time.sleep(wait_s)  # it has not begun with its first version
            raise NotBegun
        return self._weights.serve(timeline, version, name, wait_s)

    async def _fetch(self, replica: str, offer: Epoch) -> None:
        began, version, timeline = time.monotonic(), offer.version, offer.timeline
        peers: list[AskedPeer] = []
        try:
            terms = Offer.decode(offer.rendezvous)
            if self._weights is None:
                self._weights = PulledWeights(RunStore(self._url, writes=False), self._file)
            weights = self._weights
            before = weights.fetched_from["replicas"]
            with contextlib.suppress(ReplayError):  # the store has all
                peers = self._peers.of(await self._replay.parents(replica), lambda: self._stopped)
            listed = await _beside(lambda: weights.read_list(timeline, version, terms.digest, peers))
            manifest = Manifest.decode(listed.layout)
            await _beside(lambda: weights.fetch(listed, lambda: self._stopped, peers))
        except (ServiceError, CodecError, OSError) as error:
            if not self._stopped:
                log.warning("version %d was not pulled: %s", version, error)
                self.fail(f"pulling version {version}: {error}")
            return
        finally:
            await self._judge(peers)
        log.info(
            "version %d is here: %.1f of %.1f MB fetched in %.1f s, %.1f MB of it from other replicas",
            version, weights.fetched_bytes / 1e6, sum(listed.sizes) / 1e6, time.monotonic() - began,
            (weights.fetched_from["replicas"] - before) / 1e6,
        )  # fmt: skip
        pulled = Pulled(
            file=str(self._file),
            manifest=manifest,
            checksums=listed.checksums,
            probe_token_ids=terms.probe_token_ids,
            timeout_s=terms.timeout_s,
        )
        self._ready = msgspec.structs.replace(offer, rendezvous=pulled)

    async def _judge(self, peers: list[AskedPeer]) -> None:
        """Leave those alone for a while that were not reached, or with which a version was superseded before it was here. Say of each once
        why it was asked no more."""
        for peer in peers:
            self._peers.note(peer.url, reached=not peer.is_unreached, in_time=not self._stopped)
            if peer.problem is None:
                continue
            if peer.replica not in self._said:
                self._said.add(peer.replica)
                log.warning("replica %s, asked for weights at %s: %s", peer.replica, peer.url, peer.problem)
            if peer.is_unreached:
                with contextlib.suppress(ReplayError):
                    await self._replay.unreached(peer.replica, f"{peer.url}: {peer.problem}")


async def _beside(work: Callable[[], T]) -> T:
    """Do the work in a thread of its own, for which a process that ends doesn't wait: a store may take minutes to answer."""
    done: Future[T] = Future()

    def run() -> None:
        done.set_running_or_notify_cancel()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="pulling", daemon=True).start()
    return await asyncio.wrap_future(done)
