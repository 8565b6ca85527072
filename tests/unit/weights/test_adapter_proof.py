"""The proof that an engine keeps the adapter that arrived, and nothing besides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.base.errors import WeightChannelError
from headrace_services.refit.checksum import checksum
from headrace_services.refit.proof import AdapterProof

A, B = torch.arange(1.0, 13.0).view(3, 4), torch.arange(1.0, 16.0).view(5, 3)
Stacked = dict[str, torch.Tensor]


def put(stacked: Stacked) -> None:
    """As vLLM does: into the beginning of tensors that have room for a higher rank."""
    for name, tensor in (("a", A), ("b", B)):
        stacked[name][0] = 0
        stacked[name][0, 0, : tensor.shape[0], : tensor.shape[1]].copy_(tensor)


def check(load: Callable[[Stacked], None]) -> None:
    stacked = {"a": torch.full((1, 1, 8, 4), 7.0), "b": torch.full((1, 1, 5, 8), 7.0)}
    proof = AdapterProof(stacked, {name: (tensor, checksum(tensor)) for name, tensor in (("A", A), ("B", B))})
    with proof:
        load(stacked)
    proof.check()


def test_what_arrived_is_kept_and_zeros_besides() -> None:
    check(put)


def lose_one(stacked: Stacked) -> None:
    stacked["a"][0, 0, :3, :4].copy_(A)


def change_one_bit(stacked: Stacked) -> None:
    put(stacked)
    stacked["b"][0, 0, 4, 2] += 1e-6


def keep_the_rest(stacked: Stacked) -> None:
    stacked["a"][0, 0, :3, :4].copy_(A)
    stacked["b"][0, 0, :5, :3].copy_(B)


def load_another(stacked: Stacked) -> None:
    put(stacked)
    stacked["a"][0, 0, :3, :4].copy_(A + 1)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (lose_one, "has no place for 1 tensors of the adapter, the first is B"),
        (change_one_bit, "differs from what was received, the first difference is in B"),
        (load_another, "differs from what was received, the first difference is in A"),
        (keep_the_rest, "has nonzero numbers in a that were not received"),
    ],
)
def test_anything_else_is_an_error_that_names_it(load: Callable[[Stacked], None], says: str) -> None:
    with pytest.raises(WeightChannelError, match=says):
        check(load)
