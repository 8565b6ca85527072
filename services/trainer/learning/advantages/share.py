"""This rank's share of a batch: what it holds token by token, and how it learns what is true of the whole.

Numbers of the whole batch are made from one row a trajectory, each filled in by the rank that holds it. A row's other addends are
zeros, so that every rank ends up with the same bits, whoever held what; and what is computed from them is the same for any
number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from services.trainer.learning.tokens import Episode, Float64

T = TypeVar("T")


class AllRanks(Protocol):
    """The collectives that a share takes part in; `World` has them. With one rank, all it says is what it was told."""

    def sum_array(self, values: Float64) -> Float64:
        """The sum over the ranks of arrays of one shape."""

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""


@dataclasses.dataclass(frozen=True)
class Share:
    """`episodes` are this rank's of a batch of `size` trajectories; their tokens lie one after the other, N in all.

    Every method that says so is a collective: all `ranks` call it alike.
    """

    episodes: Sequence[Episode]
    size: int
    ranks: AllRanks

    @cached_property
    def places(self) -> npt.NDArray[np.intp]:
        """[E]: where in the batch each episode is."""
        return np.array([episode.index for episode in self.episodes], dtype=np.intp)

    @cached_property
    def lengths(self) -> npt.NDArray[np.intp]:
        """[E]: tokens of each."""
        return np.array([episode.length for episode in self.episodes], dtype=np.intp)

    @cached_property
    def sequence(self) -> npt.NDArray[np.intp]:
        """[N]: the episode of each token."""
        return np.repeat(np.arange(len(self.episodes)), self.lengths)

    @cached_property
    def to_go(self) -> npt.NDArray[np.intp]:
        """[N]: how many tokens of the same episode come after each."""
        return np.cumsum(self.lengths)[self.sequence] - 1 - np.arange(self.sequence.size)

    @cached_property
    def multipliers(self) -> Float64:
        """[E]: the weight of each in the loss."""
        return np.array([episode.multiplier for episode in self.episodes], dtype=np.float64)

    def own(self, of_batch: Float64) -> Float64:
        """Of values [size] of the batch, this rank's [E]."""
        return of_batch[self.places]

    def tokens(self, name: str) -> Float64:
        """`name` (`start`, `ref` or `values`) of all episodes, [N]. Raises `ValueError` where one has none, or another length."""
        parts = [np.empty(0)]
        for episode in self.episodes:
            values = getattr(episode, name)
            if values is None or values.shape != (episode.length,):
                shape = None if values is None else values.shape
                raise ValueError(f"{episode.name}: {name} of shape {shape} for {episode.length} tokens")
            parts.append(values)
        return np.concatenate(parts).astype(np.float64)

    def sums(self, tokens: Float64) -> Float64:
        """[E]: the sum over each episode's tokens of values [N]."""
        return np.bincount(self.sequence, tokens, len(self.episodes)).astype(np.float64)

    def split(self, tokens: Float64) -> tuple[Float64, ...]:
        """Values [N], cut into those of each episode."""
        return tuple(np.split(tokens, np.cumsum(self.lengths)[:-1])) if self.episodes else ()

    def whole(self, rows: Float64) -> Float64:
        """A collective. From every rank's rows [E, ...], those of the batch, [size, ...], in its order."""
        table = np.zeros((self.size, *rows.shape[1:]))
        table[self.places] = rows
        return self.ranks.sum_array(table)
