"""Sequences through a model, micro-batch by micro-batch, all ranks in step.

Under FSDP2 every pass is a collective: ranks with fewer micro-batches keep pace with empty ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.trajectory import Float32
from services.trainer.learning.losses import MetricNames
from services.trainer.learning.tokens import LossParts
from services.trainer.learning.world import World
from services.trainer.network.rows import Layout, MicroBatch, Rows, TokenSequence, build, divide, plan

LossOf = Callable[[MicroBatch, Rows], LossParts]


@dataclasses.dataclass(frozen=True)
class Totals:
    """The metrics of a `LossParts`, over all micro-batches and ranks."""

    sums: Mapping[str, float]
    minima: Mapping[str, float]
    maxima: Mapping[str, float]


class Passes:
    """Of `sequences` on `device`, in micro-batches as `training` and `inference` lay them out."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        sequences: Sequence[TokenSequence],
        training: Layout,
        inference: Layout,
    ) -> None:
        self._world = world
        self._device = device
        self._sequences = sequences
        self._training = training
        self._inference = inference

    def forward(self, compute: Callable[[Rows], Tensor]) -> list[Float32]:
        """A collective: what `compute` gives for the policy tokens of each sequence, [T] each, without gradients."""
        found = [np.empty(0, np.float32) for _ in self._sequences]
        for batch in self._in_step(plan(self._sequences, self._inference)):
            rows = build(self._sequences, batch, self._inference).to(self._device)
            with torch.no_grad():
                values = compute(rows).cpu().numpy()
            for index, share in divide(batch, self._sequences, values):
                found[index] = share
        return found

    def backward(self, chosen: Sequence[int], names: MetricNames, loss: LossOf) -> Totals:
        """A collective: add the gradients of `loss` over the `chosen` sequences of all ranks; its metrics, of those `names`."""
        return self._accumulate(plan_of(self._sequences, chosen, self._training), names, loss)

    def backward_alone(self, index: int | None, names: MetricNames, loss: LossOf) -> Totals:
        """A collective: `backward` on one sequence of one rank, None on the others."""
        batch = MicroBatch() if index is None else MicroBatch((((index,),),))
        return self._accumulate([batch], names, loss)

    def _accumulate(self, batches: Sequence[MicroBatch], names: MetricNames, loss: LossOf) -> Totals:
        parts = []
        for batch in self._in_step(batches):
            part = loss(batch, build(self._sequences, batch, self._training).to(self._device))
            (part.loss * self._world.size).backward()  # FSDP averages over ranks; the loss is a sum
            parts.append(part)
        sums = _stacked([part.sums for part in parts], names.sums).sum(0)
        minima = _stacked([part.minima for part in parts], names.minima).amin(0)
        maxima = _stacked([part.maxima for part in parts], names.maxima).amax(0)
        return Totals(
            *self._world.combine(_named(names.sums, sums), _named(names.minima, minima), _named(names.maxima, maxima))
        )

    def _in_step(self, own: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """`own`, and as many empty ones as it takes until every rank is done; at least one."""
        rounds = max(1, int(self._world.most(len(own))))
        yield from own
        yield from (MicroBatch() for _ in range(rounds - len(own)))


def plan_of(sequences: Sequence[TokenSequence], chosen: Sequence[int], layout: Layout) -> list[MicroBatch]:
    """Micro-batches of the `chosen` sequences, which keep their places in `sequences`."""
    return [
        MicroBatch(tuple(tuple(tuple(chosen[i] for i in tree) for tree in row) for row in batch.rows))
        for batch in plan([sequences[i] for i in chosen], layout)
    ]


def _stacked(metrics: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> Tensor:
    """[micro-batches, names], where the loss was computed: a device is waited for once, after the last micro-batch."""
    return torch.stack([torch.stack([one[name].detach() for name in names]) for one in metrics])


def _named(names: Sequence[str], values: Tensor) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))
