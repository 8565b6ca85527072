"""The order of prompts (law 5): a function of seed and configuration, read at any place without walking there."""

from __future__ import annotations

import random


class PromptOrder:
    """Place in line -> (epoch, index of the problem). Places count from 0 across epochs; each epoch has every problem once.

    With `shuffle` every epoch has an order of its own, a function of (`seed`, epoch, `count`) alone: a trainer that starts
    again at place k sees what an undisturbed one would have seen there, however many epochs the run is given.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, epochs: int) -> None:
        self._count = count
        self._seed = seed
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
            random.Random(f"prompts of epoch {epoch}, seed {self._seed}").shuffle(indices)
            self._drawn = epoch, indices
        return self._drawn[1]
