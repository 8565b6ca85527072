"""Copies of weights and moments in host memory, through pieces of bounded size."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace_services.trainer.distributed.host_copies import HostCopier, host_copies

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    found = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    return found.transpose(0, -1) if shape and draw(st.booleans()) else found


@given(sources=st.lists(tensors(), max_size=8), nbytes=st.integers(1, 64))
def test_tensors_arrive_whole_through_pieces_of_any_size(sources: list[Tensor], nbytes: int) -> None:
    copier = HostCopier(nbytes, pin=False)
    targets = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        copier.copy(source, target)
    copier.finish()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_copies_do_not_follow_their_source() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    produced = []

    def produce() -> list[tuple[str, Tensor]]:
        produced.append("w")
        return [("w", weight)]

    copies = host_copies(produce())
    with torch.no_grad():
        weight.zero_()
    assert copies["w"].tolist() == [1, 1, 1]
    assert host_copies((pair for pair in produce()), keep=False) == {}
    assert produced == ["w", "w"]
