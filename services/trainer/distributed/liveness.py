"""Signs of life of the ranks: a watch in each rank ends its process if its own work stands still, and logs which rank it waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from headrace.net.service import EXIT_INTERNAL_ERROR

log = logging.getLogger(__name__)
# The interval at which a rank publishes its `Heartbeat`.
BEAT_S = 1.0


class Progress:
    """The last sign of life of the thread that works with torch, for the health page and for the watch over other ranks. An idle thread
    needs none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.marks = 0
        self._clock = clock
        self._last: float | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The thread works while the context is open, and must call `mark`."""
        self._last = self._clock()
        try:
            yield
        finally:
            self._last = None

    def mark(self) -> None:
        """Give a sign of life. All ranks call this at the same points: before each collective, and for each micro-batch and weight."""
        self.marks += 1
        if self._last is not None:
            self._last = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 without work."""
        last = self._last
        return 0.0 if last is None else self._clock() - last


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What a rank publishes about itself: the number of times it has done so, and the marks of its `Progress`."""

    count: int
    marks: int


def silent_ranks(before: Sequence[Heartbeat], after: Sequence[Heartbeat]) -> list[int]:
    """Return the ranks that the others wait for, from the heartbeats of all ranks at two times: those whose process stands still, or else
    those whose work is behind the others'."""
    stopped = [rank for rank, (one, other) in enumerate(zip(before, after, strict=True)) if one.count == other.count]
    foremost = max(beat.marks for beat in after)
    return stopped or [rank for rank, beat in enumerate(after) if beat.marks < foremost]


class RankWatch:
    """Ends this process if its work stands still for `timeout_s`, and logs which rank it waited for. Each rank publishes its heartbeats in
    the ranks' store.

    It ends the process itself, because a thread that waits in a GPU collective can't be interrupted. A call of the store may hang like any
    other, so it has its own thread.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, progress: Progress, timeout_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._progress, self._timeout_s = progress, timeout_s
        self._period_s = min(BEAT_S, timeout_s / 8)
        self._seen: list[list[Heartbeat]] = []  # every rank's heartbeats since this one began to wait
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]

    def start(self) -> None:
        self._store.set(f"beat/{self._rank}", "0 0")
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * self._period_s)

    def _beat(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the rank or the torchrun that holds it
            for count in itertools.count(1):
                if self._over.wait(self._period_s):
                    return
                self._store.set(keys[self._rank], f"{count} {self._progress.marks}")
                if self._progress.silent_s < self._timeout_s / 2:
                    self._seen = []
                else:
                    values = self._store.multi_get(keys)
                    self._seen.append([Heartbeat(*map(int, value.decode().split())) for value in values])

    def _watch(self) -> None:
        while not self._over.wait(self._period_s):
            if self._progress.silent_s > self._timeout_s:
                seen = self._seen
                # if the store does not answer, rank 0 or the torchrun that started it is the cause, as it holds the store
                silent = silent_ranks(seen[0], seen[-1]) if len(seen) > 1 else [0]
                self._end(", ".join(f"rank {rank}" for rank in silent) or "one that can't be identified")

    def _end(self, awaited: str) -> None:
        log.error(
            "error: the trainer's work stood still for %g s (trainer.collective_timeout_s); it waits for %s of its %d ranks. Look at "
            "that process and its machine; this one ends, and continues from the last checkpoint when it is started again",
            self._timeout_s, awaited, self._size,
        )  # fmt: skip
        logging.shutdown()
        os._exit(EXIT_INTERNAL_ERROR)
