"""Micro-batches: samples sorted by length, padded on the right, with only the tokens that count picked out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.trajectory import Float32, Int32, Span, UInt8


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory as the learner sees it.

    Shapes: `prompt_token_ids` [S ≥ 1] int32; `completion_token_ids`, `behaviour_logprobs` (float32) and `loss_mask` (uint8,
    0 on tokens the environment wrote) [T ≥ 1]. `loss_multiplier` weighs the sample; 0 leaves it out of the loss.
    """

    prompt_token_ids: Int32
    completion_token_ids: Int32
    behaviour_logprobs: Float32
    loss_mask: UInt8
    advantage: float
    loss_multiplier: float

    @property
    def length(self) -> int:
        return self.prompt_token_ids.size + self.completion_token_ids.size

    @property
    def weight(self) -> float:
        """Sum of the token weights M: what the sample adds to T."""
        return float(self.loss_mask.sum()) * self.loss_multiplier


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """B padded rows and the N tokens of them that count.

    `input_ids` [B, S] int64, padded on the right: under a causal mask no token sees the padding, so it needs no mask of its
    own. Per counted token, [N]: `positions` int64, where in the flattened [B * S] its logits lie (one place before the
    token); `targets` int64; `gen`, `advantages` and `mask` (loss mask times loss multiplier) float32.
    """

    input_ids: Tensor
    positions: Tensor
    targets: Tensor
    gen: Tensor
    advantages: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})


def mask_old_tokens(loss_mask: UInt8, spans: Sequence[Span], oldest: int) -> UInt8:
    """`loss_mask` [T] with 0 on tokens of weights older than version `oldest`: they leave the policy loss and its token count."""
    old = [span for span in spans if span.version < oldest]
    if not old:
        return loss_mask
    young = loss_mask.copy()
    for span in old:
        young[span.start : span.end] = 0
    return young


def problem_with(sample: Sample) -> str | None:
    """Why the sample can't be trained on, or None."""
    length = sample.completion_token_ids.size
    if sample.prompt_token_ids.size == 0 or length == 0:
        return (
            f"a prompt of {sample.prompt_token_ids.size} and a completion of {length} tokens; each needs at least one"
        )
    for name in ("behaviour_logprobs", "loss_mask"):
        if getattr(sample, name).size != length:
            return f"{name} has {getattr(sample, name).size} entries for {length} completion tokens"
    if not np.isfinite(sample.behaviour_logprobs).all():
        return "a behaviour log-probability is not finite"
    if not np.isfinite(sample.advantage):
        return f"its advantage is {sample.advantage}"
    if not (np.isfinite(sample.loss_multiplier) and sample.loss_multiplier >= 0):
        return f"its loss multiplier is {sample.loss_multiplier}"
    return None


def micro_batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """Samples that have a token that counts, longest first, at most `size` together: little padding, memory's peak at once."""
    counted = sorted((s for s in samples if s.weight > 0), key=lambda s: s.length, reverse=True)
    return [counted[i : i + size] for i in range(0, len(counted), size)]


def pad(samples: Sequence[Sample]) -> MicroBatch:
    """One micro-batch. No samples make a batch of one padding token that counts nothing, for a rank that only keeps pace."""
    width = max((s.length for s in samples), default=1)
    input_ids = np.zeros((max(len(samples), 1), width), dtype=np.int64)
    positions, targets, gen, advantages, mask = [], [], [], [], []
    for row, sample in enumerate(samples):
        prompt = sample.prompt_token_ids.size
        input_ids[row, :prompt] = sample.prompt_token_ids
        input_ids[row, prompt : sample.length] = sample.completion_token_ids
        counted = np.flatnonzero(sample.loss_mask)
        positions.append(row * width + prompt - 1 + counted)
        targets.append(sample.completion_token_ids[counted])
        gen.append(sample.behaviour_logprobs[counted])
        advantages.append(np.full(counted.size, sample.advantage))
        mask.append(np.full(counted.size, sample.loss_multiplier))
    return MicroBatch(
        torch.from_numpy(input_ids),
        _flat(positions, np.int64),
        _flat(targets, np.int64),
        _flat(gen, np.float32),
        _flat(advantages, np.float32),
        _flat(mask, np.float32),
    )


def probe_batch(token_ids: Int32) -> MicroBatch:
    """The batch that asks for the log-probability of every token but the first."""
    first, rest = token_ids[:1], token_ids[1:]
    ones = np.ones(rest.size, dtype=np.uint8)
    return pad([Sample(first, rest, np.zeros(rest.size, dtype=np.float32), ones, 0.0, 1.0)])


def split_across_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: counts differ by at most one, lengths are dealt longest first, back and forth."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return [sorted(share) for share in shares]


def _flat(parts: list[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *parts]).astype(dtype))
