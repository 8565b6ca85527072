"""The trainer's ranks: a wrapper of `torch.distributed`.

`torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them there is one rank and no process group. Numbers,
objects and rank 0's commands travel over gloo on the CPU; FSDP2's own collectives use the backend of the device. Commands have their
own process group, which may be silent for as long as rank 0 waits for a batch; all other collectives keep torch's timeout. When a rank
ends, its connections close, and ranks that wait for it get a `ServiceError`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headrace.config import Config
from headrace.errors import ServiceError

T = TypeVar("T")

COMMAND_TIMEOUT = datetime.timedelta(days=30)


class Ranks:
    """This process among the ranks. Every method except `send` and `receive` is a collective: all ranks must call it.

    With one rank nothing is sent, and a collective returns its argument.
    """

    def __init__(self, commands: dist.ProcessGroup | None = None) -> None:
        """Wrap the current process group; `commands` is the group that `send` and `receive` use."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._commands = commands

    def send(self, command: bytes) -> None:
        """Rank 0: give `command` to every other rank's `receive`."""
        if self.size == 1:
            return
        with _lost_rank_named():
            dist.broadcast(torch.tensor([len(command)]), 0, group=self._commands)
            dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0, group=self._commands)

    def receive(self) -> bytes:
        """Ranks above 0: the next command, however long it takes. Raises `ServiceError` when rank 0 is gone."""
        with _lost_rank_named():
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._commands)
            data = torch.zeros(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._commands)
        return data.numpy().tobytes()

    def raise_any(self, problems: Sequence[str]) -> None:
        """Raise `ServiceError` on every rank if any rank found a problem: a rank that went on alone would wait for the others forever."""
        found = [problem for of_rank in self.all_gather(list(problems)) for problem in of_rank]
        if found:
            raise ServiceError("; ".join(found))

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with _lost_rank_named():
            dist.all_gather_object(values, value)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on rank 0; on the others only their own."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else [value]
        with _lost_rank_named():
            dist.gather_object(value, values if self.rank == 0 else None, group=self._commands)
        return values

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum over the ranks of each value."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def sum_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sum over the ranks of arrays of one shape."""
        if self.size == 1:
            return values
        table = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).clone()
        with _lost_rank_named():
            dist.all_reduce(table)
        summed: npt.NDArray[np.float64] = table.numpy()
        return summed

    def combine(
        self, sums: Mapping[str, float], minima: Mapping[str, float], maxima: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Combine each rank's sums, minima and maxima over all ranks; all ranks pass the same names."""
        operations = ((sums, dist.ReduceOp.SUM), (minima, dist.ReduceOp.MIN), (maxima, dist.ReduceOp.MAX))
        whole = []
        for values, operation in operations:
            names = sorted(values)
            whole.append(dict(zip(names, self._reduce([values[name] for name in names], operation), strict=True)))
        return whole[0], whole[1], whole[2]

    def _reduce(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1 or not values:
            return list(values)
        table = torch.tensor(values, dtype=torch.float64)
        with _lost_rank_named():
            dist.all_reduce(table, op=operation)
        return [float(x) for x in table.tolist()]


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks while the context is open.

    Raises `ServiceError` if `trainer.num_processes` and the environment disagree, or the others can't be reached.
    """
    if "WORLD_SIZE" not in os.environ and config.trainer.num_processes > 1:
        raise ServiceError(
            f"trainer.num_processes is {config.trainer.num_processes}, but this process was not started by torchrun; use "
            f"`headrace up`, or `torchrun --nproc-per-node {config.trainer.num_processes} -m headrace.cli trainer …`"
        )
    gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    with _lost_rank_named():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        commands = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
    try:
        yield Ranks(commands)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The ranks' process group, or a temporary one of this process alone while the context is open: without any,
    `torch.distributed.checkpoint` warns each time."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(root: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Move `root` to `device`; with several ranks shard it by FSDP2, with one unit per layer and one for the rest, so that a tied embedding
    and head stay together."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        root.to(device)
        return
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*layers, root):
        fully_shard(module, mesh=mesh)


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor. A collective if `tensor` is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_first_rank() -> bool:
    """Whether this is rank 0, which writes what all ranks hold."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def _lost_rank_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ServiceError(
            f"another rank of the trainer failed or can't be reached ({reason}); see the end of its log"
        ) from error
