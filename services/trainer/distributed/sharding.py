"""Shards models over the ranks with FSDP2, and gives access to whole tensors and to a rank's part of them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.base.errors import ServiceError

from .ranks import is_first_rank, several_ranks


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
class ModelShard:
    """This rank's shard of a model: shard `index` of `count`, and whether this rank `writes` it (others may hold copies)."""

    index: int
    count: int
    writes: bool


def find_shard(tensor: Tensor) -> ModelShard:
    """Return this rank's shard of the model that has `tensor` as a parameter."""
    if not isinstance(tensor, DTensor):
        return ModelShard(0, 1, is_first_rank())
    mesh = tensor.device_mesh
    return ModelShard(mesh.get_local_rank(-1), mesh.size(-1), mesh.ndim == 1 or mesh.get_local_rank(0) == 0)


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
    held = find_shard(tensor)
    chunk = -(-rows // held.count)
    first = min(held.index * chunk, rows)
    last = min(first + chunk, rows)
    assert last - first == len(tensor.to_local())
    return first, last


def with_local_part(like: Tensor, part: Tensor) -> Tensor:
    """Return the tensor that has `part` on this rank and is sharded as `like`. A number is not sharded."""
    if not isinstance(like, DTensor) or part.dim() == 0:
        return part
    part = part.to(like.device)
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
