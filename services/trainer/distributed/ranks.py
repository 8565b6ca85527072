"""The trainer's ranks: a wrapper of `torch.distributed`.

`torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without them there is one rank and no process group. Numbers,
records (msgpack) and rank 0's commands travel over gloo on the CPU. FSDP2's own collectives use the device's backend.

A rank may wait for a command without limit: rank 0 sends none while it waits for a batch. Once a rank works, all ranks must show `Progress`
within `trainer.collective_timeout_s`. A watch in each rank ends its process if its own work stands still for longer, and logs which rank it
waited for. When a rank ends, its connections close, and ranks that wait for it raise `Restartable`.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import rendezvous

from headrace.base import devices
from headrace.base.addresses import is_loopback
from headrace.base.errors import Restartable, ServiceError
from headrace.config import Config

from ...refit import nccl
from .liveness import Progress, RankWatch

log = logging.getLogger(__name__)

T = TypeVar("T")
COMMAND_TIMEOUT = datetime.timedelta(days=30)
# torch's own timeout is this much longer than the watch's, which can name the rank.
GRACE_S = 60.0


class Ranks:
    """This process among the ranks. Every method except `send` and `receive` is a collective: all ranks must call it.

    With one rank nothing is sent, and a collective returns its argument. `progress` is this rank's.
    """

    def __init__(self, commands: dist.ProcessGroup | None = None, progress: Progress | None = None) -> None:
        """Wrap the current process group; `commands` is the group in which ranks wait for commands."""
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.progress = progress or Progress()
        self._commands = commands

    def send(self, command: bytes) -> None:
        """Rank 0: give `command` to every other rank's `receive`."""
        if self.size == 1:
            return
        with self._collective():
            dist.broadcast(torch.tensor([len(command)]), 0, group=self._commands)
            dist.broadcast(torch.frombuffer(bytearray(command), dtype=torch.uint8), 0)

    def receive(self) -> bytes:
        """Ranks above 0: return the next command, however long it takes. Raises `Restartable` when rank 0 is gone."""
        with self._collective():
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._commands)
            data = torch.zeros(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return data.numpy().tobytes()

    def raise_any(self, problems: Sequence[str]) -> None:
        """Raise `ServiceError` on every rank if any rank found a problem. A rank that continued alone would wait for the others forever."""
        found = [problem for of_rank in self.all_gather(list(problems), list[str]) for problem in of_rank]
        if found:
            raise ServiceError("; ".join(found))

    def all_gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, in order of rank. `kind` is its type, which msgpack must be able to carry."""
        if self.size == 1:
            return [value]
        rows, sizes = self._rows(msgspec.msgpack.encode(value))
        whole = [torch.empty_like(rows) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(whole, rows)
        return _decode(whole, sizes, kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, in order of rank, on rank 0; on the others only their own. `kind` is as in `all_gather`."""
        if self.size == 1:
            return [value]
        rows, sizes = self._rows(msgspec.msgpack.encode(value))
        whole = [torch.empty_like(rows) for _ in range(self.size)] if self.rank == 0 else None
        with self._collective():
            dist.gather(rows, whole, dst=0)
        return [value] if whole is None else _decode(whole, sizes, kind)

    def _rows(self, data: bytes) -> tuple[Tensor, list[int]]:
        """Return `data` as a tensor, padded to the longest of all ranks, and every rank's length."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(sizes, torch.tensor([len(data)]))
        lengths = [int(size) for size in sizes]
        rows = torch.zeros(max(lengths), dtype=torch.uint8)
        rows[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return rows, lengths

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def sum_array(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the sum over the ranks of arrays of one shape."""
        if self.size == 1:
            return values
        table = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64)).clone()
        with self._collective():
            dist.all_reduce(table)
        summed: npt.NDArray[np.float64] = table.numpy()
        return summed

    def combine(
        self, sums: Mapping[str, float], minima: Mapping[str, float], maxima: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Combine each rank's sums, minima and maxima over all ranks. All ranks pass the same names."""
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
        with self._collective():
            dist.all_reduce(table, op=operation)
        return [float(x) for x in table.tolist()]

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        self.progress.mark()
        with _lost_rank_named():
            yield


def _decode(rows: Sequence[Tensor], sizes: Sequence[int], kind: type[T]) -> list[T]:
    return [
        msgspec.msgpack.decode(row[:size].numpy().tobytes(), type=kind) for row, size in zip(rows, sizes, strict=True)
    ]


def spans_hosts(environ: Mapping[str, str]) -> bool:
    """Return whether there are ranks on other hosts than this rank's."""
    ranks = environ.get("WORLD_SIZE", "1")
    return environ.get("LOCAL_WORLD_SIZE", ranks) != ranks


def gloo_problem(environ: Mapping[str, str], name: str, address: str | None) -> str | None:
    """Return why ranks on other machines can't reach this machine, whose `name` resolves to `address`; None if they can.

    gloo gives them that address, unless it is given an interface. Debian's installer writes 127.0.1.1 for the name into /etc/hosts.
    """
    if not spans_hosts(environ) or "GLOO_SOCKET_IFNAME" in environ:
        return None
    if address is not None and not is_loopback(address):
        return None
    return (
        f"this machine's name {name} is {address or 'nothing'} in /etc/hosts, and gloo would send ranks on other machines there; set "
        "GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface that they reach, such as eth0 (`ip -brief address`)"
    )


def _own_name() -> tuple[str, str | None]:
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, None


def _check_gpu(device: str) -> None:
    """Raise `ServiceError` if torch can't use the GPUs that the driver lists. Where "auto" may go on on the CPU, hide them and log why:
    torch itself only warns, or fails later on a GPU that it has no kernels for."""
    if device == "cpu" or torch.version.cuda is None:
        return
    versions = devices.installed_versions()
    why = devices.why_on_cpu(os.environ, versions) if device == "auto" else None
    if why is None:
        devices.read_inventory().check_driver()
        why = _why_unseen()
        if why and (device == "cuda" or not devices.engine_is_for_cpu(versions)):
            raise ServiceError(why)
    if why:
        log.warning("the trainer uses the CPU: %s", why)
        os.environ[devices.VISIBLE] = ""


def _why_unseen() -> str | None:
    """Return why torch sees no GPU where the driver lists some; None where it sees one."""
    listed = devices.visible(os.environ).devices
    if not listed or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
    else:
        reason = "it gives no reason"
    return (
        f"the driver lists {', '.join(map(str, listed))}, and torch {torch.__version__} can't use it ({reason}); see whether this process "
        "may open /dev/nvidia* and the kernel module nvidia_uvm is loaded, or set trainer.device=cpu"
    )


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks while the context is open.

    Raises `ServiceError` if `trainer.num_processes` and the environment disagree, if this rank's GPU can't compute in a configured
    precision, or if the other ranks can't be reached.
    """
    if "WORLD_SIZE" not in os.environ and config.trainer.num_processes > 1:
        raise ServiceError(
            f"trainer.num_processes is {config.trainer.num_processes}, but this process is not one of several ranks; use "
            f"`headrace up`, or `python -m headrace_services.trainer.launch {config.trainer.num_processes} -m headrace.cli trainer …`"
        )
    _check_gpu(config.trainer.device)
    nccl.prepare_environment(config.weight_channel.connect_s)
    gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if gpu:
        place = int(os.environ.get("LOCAL_RANK", "0"))
        own = devices.visible(os.environ).devices[place : place + 1]
        for key, precision in config.trainer_precisions.items():
            devices.check_precision(own, key, precision)
        torch.cuda.set_device(place)
        if config.trainer.gpu_memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(config.trainer.gpu_memory_fraction)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        try:
            yield Ranks()
        finally:
            if dist.is_initialized():  # by a model that is sharded over this rank alone
                dist.destroy_process_group()
        return
    if problem := gloo_problem(os.environ, *_own_name()):
        raise ServiceError(problem)
    timeout = datetime.timedelta(seconds=config.trainer.collective_timeout_s + GRACE_S)
    progress = Progress()
    with _lost_rank_named():
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # the watch has its own connection: a call on this one may wait for other ranks
        watch = RankWatch(store.clone(), rank, size, progress, config.trainer.collective_timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size, timeout=timeout
        )
        commands = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
    watch.start()
    try:
        yield Ranks(commands, progress)
    finally:
        watch.close()
        dist.destroy_process_group()


def place_on_host() -> tuple[int, int]:
    """Return this rank's place among the ranks of its host, and their number."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Return whether this is rank 0, which writes what all ranks hold."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def _lost_rank_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise Restartable(
            f"another rank of the trainer failed or can't be reached ({reason}); see the end of its log"
        ) from error
