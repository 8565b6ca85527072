"""The ranks of the trainer: how rank 0 tells the others what to do, and how a failure on one ends all of them.

`torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them there is one rank and no process group.
Commands are msgpack bytes in tensors. They travel through a group of their own, which may be silent for as long as rank 0
waits for a batch; collectives of the work itself keep torch's time limit. A rank that ends closes its connections, and
whoever waits for it gets an error then.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgpack
import torch
import torch.distributed as dist

from headrace.config import Config
from headrace.errors import ServiceError

T = TypeVar("T")

SILENCE = datetime.timedelta(days=30)
PROBLEM_BYTES = 2048


class Ranks:
    """This process's place among the ranks. With `size` 1 nothing is sent."""

    def __init__(self, rank: int, size: int, commands: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._commands = commands

    def tell(self, command: Mapping[str, Any]) -> None:
        """Rank 0: hand `command` (msgpack types) to every other rank's `listen`."""
        if self.size == 1:
            return
        data = bytearray(msgpack.packb(dict(command), use_bin_type=True))
        with _naming_the_loss():
            dist.broadcast(torch.tensor([len(data)]), 0, group=self._commands)
            dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._commands)

    def listen(self) -> dict[str, Any]:
        """Ranks above 0: the next command, however long it takes. Raises `ServiceError` when rank 0 is gone."""
        with _naming_the_loss():
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._commands)
            data = torch.zeros(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._commands)
        command: dict[str, Any] = msgpack.unpackb(data.numpy().tobytes())
        return command

    def agree(self, problem: str | None) -> None:
        """All ranks call this; if any brings a problem, all raise `ServiceError` with the first one's words."""
        own = (problem or "").encode()[:PROBLEM_BYTES]
        table = torch.zeros(self.size, PROBLEM_BYTES, dtype=torch.int32)
        table[self.rank, : len(own)] = torch.tensor(list(own), dtype=torch.int32)
        if self.size > 1:
            with _naming_the_loss():
                dist.all_reduce(table)
        for rank, row in enumerate(table):
            if int(row[0]):
                words = bytes(row[row > 0].tolist()).decode(errors="replace")
                raise ServiceError(f"rank {rank}: {words}" if self.size > 1 else words)

    def sum(self, values: Sequence[float]) -> list[float]:
        """All ranks call this; everyone gets the sum over the ranks of each value."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with _naming_the_loss():
                dist.all_reduce(total)
        return [float(x) for x in total]

    def gather(self, value: T) -> list[T]:
        """All ranks call this; rank 0 gets every rank's value in order of rank, the others their own alone."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size if self.rank == 0 else [value]
            with _naming_the_loss():
                dist.gather_object(value, values if self.rank == 0 else None, group=self._commands)
        return values


@contextlib.contextmanager
def _naming_the_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ServiceError(
            f"another rank of the trainer failed or can't be reached ({reason}); its own last words say why"
        ) from error


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Take this process's place among the ranks; leave it at the end.

    Raises `ServiceError` if `trainer.num_processes` and the environment disagree, or the others can't be reached.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "WORLD_SIZE" not in os.environ and config.trainer.num_processes > 1:
        raise ServiceError(
            f"trainer.num_processes is {config.trainer.num_processes}, but this process was not started by torchrun; use "
            f"`headrace up`, or `torchrun --nproc-per-node {config.trainer.num_processes} -m headrace.cli trainer …`"
        )
    gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        yield Ranks(0, 1)
        return
    with _naming_the_loss():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        commands = dist.new_group(backend="gloo", timeout=SILENCE)
    try:
        yield Ranks(rank, size, commands)
    finally:
        dist.destroy_process_group()
