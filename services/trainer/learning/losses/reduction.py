"""Reductions over tokens and sequences. Sums are computed in float64, so that their order makes no visible difference.

Every mean in the losses is a weighted sum: a token-level mean has weights `M / T`, a mean of the sequences' means has weights
`m / Σ m · s / N`, where `m` is the token's mask, `s` its sequence's multiplier and `M = m s`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.config.loss import LossConfig
from headrace_services.trainer.learning.batch import GlobalCounts, MicroBatch

EPSILON = 1e-8  # avoids division by zero for empty sums, as in NeMo RL


@dataclasses.dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of an optimizer step.

    `loss` is a scalar with its gradient. `sums`, scalars float64 by metric name, add up over micro-batches and ranks to the
    metrics of the whole; `minima` and `maxima` are combined by min and max, and hold inf and -inf where no token counts.
    Which names there are is decided by the configuration alone.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def token_counts(tokens: MicroBatch) -> Tensor:
    """M [N] float64: the mask times the multiplier of the sequence."""
    return tokens.mask.double() * tokens.multipliers.double()[tokens.trajectory]


def token_weights(tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """The weights [N] float64 of a mean over all tokens that count: `M / T`."""
    return token_counts(tokens) / (counts.tokens + EPSILON)


def token_mean(values: Tensor, tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """A float64 scalar: this micro-batch's share of the mean of `values` [N] over all tokens that count."""
    return weighted_sum(values, token_weights(tokens, counts))


def sequence_counts(tokens: MicroBatch) -> Tensor:
    """s [B] float64: the multiplier of each sequence, 0 for one without tokens."""
    lengths = sum_by_trajectory(torch.ones_like(tokens.mask), tokens)
    return torch.where(lengths > 0, tokens.multipliers.double(), 0.0)


def sequences_here(tokens: MicroBatch) -> Tensor:
    """A float64 scalar: this micro-batch's share of the multipliers of all sequences."""
    counts = sequence_counts(tokens)
    return (counts if tokens.share is None else counts * tokens.share).sum()


def sequence_weights(tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """The weights [B] float64 of a mean over all sequences: `s / N`."""
    return sequence_counts(tokens) / (counts.sequences + EPSILON)


def loss_weights(config: LossConfig, tokens: MicroBatch, kept: Tensor, counts: GlobalCounts) -> Tensor:
    """The weights [N] float64 of the mean in a term of the loss; 0 on tokens that are not `kept` [N] bool.

    Token level: `M / T` (DAPO, arXiv 2503.14476). Sequence level: `m / Σ m · s / N` (GRPO, arXiv 2402.03300). With a
    constant length L: `M / (N L)` (Dr. GRPO, arXiv 2503.20783). Tokens left out don't count in the sequence's own `Σ m`, but still in `T`.
    That sum is over the whole sequence, also over what of it is in other micro-batches.
    """
    if config.constant_length is not None:
        weights = token_counts(tokens) / (counts.sequences * config.constant_length + EPSILON)
    elif config.token_level_loss:
        weights = token_weights(tokens, counts)
    else:
        mask = torch.where(kept, tokens.mask.double(), 0.0)
        own = sum_by_trajectory(mask, tokens)
        whole = own if tokens.elsewhere is None else own + tokens.elsewhere
        per_sequence = sequence_weights(tokens, counts) / (whole + EPSILON)
        weights = mask * per_sequence[tokens.trajectory]
    return torch.where(kept, weights, 0.0)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · values, a float64 scalar; values with weight 0 are ignored, even NaN."""
    return (torch.where(weights > 0, values.double(), 0.0) * weights).sum()


def sum_by_trajectory(values: Tensor, tokens: MicroBatch) -> Tensor:
    """[B] float64: the sum of `values` [N] over each sequence."""
    zeros = torch.zeros(tokens.multipliers.shape, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, tokens.trajectory, values.double())


def mean_by_trajectory(values: Tensor, kept: Tensor, tokens: MicroBatch) -> Tensor:
    """[B] float64: the mean of `values` [N] over those tokens of each sequence that are `kept` [N] bool; 0 where none is."""
    total = sum_by_trajectory(torch.where(kept, values, 0.0), tokens)
    return total / (sum_by_trajectory(kept, tokens) + EPSILON)


def extremes(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of `values` where `valid`, float64; inf and -inf where none is."""
    values = values.detach().double()
    low, high = values.new_full((1,), torch.inf), values.new_full((1,), -torch.inf)
    return torch.cat([values[valid], low]).amin(), torch.cat([values[valid], high]).amax()
