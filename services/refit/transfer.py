"""How weights go through a channel, or a file: in buckets, each tensor with a checksum.

The buckets of a transfer alternate between two buffers: while one travels, the sender fills the other, and a receiver loads the previous
one. On a GPU they travel on their own stream, so that the three overlap there too, and nothing goes through the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from headrace.base.errors import WeightChannelError

from .channel import Channel
from .checksum import checksum
from .manifest import Bucket, Manifest


class ReceivedTensor(NamedTuple):
    """A tensor that was received. A second thread computes its checksum while the first one loads, so the checksum is ready when the next
    bucket is requested."""

    name: str
    tensor: torch.Tensor
    checksum: torch.Tensor


def send(channel: Channel, manifest: Manifest, source: Iterable[tuple[str, torch.Tensor]], deadline: float) -> None:
    """Broadcast `source` as rank 0, bucket by bucket, and then the checksums. The items of `source` must be the manifest's, in its order.

    A tensor is cast to the type that the manifest announces if both are floating point. `source` is always consumed to its end. Raises
    `WeightChannelError`, and `ValueError` if `source` does not yield what the manifest announces.
    """
    channel.begin_transfer()
    with _consuming(source) as stream, channel.closing_on_failure():
        checksums: list[torch.Tensor] = []
        travelling: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        plan = manifest.buckets()
        for bucket, flat in zip(plan, channel.buffers([bucket.nbytes for bucket in plan]), strict=True):
            with travelling:
                _fill(flat, bucket, stream, lambda part: checksums.append(checksum(part)))
            travelling = channel.broadcasting(flat, deadline)
        with travelling:
            sums = torch.stack(checksums)
        channel.broadcast(sums, deadline)


def copy(
    manifest: Manifest, source: Iterable[tuple[str, torch.Tensor]]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the bytes of each bucket of `source`, in host memory, and its tensors, which are parts of these. Raises as `send`."""
    flats: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    with _consuming(source) as stream:
        for bucket in manifest.buckets():
            flats.append(torch.empty(bucket.nbytes, dtype=torch.uint8))
            _fill(flats[-1], bucket, stream, tensors.append)
    return flats, tensors


def read(file: str, manifest: Manifest, checksums: Sequence[int]) -> Iterator[list[ReceivedTensor]]:
    """Yield the manifest's tensors from a file that has their bytes one after the other, a bucket at a time. Raises `WeightChannelError`,
    at the end also if a tensor has another checksum."""
    mine: list[torch.Tensor] = []
    with open(file, "rb") as opened:
        for bucket in manifest.buckets():
            flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
            if opened.readinto(flat.numpy().data) != bucket.nbytes:
                raise WeightChannelError(f"{file} ends within the weights")
            values = flat.view(getattr(torch, bucket.dtype)).split([spec.numel for spec in bucket.tensors])
            sums = [checksum(value) for value in values]
            mine += sums
            yield [
                ReceivedTensor(spec.name, value.view(spec.shape), known)
                for spec, value, known in zip(bucket.tensors, values, sums, strict=True)
            ]
    _compare(manifest, [one == other for one, other in zip(torch.stack(mine).tolist(), checksums, strict=True)])


def _compare(manifest: Manifest, same: Sequence[bool]) -> None:
    if torn := [name for name, is_same in zip(manifest.names, same, strict=True) if not is_same]:
        raise WeightChannelError(
            f"{len(torn)} tensors arrived with bytes that differ from those sent, the first is {torn[0]}"
        )


@contextlib.contextmanager
def _consuming(source: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Go through `source` to its end, even after a failure in the context: producing a tensor may be a collective of the trainer's ranks,
    and a rank that stopped half-way would leave the others waiting. Raises `ValueError` if the context has left tensors."""
    stream = iter(source)
    try:
        yield stream
    finally:
        surplus = sum(1 for _ in stream)
    if surplus:
        raise ValueError(f"the source yielded {surplus} tensors more than the manifest announces")


def _fill(
    flat: torch.Tensor,
    bucket: Bucket,
    stream: Iterator[tuple[str, torch.Tensor]],
    note: Callable[[torch.Tensor], object],
) -> None:
    """Write the bucket's tensors, which are next in `stream`, and call `note` with each as it was written."""
    offset = 0
    for spec in bucket.tensors:
        name, tensor = next(stream, ("the end", torch.empty(0)))
        found = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        part = flat[offset : offset + spec.nbytes].view(getattr(torch, spec.dtype))
        castable = part.is_floating_point() and tensor.is_floating_point()
        if found != (spec.name, found[1] if castable else spec.dtype, spec.shape):
            raise ValueError(f"the manifest announces {spec}, the source yielded {found}")
        # a copy between devices that also casts would cast on the host, in memory that isn't pinned
        if tensor.device != part.device:
            tensor = tensor.to(part.dtype)
        part.copy_(tensor.detach().reshape(-1))
        note(part)
        offset += spec.nbytes


def receive(channel: Channel, manifest: Manifest, deadline: float) -> Iterator[list[ReceivedTensor]]:
    """Yield the manifest's tensors on a rank above 0, a bucket at a time, while the next bucket travels. A bucket's memory is reused as
    soon as the next one is requested.

    Raises `WeightChannelError`, at the end also if a tensor differs from the one that was sent.
    """
    device = channel.membership.device
    channel.begin_transfer()
    plan = manifest.buckets()
    mine, theirs = (torch.empty(len(manifest.names), dtype=torch.int64, device=device) for _ in range(2))
    flats = channel.buffers([bucket.nbytes for bucket in plan])
    places = mine.split([len(bucket.tensors) for bucket in plan])
    channel.broadcast(flats[0], deadline)
    channel.report_received(1)
    with ThreadPoolExecutor(1, "weight-channel-sums") as beside:
        coming_next = enumerate([*flats[1:], theirs], start=2)
        for bucket, flat, sums, (number, coming) in zip(plan, flats, places, coming_next, strict=True):
            with channel.broadcasting(coming, deadline):
                values = flat.view(getattr(torch, bucket.dtype)).split([spec.numel for spec in bucket.tensors])
                summed = beside.submit(_sum, values, sums, torch.cuda.current_stream(device) if flat.is_cuda else None)
                yield [
                    ReceivedTensor(spec.name, value.view(spec.shape), known)
                    for spec, value, known in zip(bucket.tensors, values, sums, strict=True)
                ]
                summed.result()
            channel.report_received(number)
    _compare(manifest, (mine == theirs).tolist())


def _sum(tensors: Sequence[torch.Tensor], sums: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    """Write the tensors' checksums, on `stream` if they are on a GPU."""
    with torch.cuda.stream(stream):
        for tensor, place in zip(tensors, sums, strict=True):
            place.copy_(checksum(tensor))
