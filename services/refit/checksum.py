"""A checksum of a tensor's bytes, at about memory speed on any device. It detects accidents, not forgeries."""

from __future__ import annotations

import functools

import torch

_ROW = 4096
_SLICE_ROWS = 4096  # rows of products held at once on devices without an integer matrix product
_MASK = 2**64 - 1


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum as an int64 scalar on the tensor's device, without waiting for the device. It depends only on the bytes in
    row-major order, not on strides, dtype or device.

    The bytes are read as 64-bit words. Each word is multiplied by its own odd number, and the products are added modulo 2**64. So every
    change of a single word changes the sum; changes of several words, or of their order, keep it only by chance.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words must be aligned
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    if whole < data.numel():
        last = torch.zeros(8, dtype=torch.uint8, device=data.device)
        last[: data.numel() - whole] = data[whole:]
        words = torch.cat([words, last.view(torch.int64)])
    level = 0
    while words.numel() > 1:
        words, level = _row_sums(words, level), level + 1
    return words.sum() + data.numel()


def _row_sums(words: torch.Tensor, level: int) -> torch.Tensor:
    factors = _factors(level, words.device)
    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW), words[whole:]
    on_cpu = words.device.type == "cpu"
    sums = []
    if whole:
        sums = [rows @ factors] if on_cpu else [(part * factors).sum(1) for part in rows.split(_SLICE_ROWS)]
    if rest.numel():
        few = factors[: rest.numel()]
        sums.append((rest.dot(few) if on_cpu else (rest * few).sum())[None])
    return torch.cat(sums) if len(sums) > 1 else sums[0]


@functools.cache
def _factors(level: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers, different on each level: outputs of splitmix64."""
    numbers = []
    for i in range(level * _ROW + 1, (level + 1) * _ROW + 1):
        mixed = i * 0x9E3779B97F4A7C15 & _MASK
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        odd = (mixed ^ mixed >> 31) | 1
        numbers.append(odd - 2**64 if odd >> 63 else odd)
    return torch.tensor(numbers, dtype=torch.int64, device=device)
