"""What this run's weights were trained on: the trainer's own memory of it, published with every checkpoint.

The buffer knows the same while it keeps its data. If it loses writes (an empty volume, a power cut, a failover), the newest
checkpoint's ledger says which prompts its weights have seen, so that every other one is queued again and none is trained twice.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence

from headrace.errors import ServiceError


class Orders:
    """A set of places in the order of prompts, as sorted disjoint half-open ranges: steps train almost contiguous places,
    so a million prompts stay a handful of pairs."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for start, end in ranges:
            if not (self._ranges[-1][1] if self._ranges else 0) <= start < end:
                raise ServiceError(f"the checkpoint's ledger holds [{start}, {end}), which is empty or out of order")
            self._ranges.append((start, end))

    def add(self, order: int) -> None:
        """Raises `ServiceError` if the place is taken: in the history of the weights none is trained twice (law 1)."""
        at = bisect.bisect_right(self._ranges, (order, float("inf")))
        before = self._ranges[at - 1] if at else None
        after = self._ranges[at] if at < len(self._ranges) else None
        if order < 0 or (before is not None and before[0] <= order < before[1]):
            raise ServiceError(f"prompt {order} of the run's order came to the trainer a second time (law 1)")
        start, end, low, high = order, order + 1, at, at
        if before is not None and before[1] == order:
            start, low = before[0], at - 1
        if after is not None and after[0] == order + 1:
            end, high = after[1], at + 1
        self._ranges[low:high] = [(start, end)]

    def __contains__(self, order: int) -> bool:
        at = bisect.bisect_right(self._ranges, (order, float("inf")))
        return at > 0 and order < self._ranges[at - 1][1]

    def __len__(self) -> int:
        return sum(end - start for start, end in self._ranges)

    @property
    def last(self) -> int:
        """The highest place, -1 if there is none."""
        return self._ranges[-1][1] - 1 if self._ranges else -1

    def missing(self) -> Iterator[int]:
        """Places below the highest that are not in the set, in order."""
        edge = 0
        for start, end in self._ranges:
            yield from range(edge, start)
            edge = end

    def ranges(self) -> list[list[int]]:
        return [list(pair) for pair in self._ranges]


class Ledger:
    """Prompts trained so far (`orders`) and, step by step, the groups trained since the last published checkpoint (`steps`)."""

    def __init__(self, orders: Orders | None = None) -> None:
        self.orders = orders or Orders()
        self.steps: dict[int, list[str]] = {}

    def record(self, step: int, groups: Sequence[str], orders: Sequence[int]) -> None:
        """Step `step` is trained on these groups, whose prompts have these places in the order."""
        for order in orders:
            self.orders.add(order)
        self.steps[step] = list(groups)

    def published(self) -> None:
        """The checkpoint that holds `steps` is safe on disk."""
        self.steps = {}
