"""Limits how much is sent to an environment at a time. No I/O."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from headrace.records.score import Status

# gRPC carries batches of 256 KB to 1 MB best.
LARGEST_BATCH = 64
# Without a limit on calls, an environment's capacity is split into this many calls, so that it is not idle while a call's last trajectory
# is scored.
_CALLS = 4
# An environment that scores each trajectory faster than this is hardly idle between two calls, and a call costs more than its work.
_AT_ONCE_S = 0.01
# the share of the capacity to add after each call that shows no overload
_INCREASE = 1 / 16


@dataclasses.dataclass
class InFlightLimit:
    """Limits the trajectories and calls in flight to one environment, by additive increase and multiplicative decrease below its capacity.

    The hub states `capacity` (in trajectories), `calls` (in Score calls; 0: any number) and `timeout_s` (of one call). Until it does, one
    trajectory at a time may be sent.
    """

    capacity: int = 1
    calls: int = 0
    max_batch_size: int = 1
    timeout_s: float = 60.0
    allowed: float = 1.0
    at_once: bool = False  # the newest answer came at once (`_AT_ONCE_S`)
    sent: int = 0
    sent_calls: int = 0

    def state(self, capacity: int, calls: int, max_batch_size: int, timeout_s: float) -> None:
        """Set what the hub states about the environment. The share of its capacity that is allowed stays as it is."""
        share = self.allowed / self.capacity if self.capacity else 1.0
        self.allowed = min(capacity, max(1.0, share * capacity))
        self.capacity, self.calls, self.max_batch_size, self.timeout_s = capacity, calls, max_batch_size, timeout_s

    @property
    def batch(self) -> int:
        """The number of trajectories in one call."""
        whole = self.capacity // (self.calls or (1 if self.at_once else _CALLS))
        return max(1, min(whole, self.max_batch_size, LARGEST_BATCH))

    @property
    def free(self) -> int:
        """The number of trajectories that may be sent now."""
        free = max(0, int(self.allowed) - self.sent)
        return min(free, self.batch * max(0, self.calls - self.sent_calls)) if self.calls else free

    def send(self, trajectories: int) -> None:
        self.sent += trajectories
        self.sent_calls += 1

    def release(self, trajectories: int) -> None:
        self.sent -= trajectories
        self.sent_calls -= 1

    def hear(self, statuses: Iterable[Status], longest_s: float = math.inf) -> None:
        """Adapt to the answer to a call. Trajectories that were late or not begun show that the environment has too many. `longest_s` is
        the environment's time for the slowest trajectory of the call."""
        self.at_once = longest_s < _AT_ONCE_S
        if {"NOT_STARTED", "TIMED_OUT"} & set(statuses):
            self.allowed = max(1.0, self.allowed / 2)
        else:
            self.allowed = min(self.capacity, self.allowed + max(1.0, self.capacity * _INCREASE))
