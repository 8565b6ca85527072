"""How much may be sent to an environment at a time. No I/O."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from headrace.trajectory import Status

# gRPC carries batches of 256 KB to 1 MB best.
LARGEST_BATCH = 64
# Without a limit on calls, an environment's capacity is used in this many calls, so that it is not idle until the last of one call is done.
_CALLS = 4
# One that is done with each trajectory sooner than this is hardly idle between two calls, and a call costs more than its work.
_AT_ONCE_S = 0.01
# Of the capacity, after each call that shows no overload.
_INCREASE = 1 / 16


@dataclasses.dataclass
class InFlightLimit:
    """The trajectories and calls that one environment has, and may have: additive increase and multiplicative decrease below its capacity.

    `capacity` is in trajectories, `calls` in Score calls (0: any number), `timeout_s` of one call, as the hub states them. Until it
    does, one trajectory at a time may go out.
    """

    capacity: int = 1
    calls: int = 0
    max_batch_size: int = 1
    timeout_s: float = 60.0
    allowed: float = 1.0
    at_once: bool = False  # the newest answer was
    sent: int = 0
    sent_calls: int = 0

    def state(self, capacity: int, calls: int, max_batch_size: int, timeout_s: float) -> None:
        """Take over what the hub says of the environment."""
        if capacity != self.capacity:
            self.allowed = capacity
        self.capacity, self.calls, self.max_batch_size, self.timeout_s = capacity, calls, max_batch_size, timeout_s

    @property
    def batch(self) -> int:
        """Trajectories in one call."""
        whole = self.capacity // (self.calls or (1 if self.at_once else _CALLS))
        return max(1, min(whole, self.max_batch_size, LARGEST_BATCH))

    @property
    def free(self) -> int:
        """Trajectories that may be sent now."""
        free = max(0, int(self.allowed) - self.sent)
        return min(free, self.batch * max(0, self.calls - self.sent_calls)) if self.calls else free

    def send(self, trajectories: int) -> None:
        self.sent += trajectories
        self.sent_calls += 1

    def done(self, trajectories: int) -> None:
        self.sent -= trajectories
        self.sent_calls -= 1

    def hear(self, statuses: Iterable[Status], longest_s: float = math.inf) -> None:
        """Learn from the answer to a call: what was not begun, or late, says that it has too much. `longest_s`: what the environment took
        for the slowest trajectory of it."""
        self.at_once = longest_s < _AT_ONCE_S
        if {"NOT_STARTED", "TIMED_OUT"} & set(statuses):
            self.allowed = max(1.0, self.allowed / 2)
        else:
            self.allowed = min(self.capacity, self.allowed + max(1.0, self.capacity * _INCREASE))
