"""What a rank trains on: samples, what is wrong with one, and how a batch is split over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from headrace.trajectory import Float32, Int32, Span, UInt8
from services.trainer.rows import TokenSequence


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
    def tokens(self) -> TokenSequence:
        """As rows take it: the tokens that count are those of the policy."""
        return TokenSequence(self.prompt_token_ids, self.completion_token_ids, self.loss_mask)

    @property
    def weight(self) -> float:
        """Sum of the token weights M: what the sample adds to T."""
        return float(self.loss_mask.sum()) * self.loss_multiplier


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


def split_across_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: counts differ by at most one, lengths are dealt longest first, back and forth."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i])):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(index)
    return [sorted(share) for share in shares]
