"""The ways in which attention over rows of trees is computed agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from headrace_services.trainer.network import attention
from headrace_services.trainer.network.attention import Sequences, by_flash, by_pieces, tree_attention
from headrace_services.trainer.network.packing import Packing, TreeSpan, pack, plan
from tests.integration.trainer.policy_cases import MODES, groups, settings
from tests.support import varlen_kernels

HEADS, GROUPS, DEPTH = 4, 2, 8
Trees = tuple[tuple[TreeSpan, ...], ...]
LONG: tuple[Trees, int, int] = (((TreeSpan(0, 100, (1500, 7)), TreeSpan(1607, 1300, (10,))),), 1, 2920)


def made(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Query, key, value, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, width), (HEADS // GROUPS, width), (HEADS // GROUPS, width), (width, HEADS)]
    whole = [torch.randn(rows, *shape, DEPTH, generator=generator, dtype=dtype).to(device) for shape in shapes]
    return [*(x.requires_grad_() for x in whole[:3]), whole[3]]


def gradients(out: Tensor, trees: Trees, made: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of query, key and value, where there is a tree."""
    *inputs, factor = made
    inside = torch.zeros(out.shape[:2], dtype=torch.bool, device=out.device)
    for r, spans in enumerate(trees):
        inside[r, : spans[-1].start + spans[-1].prompt + sum(spans[-1].completions)] = True
    found = torch.autograd.grad((out * factor)[inside].sum(), inputs)
    return [out[inside].detach(), *(x.transpose(1, 2)[inside] for x in found)]


def micro_batches(mode: str) -> list[tuple[Trees, int, int]]:
    """The trees of each micro-batch's rows, the number of rows, and their width."""
    if mode == "long":
        return [LONG]
    trajectories = groups()
    packing = Packing.of(settings("", MODES[mode]).policy, training=True)
    packed = [pack(trajectories, rows, packing) for rows in plan(trajectories, packing)]
    return [(one.spans, *one.input_ids.shape) for one in packed]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("mode", ["padded", "packed", "shared", "shared-packed", "long"])
def test_flash_attention_is_given_what_the_pieces_are(mode: str, window: int | None) -> None:
    varlen_kernels.register()
    for trees, rows, width in micro_batches(mode):
        tensors = made(rows, width, torch.float64)
        query, key, value, _ = tensors
        keys, values = (x.repeat_interleave(GROUPS, 1) for x in (key, value))
        expected = gradients(by_pieces(query, keys, values, trees, 0.3, window), trees, tensors)
        sequences = Sequences.of(trees, width)
        out = by_flash(query, key, value, sequences, torch.float64, 0.3, window)
        assert out.isfinite().all()
        for ours, theirs in zip(gradients(out, trees, tensors), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention needs a GPU")
@pytest.mark.parametrize("mode", ["packed", "shared-packed"])
def test_flash_attention_of_a_gpu_is_that_of_the_pieces(mode: str) -> None:
    module: Any = SimpleNamespace(num_key_value_groups=GROUPS)
    for trees, rows, width in micro_batches(mode):
        tensors = made(rows, width, torch.bfloat16, "cuda")
        query, key, value, _ = tensors
        sequences = Sequences.of(trees, width).to(query.device)
        found = [
            gradients(tree_attention(module, query, key, value, None, trees=trees, sequences=given)[0], trees, tensors)
            for given in (sequences, None)
        ]
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


class Masks(TorchFunctionMode):
    """The shapes of the masks that SDPA is given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if call is scaled_dot_product_attention and "attn_mask" in options:
            self.shapes.add(tuple(options["attn_mask"].shape))
        return call(*args, **options)


def test_no_mask_is_over_a_whole_row() -> None:
    """One over a long completion and all that it sees neither; a sliding window is never over more keys than it needs."""
    for window, shapes in ((None, {(1024, 1124), (476, 1600), (7, 107)}), (50, {(1024, 1073), (476, 525)})):
        query, key, value, _ = made(1, LONG[2], torch.float32)
        key, value = (x.repeat_interleave(GROUPS, 1) for x in (key, value))
        with torch.no_grad(), Masks() as masks:
            by_pieces(query, key, value, LONG[0], None, window)
        assert masks.shapes >= shapes
        assert max(queries for queries, _ in masks.shapes) == attention.QUERIES
