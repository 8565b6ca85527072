"""The trainer's ranks: a wrapper of `torch.distributed`.

`torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without them there is one rank and no process group. Numbers,
records (msgpack) and rank 0's commands travel over gloo on the CPU. FSDP2's own collectives use the device's backend.

A rank may wait for a command without limit: rank 0 sends none while it waits for a batch. Once a rank works, all ranks must show `Progress`
within `trainer.collective_timeout_s`. A watch in each rank ends its process if its own work stands still for longer, and logs which rank it
waited for. When a rank ends, its connections close, and ranks that wait for it raise `Restartable`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import rendezvous
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.base import devices
from headrace.base.addresses import is_loopback
from headrace.base.errors import Restartable, ServiceError
from headrace.config import Config
from headrace.net.service import EXIT_INTERNAL_ERROR
from headrace_services.refit import nccl

log = logging.getLogger(__name__)

T = TypeVar("T")

COMMAND_TIMEOUT = datetime.timedelta(days=30)
# The interval at which a rank publishes its `Heartbeat`.
BEAT_S = 1.0
# torch's own timeout is this much longer than the watch's, which can name the rank.
GRACE_S = 60.0


class Progress:
    """The last sign of life of the thread that works with torch, for the health page and for the watch over other ranks. An idle thread
    needs none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.marks = 0
        self._clock = clock
        self._last: float | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The thread works while the context is open, and must call `mark`."""
        self._last = self._clock()
        try:
            yield
        finally:
            self._last = None

    def mark(self) -> None:
        """Give a sign of life. All ranks call this at the same points: before each collective, and for each micro-batch and weight."""
        self.marks += 1
        if self._last is not None:
            self._last = self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds since the last sign of life; 0 without work."""
        last = self._last
        return 0.0 if last is None else self._clock() - last


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """What a rank publishes about itself: the number of times it has done so, and the marks of its `Progress`."""

    count: int
    marks: int


def silent_ranks(before: Sequence[Heartbeat], after: Sequence[Heartbeat]) -> list[int]:
    """Return the ranks that the others wait for, from the heartbeats of all ranks at two times: those whose process stands still, or else
    those whose work is behind the others'."""
    stopped = [rank for rank, (one, other) in enumerate(zip(before, after, strict=True)) if one.count == other.count]
    foremost = max(beat.marks for beat in after)
    return stopped or [rank for rank, beat in enumerate(after) if beat.marks < foremost]


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
        return _decoded(whole, sizes, kind)

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """Return every rank's value, in order of rank, on rank 0; on the others only their own. `kind` is as in `all_gather`."""
        if self.size == 1:
            return [value]
        rows, sizes = self._rows(msgspec.msgpack.encode(value))
        whole = [torch.empty_like(rows) for _ in range(self.size)] if self.rank == 0 else None
        with self._collective():
            dist.gather(rows, whole, dst=0)
        return [value] if whole is None else _decoded(whole, sizes, kind)

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


def _decoded(rows: Sequence[Tensor], sizes: Sequence[int], kind: type[T]) -> list[T]:
    return [
        msgspec.msgpack.decode(row[:size].numpy().tobytes(), type=kind) for row, size in zip(rows, sizes, strict=True)
    ]


class RankWatch:
    """Ends this process if its work stands still for `timeout_s`, and logs which rank it waited for. Each rank publishes its heartbeats in
    the ranks' store.

    It ends the process itself, because a thread that waits in a GPU collective can't be interrupted. A call of the store may hang like any
    other, so it has its own thread.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, progress: Progress, timeout_s: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._progress, self._timeout_s = progress, timeout_s
        self._period_s = min(BEAT_S, timeout_s / 8)
        self._seen: list[list[Heartbeat]] = []  # every rank's heartbeats since this one began to wait
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]

    def start(self) -> None:
        self._store.set(f"beat/{self._rank}", "0 0")
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * self._period_s)

    def _beat(self) -> None:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the rank or the torchrun that holds it
            for count in itertools.count(1):
                if self._over.wait(self._period_s):
                    return
                self._store.set(keys[self._rank], f"{count} {self._progress.marks}")
                if self._progress.silent_s < self._timeout_s / 2:
                    self._seen = []
                else:
                    values = self._store.multi_get(keys)
                    self._seen.append([Heartbeat(*map(int, value.decode().split())) for value in values])

    def _watch(self) -> None:
        while not self._over.wait(self._period_s):
            if self._progress.silent_s > self._timeout_s:
                seen = self._seen
                # if the store does not answer, rank 0 or the torchrun that started it is the cause, as it holds the store
                silent = silent_ranks(seen[0], seen[-1]) if len(seen) > 1 else [0]
                self._end(", ".join(f"rank {rank}" for rank in silent) or "one that can't be identified")

    def _end(self, awaited: str) -> None:
        log.error(
            "error: the trainer's work stood still for %g s (trainer.collective_timeout_s); it waits for %s of its %d ranks. Look at "
            "that process and its machine; this one ends, and continues from the last checkpoint when it is started again",
            self._timeout_s, awaited, self._size,
        )  # fmt: skip
        logging.shutdown()
        os._exit(EXIT_INTERNAL_ERROR)


def gloo_problem(environ: Mapping[str, str], name: str, address: str | None) -> str | None:
    """Return why ranks on other machines can't reach this machine, whose `name` resolves to `address`; None if they can.

    gloo gives them that address, unless it is given an interface. Debian's installer writes 127.0.1.1 for the name into /etc/hosts.
    """
    ranks = int(environ.get("WORLD_SIZE", "1"))
    if int(environ.get("LOCAL_WORLD_SIZE", ranks)) == ranks or "GLOO_SOCKET_IFNAME" in environ:
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


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the ranks while the context is open.

    Raises `ServiceError` if `trainer.num_processes` and the environment disagree, or if the other ranks can't be reached.
    """
    if "WORLD_SIZE" not in os.environ and config.trainer.num_processes > 1:
        raise ServiceError(
            f"trainer.num_processes is {config.trainer.num_processes}, but this process was not started by torchrun; use "
            f"`headrace up`, or `torchrun --nproc-per-node {config.trainer.num_processes} -m headrace.cli trainer …`"
        )
    if config.trainer.device != "cpu" and torch.version.cuda is not None:
        devices.installed().check_driver()  # torch only warns, and sees no GPU then
    nccl.prepare_environment(config.weight_channel.timeout_s)
    gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
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


def shards_alone(device: torch.device, *, bfloat16: bool) -> bool:
    """Return whether a single rank shards its models, over itself alone.

    It does so in bfloat16 on a GPU, so that FSDP2 computes whole layers in bfloat16, as with several ranks. Autocast would keep a bfloat16
    copy of every matrix, and would compute experts in float32.
    """
    return bfloat16 and device.type == "cuda"


def shard(
    root: nn.Module,
    layers: Sequence[nn.Module],
    device: torch.device,
    *,
    within_host: bool,
    bfloat16: bool,
    in_float32: Sequence[nn.Module] = (),
) -> None:
    """Move `root` to `device`. With several ranks, or if a rank `shards_alone`, shard it by FSDP2.

    There is one unit per layer, one for each module that is computed `in_float32`, and one for the rest, so that a tied embedding and head
    stay together. `within_host` (`trainer.shard_within_host`): each host holds a copy, sharded over its ranks (HSDP); else all ranks hold
    one. `bfloat16` (`policy.precision`): weights are gathered and layers computed in bfloat16; the shards, and the sum of gradients over
    the ranks, stay float32.

    A model on the meta device stays there, and each rank has its part of it. The rest stays gathered from the forward pass to the backward
    pass, which begins with it. After a pass without gradients call `end_pass`.
    """
    if several_ranks():
        mesh = _mesh(device.type, within_host)
    elif shards_alone(device, bfloat16=bfloat16):
        mesh = _own_mesh(device.type)
    else:
        root.to(device)
        return
    shard_over(mesh, root, layers, bfloat16=bfloat16, in_float32=in_float32)


def shard_over(
    mesh: DeviceMesh,
    root: nn.Module,
    layers: Sequence[nn.Module],
    *,
    bfloat16: bool,
    in_float32: Sequence[nn.Module] = (),
) -> None:
    """Shard `root` as `shard` does, over the ranks of `mesh`, which may be a single one."""
    usual = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = usual if bfloat16 else MixedPrecisionPolicy()
    for module in layers:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in in_float32:
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fully_shard(root, mesh=mesh, mp_policy=policy)


def end_pass(root: nn.Module) -> None:
    """Shard the root's own parameters again, after a pass of the sharded `root` that no backward pass follows. Otherwise what was gathered
    would be kept and used as the weights, which it isn't in bfloat16."""
    if isinstance(root, FSDPModule):
        root.reshard()


def reduce_gradients(root: nn.Module, when: Literal["never", "within_host", "everywhere"]) -> None:
    """Set what the next backward pass of the sharded `root` does with its gradients. `never` adds up whole gradients on each rank, for a
    later pass to reduce. `within_host` reduces them to each rank's part, but not over the hosts that hold copies."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(when != "never", recurse=False)
            module.set_requires_all_reduce(when == "everywhere", recurse=False)


def _own_mesh(device: str) -> DeviceMesh:
    """Make a mesh of this rank alone. FSDP2 needs a process group for it, but sends nothing."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (1,))


@functools.cache
def _mesh(device: str, within_host: bool) -> DeviceMesh:
    ranks = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if within_host else ranks
    if local == ranks:
        return init_device_mesh(device, (ranks,))
    if ranks % local:
        raise ServiceError(
            f"trainer.shard_within_host true: the {ranks} ranks are not spread equally over the hosts ({local} on this one); start equally "
            "many on each, or set it to false"
        )
    return init_device_mesh(device, (ranks // local, local), mesh_dim_names=("copies", "shards"))


@dataclasses.dataclass(frozen=True)
class Place:
    """This rank's part of a model: part `index` of `count`, and whether this rank `writes` it (others may hold copies)."""

    index: int
    count: int
    writes: bool


def place_of(tensor: Tensor) -> Place:
    """Return this rank's place in the model that has `tensor` as a parameter."""
    if not isinstance(tensor, DTensor):
        return Place(0, 1, is_first_rank())
    mesh = tensor.device_mesh
    return Place(mesh.get_local_rank(-1), mesh.size(-1), mesh.ndim == 1 or mesh.get_local_rank(0) == 0)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move `tensor`, made on the CPU, to this device. A copy to a GPU is made from pinned memory, so that the CPU does not wait for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopier:
    """Copies tensors of a GPU to pageable host memory, through two pieces of pinned memory: while the GPU fills one, the CPU empties the
    other.

    Pinned memory is slow to allocate, and torch rounds each allocation up to a power of two and keeps it. So its amount is bounded here.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        """`nbytes` is the size of each piece. Without `pin`, the same code runs for tensors on the CPU."""
        self._pieces = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        self._pin = pin
        self._parts: list[list[tuple[Tensor, Tensor]]] = [[], []]  # of each piece: what it holds, and where that goes
        self._filled: list[torch.cuda.Event | None] = [None, None]
        self._current, self._used = 0, 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Begin to copy `source` to the contiguous `target`. It is complete after `finish`."""
        left, to = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (source, target))
        while left.numel():
            room = self._pieces[self._current][self._used :]
            if not room.numel():
                self._turn()
                continue
            count = min(left.numel(), room.numel())
            room[:count].copy_(left[:count], non_blocking=True)
            self._parts[self._current].append((room[:count], to[:count]))
            self._used += count
            left, to = left[count:], to[count:]

    def finish(self) -> None:
        """Wait until all copies are complete."""
        self._turn()
        self._turn()

    def _turn(self) -> None:
        """End the current piece, and empty the other one to be filled next."""
        if self._pin:
            self._filled[self._current] = event = torch.cuda.Event()
            event.record()
        self._current, self._used = 1 - self._current, 0
        if (filled := self._filled[self._current]) is not None:
            filled.synchronize()
        for staged, target in self._parts[self._current]:
            target.copy_(staged)
        self._parts[self._current].clear()


# The size of each of the two pinned pieces.
PINNED_BYTES = 512 * 2**20


def host_copies(tensors: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> dict[str, Tensor]:
    """Return copies of `tensors` in host memory. Without `keep`, go through all of `tensors` and return nothing: producing them may be a
    collective."""
    copies: dict[str, Tensor] = {}
    copier: HostCopier | None = None
    for name, tensor in tensors:
        if not keep:
            continue
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.is_cuda:
            copier = copier or HostCopier(PINNED_BYTES, pin=True)
            copier.copy(tensor, copies[name])
        else:
            copies[name].copy_(tensor.detach())
    if copier is not None:
        copier.finish()
    return copies


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, each once, and the buffers that a checkpoint has beside them (biases of routers), module by module."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        buffers = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set and buffer is not None and buffer.is_floating_point()
        }
        for name, tensor in {**module._parameters, **buffers}.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the unsharded tensor. This is a collective if `tensor` is sharded. It is gathered in `dtype` if one is given."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:  # this rank has it all
        return tensor.to_local()
    cast: DTensor = tensor.to(dtype or tensor.dtype)  # type: ignore[assignment]
    return cast.full_tensor()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of the tensor: rows of it if it is sharded, else all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """Return the rows `[first, last)` of the tensor that this rank holds. FSDP2 shards as `torch.chunk` does."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    place = place_of(tensor)
    chunk = -(-rows // place.count)
    first = min(place.index * chunk, rows)
    last = min(first + chunk, rows)
    assert last - first == len(tensor.to_local())
    return first, last


def with_local_part(like: Tensor, part: Tensor) -> Tensor:
    """Return the tensor that has `part` on this rank and is sharded as `like`. A number is not sharded."""
    if not isinstance(like, DTensor) or part.dim() == 0:
        return part
    part = part.to(like.device)
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


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
