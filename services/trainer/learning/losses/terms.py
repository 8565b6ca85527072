"""The parts that losses are made of: weighted sums over tokens and sequences, importance weights, and KL divergences.

**Weighted sums.** Every mean in the losses is a weighted sum. A token-level mean has weights `M / T`. A mean of the sequences' means has
weights `m / Σ m · s / N`. Here `m` is the token's mask, `s` its sequence's multiplier and `M = m s`. Sums are computed in float64, so their
order makes no visible difference.

**Importance weights** correct for tokens sampled by a policy other than the one before the update.

    token level        w_t = exp(prev_t - rollout_t)
    sequence level     w   = exp(mean_t(prev_t - rollout_t)), or of the sum: one for all tokens of the sequence

Weights that are not finite become 0, and none carries a gradient. With bounds [low, high] they are then truncated:

    tis                clamp(w, low, high)
    icepop             w where low <= w <= high, else 0
    seq-mask-tis       w_t where low <= exp(mean_t(prev_t - rollout_t)) <= high, else 0 on the whole sequence

Sources: truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"), IcePop
(Zhao et al. 2025, ringtech.notion.site/icepop), sequence masks (Liu et al. 2025, "When Speed Kills Stability"). The mean at the sequence
level is Headrace's own. NeMo RL takes the sum, as `sequence_is_aggregation: sum` does.

**KL divergences** are estimated from log-probabilities of sampled tokens, for the penalty of the loss and for metrics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from headrace.config.loss import LossConfig

from ..batch import GlobalCounts, MicroBatch

# Divides an empty sum. NeMo RL adds it to every count; then the weights of few tokens don't add up to 1, and a variance is wrong.
SMALLEST_COUNT = 1e-8


@dataclasses.dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of an optimizer step.

    `loss` is a scalar with its gradient. `sums`, float64 scalars by metric name, add up over micro-batches and ranks to the metrics of the
    whole. `minima` and `maxima` are combined by min and max; they are inf and -inf where no token counts. `columns` [N], without a
    gradient, are what became of each token, by their names in `Batch`; empty unless asked for. The names depend only on the configuration.
    """

    loss: Tensor
    sums: Mapping[str, Tensor]
    minima: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]
    columns: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


def token_counts(tokens: MicroBatch) -> Tensor:
    """Return M [N] float64: the mask times the sequence's multiplier."""
    return tokens.mask.double() * tokens.multipliers.double()[tokens.trajectory]


def token_weights(tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """Return the weights [N] float64 of a mean over all tokens that count: `M / T`."""
    return token_counts(tokens) / max(counts.tokens, SMALLEST_COUNT)


def token_mean(values: Tensor, tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """Return this micro-batch's share of the mean of `values` [N] over all tokens that count, a float64 scalar."""
    return weighted_sum(values, token_weights(tokens, counts))


def sequence_counts(tokens: MicroBatch) -> Tensor:
    """Return s [B] float64: the multiplier of each sequence, 0 for a sequence without tokens."""
    lengths = sum_by_trajectory(torch.ones_like(tokens.mask), tokens)
    return torch.where(lengths > 0, tokens.multipliers.double(), 0.0)


def sequences_here(tokens: MicroBatch) -> Tensor:
    """Return this micro-batch's share of the multipliers of all sequences, a float64 scalar."""
    counts = sequence_counts(tokens)
    return (counts if tokens.share is None else counts * tokens.share).sum()


def sequence_weights(tokens: MicroBatch, counts: GlobalCounts) -> Tensor:
    """Return the weights [B] float64 of a mean over all sequences: `s / N`."""
    return sequence_counts(tokens) / max(counts.sequences, SMALLEST_COUNT)


def loss_weights(config: LossConfig, tokens: MicroBatch, kept: Tensor, counts: GlobalCounts) -> Tensor:
    """Return the weights [N] float64 of the mean in a term of the loss; 0 on tokens that are not `kept` [N] bool.

    Token level: `M / T` (DAPO, arXiv 2503.14476). Sequence level: `m / Σ m · s / N` (GRPO, arXiv 2402.03300). With a constant length L: `M
    / (N L)` (Dr. GRPO, arXiv 2503.20783). Tokens left out don't count in the sequence's own `Σ m`, but still in `T`. That sum is over the
    whole sequence, including its paths in other micro-batches.
    """
    if config.constant_length is not None:
        weights = token_counts(tokens) / max(counts.sequences * config.constant_length, SMALLEST_COUNT)
    elif config.token_level_loss:
        weights = token_weights(tokens, counts)
    else:
        mask = torch.where(kept, tokens.mask.double(), 0.0)
        own = sum_by_trajectory(mask, tokens)
        whole = own if tokens.elsewhere is None else own + tokens.elsewhere
        per_sequence = sequence_weights(tokens, counts) / whole.clamp(min=SMALLEST_COUNT)
        weights = mask * per_sequence[tokens.trajectory]
    return torch.where(kept, weights, 0.0)


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Return weights · values [N] float64. Values with weight 0 are ignored, even NaN."""
    return torch.where(weights > 0, values.double(), 0.0) * weights


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return Σ weights · values, a float64 scalar, likewise."""
    return weighted(values, weights).sum()


def sum_by_trajectory(values: Tensor, tokens: MicroBatch) -> Tensor:
    """Return [B] float64: the sum of `values` [N] over each sequence."""
    zeros = torch.zeros(tokens.multipliers.shape, dtype=torch.float64, device=values.device)
    return zeros.index_add(0, tokens.trajectory, values.double())


def mean_by_trajectory(values: Tensor, kept: Tensor, tokens: MicroBatch) -> Tensor:
    """Return [B] float64: the mean of `values` [N] over the tokens of each sequence that are `kept` [N] bool; 0 where none is."""
    total = sum_by_trajectory(torch.where(kept, values, 0.0), tokens)
    return total / sum_by_trajectory(kept, tokens).clamp(min=SMALLEST_COUNT)


def extremes(values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of `values` where `valid`, float64; inf and -inf where none is."""
    values = values.double()
    low, high = values.new_full((1,), torch.inf), values.new_full((1,), -torch.inf)
    return torch.cat([values[valid], low]).amin(), torch.cat([values[valid], high]).amax()


# -- importance weights --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights before (`raw`) and after truncation (`truncated`): [N] per token or, with `by_sequence`, [B].

    `outside` (bool) marks the weights out of bounds: [B] with `outside_by_sequence`, else with the shape of `raw`; None without truncation.
    """

    raw: Tensor
    truncated: Tensor
    outside: Tensor | None
    by_sequence: bool
    outside_by_sequence: bool

    def per_token(self, values: Tensor, tokens: MicroBatch) -> Tensor:
        """Spread `raw` or `truncated` over the tokens [N]. The truncated ones are the factors of their policy terms."""
        return values[tokens.trajectory] if self.by_sequence else values


def importance_weights(
    config: LossConfig, prev: Tensor, rollout_logprobs: Tensor, inside: Tensor, tokens: MicroBatch
) -> ImportanceWeights:
    """Compute the importance weights of `prev` [N], which has no gradient, against `rollout_logprobs` [N], before and after truncation.

    Sequence weights are computed over the tokens that are `inside` [N] bool, whether they count in the loss or not.
    """
    difference = prev - rollout_logprobs
    if not config.sequence_level_importance_ratios:
        raw = _finite(difference.exp())
    elif config.sequence_is_aggregation == "sum":
        total = sum_by_trajectory(torch.where(inside, difference, 0.0), tokens)
        raw = _finite(total.to(difference.dtype).exp())
    else:
        raw = _finite(mean_by_trajectory(difference, inside, tokens).to(difference.dtype).exp())
    kind, high = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    by_sequence = config.sequence_level_importance_ratios
    if kind is None or high is None:
        return ImportanceWeights(raw, raw, None, by_sequence, False)
    low = config.truncated_importance_sampling_ratio_min or 0.0
    if kind == "seq-mask-tis":
        geometric_mean = mean_by_trajectory(_finite(difference), inside, tokens).exp()
        outside = ~((geometric_mean >= low) & (geometric_mean <= high))
        return ImportanceWeights(raw, torch.where(outside[tokens.trajectory], 0.0, raw), outside, by_sequence, True)
    outside = (raw < low) | (raw > high)
    truncated = raw.clamp(low, high) if kind == "tis" else torch.where(outside, 0.0, raw)
    return ImportanceWeights(raw, truncated, outside, by_sequence, False)


def importance_metrics(
    weights: ImportanceWeights, per_token: Tensor, tokens: MicroBatch, counts: GlobalCounts
) -> dict[str, Tensor]:
    """Return means of the importance weights before and after truncation, and the share that is out of bounds.

    Means over tokens are weighted by `per_token` [N]. Means over sequences weight every sequence with a token equally. The share out of
    bounds is of tokens, or of sequences with seq-mask-tis.
    """
    per_sequence = sequence_weights(tokens, counts)
    unit = per_sequence if weights.by_sequence else per_token
    metrics = {"sampling_importance_ratio": weighted_sum(weights.raw, unit)}
    if weights.outside is not None:
        metrics["sampling_importance_ratio_truncated"] = weighted_sum(weights.truncated, unit)
        if weights.outside_by_sequence:
            metrics["is_oob_ratio"] = weighted_sum(weights.outside, per_sequence)
        else:
            outside = weights.outside[tokens.trajectory] if weights.by_sequence else weights.outside
            metrics["is_oob_ratio"] = weighted_sum(outside, per_token)
    return metrics


def _finite(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


# -- KL divergences ------------------------------------------------------------------------------------------------------


def kl_estimate(kind: Literal["k1", "k2", "k3"], difference: Tensor) -> Tensor:
    """Estimate KL(p || q) from a token sampled from p, with `difference` d = log q - log p: `-d`, `d² / 2` or `exp(d) - 1 - d`.

    Schulman, "Approximating KL Divergence", 2020.
    """
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def reference_kl(config: LossConfig, logprobs: Tensor, ref_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return the per-token penalty [N] that holds the policy near the reference policy. The gradient is that of `logprobs`.

        d  = clamp(ref - logprobs, ± kl_input_clamp_value)       k = k1, k2 or k3 of d
        u  = exp(logprobs - sg(logprobs)), or exp(logprobs - rollout) with use_on_policy_kl_approximation; 0 if not finite
        kl = clamp(u k, ± kl_output_clamp_value)

    `u` carries the score-function gradient of the sampled KL (arXiv 2506.09477). Without it the gradient of k is not that of the KL. It
    carries no gradient where the input clamp is active. GRPO's paper and TRL omit it, so results agree with theirs only at KL 0.
    """
    raw = ref_logprobs - logprobs
    bound, limit = config.kl_input_clamp_value, config.kl_output_clamp_value
    difference = raw if bound is None else raw.clamp(-bound, bound)
    weight = _finite_exp(logprobs - (rollout_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()))
    value = (weight * kl_estimate(config.reference_policy_kl_type, difference)).detach()
    # clamped values are constant; they are replaced before the exponential, whose derivative may be infinite: 0 · inf is NaN
    zero = (weight == 0) & ~raw.isnan()
    value = torch.where(zero, 0.0, value)
    constant = zero if bound is None else zero | (raw.abs() > bound)
    if limit is not None:
        constant = constant | (value.abs() > limit)
        value = value.clamp(-limit, limit)
    kl = weight * kl_estimate(config.reference_policy_kl_type, torch.where(constant, 0.0, difference))
    return torch.where(constant, value, kl)


def divergences(
    config: LossConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    """Compare the trainer's log-probabilities with the behaviour policy's on the same tokens: metrics [N] float64 without a gradient.

    token_mult_prob_error   exp(|rollout - old| M), `M` being `counted`; below 1.05 on average is healthy
    gen_kl_error            KL(behaviour policy || trainer), estimated by reference_policy_kl_type
    policy_kl_error         KL(trainer || behaviour policy), likewise
    js_divergence_error     k3(old - mid) / 2 + k3(rollout - mid) / 2 with mid = log(exp(old) / 2 + exp(rollout) / 2)
    """
    old, rollout = old_logprobs.detach().double(), rollout_logprobs.detach().double()
    kind = config.reference_policy_kl_type
    middle = torch.logaddexp(old, rollout) - math.log(2.0)
    return {
        "token_mult_prob_error": torch.exp((rollout - old).abs() * counted),
        "gen_kl_error": kl_estimate(kind, old - rollout),
        "policy_kl_error": kl_estimate(kind, rollout - old),
        "js_divergence_error": (kl_estimate("k3", old - middle) + kl_estimate("k3", rollout - middle)) / 2,
    }


def _finite_exp(exponent: Tensor) -> Tensor:
    """Return exp of `exponent`, but 0 with a gradient of 0 where that is not finite."""
    finite = exponent.exp().isfinite()
    return torch.where(finite, torch.where(finite, exponent, 0.0).exp(), 0.0)
