"""What this run's weights were trained on: the trainer's own memory of it, published with every checkpoint.

The buffer knows the same while it keeps its data. If it loses writes (an empty volume, a power cut, a failover), or goes back to an
older checkpoint, that checkpoint's ledger says which prompts its weights have seen, so that every other one is queued again and none
is trained twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from pyroaring import BitMap

from headrace.errors import ServiceError
from headrace.replay import Ended


class Orders:
    """A set of places in the order of prompts, as a roaring bitmap: about two bytes a place at the most, and much less where they are
    dense, however scattered a policy trains them. Places are below 2^32."""

    def __init__(self, places: Iterable[int] = ()) -> None:
        self._places = BitMap(places)

    @classmethod
    def decode(cls, data: bytes) -> Orders:
        """What `encode` gave. Raises `ServiceError` for anything else."""
        orders = cls()
        try:
            orders._places = BitMap.deserialize(data)
        except (ValueError, IndexError) as error:
            raise ServiceError(f"the checkpoint's ledger can't be read ({error})") from error
        return orders

    @classmethod
    def of_bitmap(cls, bitmap: bytes) -> Orders:
        """The places whose bits are set, the most significant bit of the first byte being place 0."""
        places = np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8)))
        return cls(array("I", places.astype(np.uint32).tobytes()))

    def encode(self) -> bytes:
        packed = self._places.copy()
        packed.run_optimize()
        data: bytes = packed.serialize()
        return data

    def add(self, order: int) -> None:
        """Raises `ServiceError` if the place is taken: in the history of the weights none is trained twice (law 1)."""
        if order < 0 or order in self._places:
            raise ServiceError(f"prompt {order} of the run's order came to the trainer a second time (law 1)")
        self._places.add(order)

    def __contains__(self, order: int) -> bool:
        return order in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def last(self) -> int:
        """The highest place, -1 if there is none."""
        return int(self._places.max()) if self._places else -1

    def missing(self, last: int, other: Orders) -> Iterator[int]:
        """Places up to `last` that are neither in this set nor in the other, in order."""
        return iter(BitMap(range(last + 1)) - self._places - other._places)


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


def orders_of(ended: Ended) -> Orders:
    """The places of groups that ended without being trained. Raises `ServiceError` if they are not as many as were counted."""
    orders = Orders.of_bitmap(ended.bitmap)
    if len(orders) != ended.failed + ended.filtered:
        raise ServiceError(
            f"the checkpoint counts {ended.failed} failed and {ended.filtered} filtered groups, but holds the places of {len(orders)}"
        )
    return orders
