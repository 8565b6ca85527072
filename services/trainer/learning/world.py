"""The ranks as the work itself sees them: numbers combined, problems shared. Every method is a collective of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ServiceError
from services.trainer.learning.tokens import Float64

T = TypeVar("T")


class World:
    """This process among the ranks of `torch.distributed`; alone where there is no process group."""

    def __init__(self, device: torch.device) -> None:
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._device = device

    def refuse(self, problems: Sequence[str]) -> None:
        """Raise `ServiceError` on every rank for what any rank found: one that went on alone would wait for the others for ever."""
        found = [problem for one in self.gather(list(problems)) for problem in one]
        if found:
            raise ServiceError("; ".join(found))

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        everyone: list[T] = [value] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def sums(self, values: Sequence[float]) -> list[float]:
        return self._reduced(list(values), dist.ReduceOp.SUM)

    def sum_array(self, values: Float64) -> Float64:
        """The sum over the ranks of arrays of one shape."""
        if self.size == 1:
            return values
        table = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).to(self._device)
        dist.all_reduce(table)
        summed: Float64 = table.cpu().numpy()
        return summed

    def most(self, value: float) -> float:
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def combine(
        self, sums: Mapping[str, float], minima: Mapping[str, float], maxima: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Metrics of all ranks from each one's; all ranks bring the same names."""
        operations = ((sums, dist.ReduceOp.SUM), (minima, dist.ReduceOp.MIN), (maxima, dist.ReduceOp.MAX))
        whole = []
        for values, operation in operations:
            names = sorted(values)
            whole.append(dict(zip(names, self._reduced([values[name] for name in names], operation), strict=True)))
        return whole[0], whole[1], whole[2]

    def _reduced(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1 or not values:
            return values
        table: Tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(table, op=operation)
        return [float(x) for x in table.tolist()]
