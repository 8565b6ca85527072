"""The policy's loss and its metrics.

    loss = red(w l) + beta red(kl) + mu nll

with, per token, `l` the clipped policy term, `w` the importance weight or 1, `kl` the penalty, and `red` the mean over tokens or sequences
(all three in `terms`); and `nll = Σ M [reward > 0] (-logprobs) / Σ M [reward > 0]` (VAPO, arXiv 2504.05118), with the global
count. NeMo RL divides by the micro-batch's own count, so its loss depends on the split.

The policy term is a token's advantage times a clipped ratio of probabilities. It has one of four forms (`LossConfig.policy_term`). With
`logprobs` the policy's current log-probability:

    ClippedRatio     r = exp(logprobs - prev)    r_c = clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max)
                     l = max(-A r, -A r_c)       dual clip: min(l, -A c) where A < 0
    ClippedWeight    l = -A sg(r_c) logprobs
    OnPolicyRatio    r = r_c = exp(logprobs - sg(logprobs)), which is 1 with the gradient of logprobs
    NoRatio          r = r_c = logprobs

The last two have no clip and no dual clip: `l` is always below `-A c`. The denominator `prev` of the ratio:

    prev_logprobs_source    prev: the trainer's at the start of the step (old), or the behaviour policy's (rollout)
    proximal: recompute     prev = old, and w = exp(prev - rollout) (decoupled PPO, AReaL, arXiv 2505.24298)
    proximal: interpolate   prev = rollout + (sg(logprobs) - rollout) b / (b + 1), for a token sampled b versions before the step

Sources: PPO (arXiv 1707.06347), the two bounds of the clip (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729), ratios of
sequences (GSPO, arXiv 2507.18071), CISPO (MiniMax-M1, arXiv 2506.13585), without a ratio (RLOO, arXiv 2402.14740).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.config.loss import ClippedRatio, ClippedWeight, LossConfig, NoRatio, OnPolicyRatio, PolicyTerm
from headrace.run.samples import Clipped, MaskReason

from ...network.policy_model import PolicyOutput
from ..batch import GlobalCounts, MicroBatch
from .terms import (
    SMALLEST_COUNT,
    ImportanceWeights,
    LossParts,
    divergences,
    extremes,
    importance_metrics,
    importance_weights,
    loss_weights,
    mean_by_trajectory,
    reference_kl,
    sequences_here,
    token_counts,
    token_mean,
    token_weights,
    weighted,
    weighted_sum,
)


def policy_loss(
    config: LossConfig, output: PolicyOutput, tokens: MicroBatch, counts: GlobalCounts, *, columns: bool = False
) -> LossParts:
    """Compute the loss of a micro-batch and its metrics, as shares of those of the mini-batch with these `counts`; and with `columns`, what
    became of each token. The `token_losses` among them add up to the loss.

    `output` is the policy's current output for the N tokens in `tokens`, its log-probabilities with a gradient. If `tokens` has no
    `old_logprobs`, this is the only optimizer step of the trainer step, and the two are equal.

    Metrics are means over tokens with weight M, with these exceptions. `sampling_importance_ratio` and `_truncated` are over sequences with
    `sequence_level_importance_ratios`. `is_oob_ratio` is over sequences with seq-mask-tis. `kl_penalty` is reduced as the loss is.
    `num_valid_samples` is a count. `kl_penalty` and `positive_nll_loss` are 0 if the loss has no such term. `entropy` exists if `output`
    has it, and includes tokens that top-k or top-p leaves out.

    With `output.unfiltered`, a token whose log-probability is -inf now, in `prev` or at the start of the step was left out by top-k or
    top-p. It has no policy term and enters no sequence ratio and no metric, but it still counts in T and keeps its KL term. NaN in a
    log-probability that a token's terms use makes the loss NaN, even if the token's importance weight is 0.

    Raises `ValueError` for a KL term without log-probabilities of a reference policy.
    """
    old_logprobs = output.logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    prev = tokens.rollout_logprobs if config.prev_logprobs_source == "generation" else old_logprobs

    # The tokens that count, and those `inside` a sequence: values over a whole sequence use all tokens that the filter keeps.
    weight = token_counts(tokens)
    kept = torch.ones_like(weight, dtype=torch.bool)
    if output.unfiltered is not None:
        for values in (output.logprobs, prev, old_logprobs):
            kept = kept & ~values.detach().isneginf()
    counted = kept & (weight > 0)
    whole = config.sequence_level_importance_ratios or config.truncated_importance_sampling_type == "seq-mask-tis"
    inside = kept if whole else counted
    logprobs, prev, old, rollout = (
        torch.where(inside, values, 0.0) for values in (output.logprobs, prev, old_logprobs, tokens.rollout_logprobs)
    )
    advantages = torch.where(counted, tokens.advantages, 0.0)

    # The denominator of the ratio, and the importance weights.
    term = config.policy_term
    if isinstance(term, OnPolicyRatio):
        prev = logprobs.detach()
    elif config.proximal == "interpolate":
        prev = rollout + (logprobs.detach() - rollout) * (tokens.ages / (tokens.ages + 1))
    weights = importance_weights(config, prev if config.weighs_by_importance else old, rollout, inside, tokens)
    applied = weights.per_token(weights.truncated, tokens) if config.weighs_by_importance else torch.ones_like(rollout)

    # The policy term.
    dropped = torch.zeros_like(counted)
    if config.probability_difference_mask is not None:
        dropped = outside_probability_band(config.probability_difference_mask, logprobs, rollout, advantages)
    log_ratio = logprobs - prev
    if isinstance(term, ClippedRatio) and term.of_sequences:
        log_ratio = mean_by_trajectory(log_ratio, inside, tokens).to(log_ratio.dtype)[tokens.trajectory]
    # a non-finite weight becomes 0, but must not hide a non-finite log-probability
    live = counted & ~dropped & ((applied != 0) | log_ratio.isnan())
    terms = surrogate(term, logprobs, log_ratio, advantages, live)
    policy = weighted(applied * terms.loss, loss_weights(config, tokens, kept, counts))

    # The penalty for leaving the reference policy, and the likelihood of completions with a positive reward.
    penalty = nll = torch.zeros((1,), dtype=torch.float64, device=logprobs.device)
    if config.kl_in_loss:
        if tokens.ref_logprobs is None:
            raise ValueError(
                f"loss_fn.reference_policy_kl_penalty {config.reference_policy_kl_penalty} without log-probabilities of a "
                "reference policy"
            )
        unfiltered = output.logprobs if output.unfiltered is None else output.unfiltered
        compared = (unfiltered, tokens.ref_logprobs, tokens.rollout_logprobs)
        kl = reference_kl(config, *(torch.where(weight > 0, values, 0.0) for values in compared))
        penalty = weighted(kl, loss_weights(config, tokens, torch.ones_like(counted), counts))
    if config.positive_example_nll_weight != 0:
        positive = counted & (tokens.rewards > 0)[tokens.trajectory]
        nll = weighted(-logprobs, torch.where(positive, weight, 0.0) / max(counts.positive_tokens, SMALLEST_COUNT))
    beta, mu = config.reference_policy_kl_penalty, config.positive_example_nll_weight
    loss = policy.sum() + beta * penalty.sum() + mu * nll.sum()

    with torch.no_grad():
        means = {
            **divergences(config, old, rollout, weight),
            # E over the behaviour policy of -(p / p_rollout) log p
            "approx_entropy": -torch.exp(logprobs.double() - rollout.double()) * logprobs.double(),
            "probs_ratio": terms.ratio,
            "probs_ratio_clamped": terms.clamped,
            "clip_fraction_low": terms.low,
            "clip_fraction_high": terms.high,
        }
        if config.probability_difference_mask is not None:
            means["probability_difference_masked"] = dropped
        per_token = torch.where(kept, token_weights(tokens, counts), 0.0)
        sums = {
            **{name: weighted_sum(values, per_token) for name, values in means.items()},
            **importance_metrics(weights, per_token, tokens, counts),
            "loss": loss.detach(),
            "kl_penalty": penalty.detach().sum(),
            "positive_nll_loss": nll.detach().sum(),
            "num_valid_samples": sequences_here(tokens),
        }
        if output.entropy is not None:
            sums["entropy"] = token_mean(output.entropy, tokens, counts)
        low, high = extremes(terms.ratio, counted)
        low_clamped, high_clamped = extremes(terms.clamped, counted)
        found: dict[str, Tensor] = {}
        if columns:
            if not isinstance(term, NoRatio):
                found["ratios"] = terms.ratio
            if term.clip is not None:
                found["clipped"] = terms.clipped
            if config.weighs_by_importance:
                found["importance_weights"] = applied
                if weights.outside is not None:
                    found["raw_importance_weights"] = weights.per_token(weights.raw, tokens)
            found = {name: torch.where(counted, values.double(), torch.nan) for name, values in found.items()}
            found["token_losses"] = policy.detach() + beta * penalty.detach() + mu * nll.detach()
            found["mask_reasons"] = _mask_reasons(tokens, kept, weights, applied, dropped)
            if output.entropy is not None:
                found["entropies"] = output.entropy
    return LossParts(
        loss,
        sums,
        minima={"probs_ratio_min": low, "probs_ratio_clamped_min": low_clamped},
        maxima={"probs_ratio_max": high, "probs_ratio_clamped_max": high_clamped},
        columns=found,
    )


def _mask_reasons(
    tokens: MicroBatch, kept: Tensor, weights: ImportanceWeights, applied: Tensor, dropped: Tensor
) -> Tensor:
    """Return the `MaskReason` [N] int64 of tokens whose trajectory counts: of several, the lowest."""
    outside = torch.zeros_like(kept)
    if weights.outside is not None and weights.outside_by_sequence:
        outside = weights.outside[tokens.trajectory]
    found = {
        MaskReason.OVER_AGE: tokens.mask == 0,
        MaskReason.SAMPLING_FILTER: ~kept,
        MaskReason.SEQUENCE_MASK: outside,
        MaskReason.IMPORTANCE_WEIGHT: applied == 0,
        MaskReason.PROBABILITY_DIFFERENCE: dropped,
    }
    reasons = torch.zeros_like(tokens.trajectory)
    for reason in sorted(found, reverse=True):
        reasons = torch.where(found[reason], int(reason), reasons)
    return reasons


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """Per token [N]: the policy term `loss` with its gradient; and without a gradient, `ratio` r, `clamped` r_c, and whether the lower
    bound (`low`), the upper bound (`high`) or that of the dual clip (`dual`) cut the term."""

    loss: Tensor
    ratio: Tensor
    clamped: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor

    @property
    def clipped(self) -> Tensor:
        """[N] int64: which bound, as `Clipped`."""
        bounds = ((self.low, Clipped.LOW), (self.high, Clipped.HIGH), (self.dual, Clipped.DUAL))
        return torch.stack([cut * int(bound) for cut, bound in bounds]).sum(0)


def surrogate(term: PolicyTerm, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, live: Tensor) -> Surrogate:
    """Compute the policy terms of tokens [N]. `log_ratio` is logprobs - prev, of the token or the mean over its trajectory.

    Tokens that are not `live` [N] bool have a term of 0. No gradient comes from a ratio that the clip cuts, however large.
    """
    # an advantage of 0 gives a term of 0, however large the ratio, but NaN must not be hidden
    live = live & ((advantages != 0) | log_ratio.isnan())
    match term:
        case OnPolicyRatio():
            return _unclipped((logprobs - logprobs.detach()).exp(), advantages, live)
        case NoRatio():
            return _unclipped(logprobs, advantages, live)
    ratio = log_ratio.detach().exp()
    low, high = term.clip
    clamped = ratio.clamp(low, high)
    match term:
        case ClippedWeight():
            loss = -advantages * torch.where(live, clamped, 0.0) * logprobs
            return Surrogate(loss, ratio, clamped, ratio < low, ratio > high, torch.zeros_like(live))
        case ClippedRatio():
            below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
            over = torch.zeros_like(live) if term.dual_clip is None else (advantages < 0) & (ratio > term.dual_clip)
            used = _choose_ratio(term, log_ratio, ratio, advantages, over, live)
            return Surrogate(torch.where(live, -advantages * used, 0.0), ratio, clamped, below, above, over)


def _unclipped(ratio: Tensor, advantages: Tensor, live: Tensor) -> Surrogate:
    never = torch.zeros_like(live)
    return Surrogate(torch.where(live, -advantages * ratio, 0.0), ratio.detach(), ratio.detach(), never, never, never)


def _choose_ratio(
    term: ClippedRatio, log_ratio: Tensor, ratio: Tensor, advantages: Tensor, over: Tensor, live: Tensor
) -> Tensor:
    """Return the ratio, or the bound that cuts it: `max(-A r, -A r_c)` is `-A min(r, high)` for A > 0 and `-A max(r, low)` for A < 0. The
    dual clip cuts those that are `over` it.

    Where a bound applies, or the term doesn't depend on the ratio, the ratio is replaced before the exponential: its derivative may be
    infinite, and 0 · inf is NaN.
    """
    low, high = term.clip
    cut = torch.where(advantages > 0, ratio > high, (advantages < 0) & (ratio < low))
    bound = torch.where(advantages > 0, torch.full_like(ratio, high), low)
    if term.dual_clip is not None:
        cut, bound = cut | over, torch.where(over, term.dual_clip, bound)
    cut, bound = cut | ~live, torch.where(live, bound, 1.0)
    return torch.where(cut, bound, torch.where(cut, 0.0, log_ratio).exp())


def outside_probability_band(bound: float, logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return [N] bool: tokens with a positive advantage whose probability is more than `bound` above the behaviour policy's, or with a
    negative advantage and more than `bound` below it (DPPO, binary total variation, arXiv 2602.04879)."""
    difference = logprobs.detach().exp() - rollout_logprobs.exp()
    return torch.where(advantages > 0, difference > bound, (advantages < 0) & (difference < -bound))
