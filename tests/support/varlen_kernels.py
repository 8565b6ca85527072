"""CPU kernels of torch's variable-length attention, which has some for GPUs alone: slow, and written from its documentation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import varlen


def register() -> None:
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, scale: float, window: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Queries [T, H, D], keys and values [K, H, D] and probabilities [H, T, K] of each sequence, whose last query is at its last key."""
    left, right = (reach if reach >= 0 else len(key) for reach in window)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    own_queries = query.tensor_split(queries[1:-1].tolist())
    own_keys, own_values = (x.tensor_split(keys[1:-1].tolist()) for x in (key, value))
    for q, k, v in zip(own_queries, own_keys, own_values, strict=True):
        distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        yield q, k, v, scores.masked_fill((distance > left) | (distance < -right), -torch.inf).softmax(-1)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    assert longest_queries == queries.diff().max()
    assert longest_keys == keys.diff().max()
    assert window_size is not None
    assert is_causal == (window_size == [-1, 0])
    scale = scale or 1 / math.sqrt(query.shape[2])
    own = _sequences(query, key, value, queries, keys, scale, window_size)
    out = torch.cat([torch.einsum("hqk,khd->qhd", shares, v) for _, _, v, shares in own])
    return out, query.new_zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_queries: int,
    longest_keys: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size is not None
    scale = scale or 1 / math.sqrt(query.shape[2])
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    own = _sequences(query, key, value, queries, keys, scale, window_size)
    for (q, k, v, shares), dout in zip(own, grad.tensor_split(queries[1:-1].tolist()), strict=True):
        of_shares = torch.einsum("qhd,khd->hqk", dout, v)
        scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        parts[0].append(torch.einsum("hqk,khd->qhd", scores, k))
        parts[1].append(torch.einsum("hqk,qhd->khd", scores, q))
        parts[2].append(torch.einsum("hqk,qhd->khd", shares, dout))
    of_query, of_key, of_value = map(torch.cat, parts)
    groups = (key.shape[1], -1)
    return of_query, of_key.unflatten(1, groups).sum(2), of_value.unflatten(1, groups).sum(2)
