"""The order of prompts (law 5): a function of seed and configuration, read at any place without walking there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate


class PromptOrder:
    """Place in line -> (epoch, index of the problem). Places count from 0 across epochs; each epoch has every problem once.

    With `shuffle` every epoch has an order of its own, a function of (`seed`, epoch, `count`, `name`) alone: a trainer that starts
    again at place k sees what an undisturbed one would have seen there, however many epochs the run is given.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, epochs: int, name: str = "") -> None:
        self._count = count
        self._drawn_from = f"seed {seed}{name}"
        self._shuffle = shuffle
        self._epochs = epochs
        self._drawn: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return self._count * self._epochs

    def __getitem__(self, order: int) -> tuple[int, int]:
        if not 0 <= order < len(self):
            raise IndexError(f"place {order} of {len(self)} prompts ({self._count} problems, {self._epochs} epochs)")
        epoch, place = divmod(order, self._count)
        return epoch, self._permutation(epoch)[place] if self._shuffle else place

    def _permutation(self, epoch: int) -> list[int]:
        if self._drawn is None or self._drawn[0] != epoch:
            indices = list(range(self._count))
            random.Random(f"prompts of epoch {epoch}, {self._drawn_from}").shuffle(indices)
            self._drawn = epoch, indices
        return self._drawn[1]


class EvenOrder:
    """Place in line -> (epoch of its data set, index of the problem), `each` prompts of every data set in turn, round after round.

    `counts` are the problems of each data set, which follow one another in the list that the index is of. Every data set has an
    order and epochs of its own (`PromptOrder`): one that is through begins again. The line ends with the round in which the last of
    them is through all its `epochs`; those that are smaller are then asked more often. What is at a place is a function of `counts`,
    `each`, `seed` and `shuffle` alone, as for one data set.
    """

    def __init__(self, counts: Sequence[int], each: int, seed: int, shuffle: bool, epochs: int) -> None:
        self._each = each
        self._starts = [0, *accumulate(counts)][:-1]
        self._rounds = -(-max(counts) * epochs // each)
        drawn = self._rounds * each
        self._orders = [
            PromptOrder(count, seed, shuffle, -(-drawn // count), f", data set {number}")
            for number, count in enumerate(counts)
        ]

    def __len__(self) -> int:
        return self._rounds * self._each * len(self._orders)

    def __getitem__(self, order: int) -> tuple[int, int]:
        if not 0 <= order < len(self):
            raise IndexError(f"place {order} of {len(self)} prompts ({len(self._orders)} data sets in turn)")
        turn, seat = divmod(order, self._each)
        rounds, number = divmod(turn, len(self._orders))
        epoch, index = self._orders[number][rounds * self._each + seat]
        return epoch, self._starts[number] + index
