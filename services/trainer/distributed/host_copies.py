"""Copies tensors between a device and host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

# The size of each of the two pinned pieces.
PINNED_BYTES = 512 * 2**20


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
