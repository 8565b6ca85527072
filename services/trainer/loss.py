"""The clipped policy-gradient loss and its metrics: pure functions on log-probabilities.

Names and formulae are NeMo RL's (`ClippedPGLossFn`, token level). Per token, with `curr` the trainer's log-probability (the
only input that carries a gradient), `prev` the ratio's denominator, `gen` the behaviour policy's and `A` the advantage:

    r    = exp(curr - prev)                       r_c = clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max)
    l    = max(-A r, -A r_c)                      w   = exp(prev - gen), nan and inf count 0; 1 without the correction
    d    = clamp(ref - curr, ±kl_input_clamp)     k3  = exp(d) - 1 - d
    kl   = clamp(u k3, ±kl_output_clamp)          u   = exp(curr - sg(curr)), detached where the input clamp is active
    loss = sum M (w l + beta kl) / (T + 1e-8)

`M` is loss mask times loss multiplier, `T` its sum over the global batch, so the losses of micro-batches and ranks add up to
the loss of the whole. `u` has value 1 and carries the score-function gradient of the sampled KL (arXiv 2506.09477).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.config.loss import LossFn

EPSILON = 1e-8  # keeps an empty batch from dividing by zero, as in the reference

EXTREMES = ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max")
MEANS = (
    "loss",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "approx_entropy",
    "probs_ratio",
    "probs_ratio_clamped",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_penalty",
)


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the same tokens, any one shape. `ref` is None without a reference policy.

    `start` is the trainer's at the start of the step, None where `prev` is that: what the metrics hold against `gen`, so that a
    ratio taken against the behaviour policy itself does not hide how far trainer and generator disagree.
    """

    curr: Tensor
    prev: Tensor
    gen: Tensor
    ref: Tensor | None = None
    start: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of the global batch.

    `loss` is a scalar with its gradient. `means` [len(MEANS)] float64 add up over micro-batches and ranks to the global
    means. `extremes` [len(EXTREMES)] float64 are combined by min and max; an empty share holds inf and -inf.
    """

    loss: Tensor
    means: Tensor
    extremes: Tensor


def clipped_policy_loss(
    config: LossFn, logprobs: TokenLogprobs, advantages: Tensor, mask: Tensor, global_tokens: float
) -> LossParts:
    """Loss and metrics of tokens with `advantages` and `mask` (M), normalised by `global_tokens` (T).

    All tensors have one shape; the values of tokens with mask 0 are never looked at.
    """
    valid = mask > 0
    curr, prev, gen = (torch.where(valid, x, 0.0) for x in (logprobs.curr, logprobs.prev, logprobs.gen))
    ratio = torch.exp(curr - prev)
    clamped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    token_loss = torch.maximum(-advantages * ratio, -advantages * clamped)
    if config.use_importance_sampling_correction:
        token_loss = _importance_weight(prev, gen) * token_loss
    kl = torch.zeros_like(curr)
    if logprobs.ref is not None:
        kl = reference_kl(config, curr, torch.where(valid, logprobs.ref, 0.0))
        token_loss = token_loss + config.reference_policy_kl_penalty * kl
    loss = torch.where(valid, token_loss * mask, 0.0).sum() / (global_tokens + EPSILON)
    with torch.no_grad():
        start = prev if logprobs.start is None else torch.where(valid, logprobs.start, 0.0)
        per_token = {
            **_divergences(curr.double(), start.double(), gen.double(), mask),
            "sampling_importance_ratio": _importance_weight(start, gen),
            "probs_ratio": ratio,
            "probs_ratio_clamped": clamped,
            "clip_fraction_low": (ratio < 1 - config.ratio_clip_min) & (advantages < 0),
            "clip_fraction_high": (ratio > 1 + config.ratio_clip_max) & (advantages > 0),
            "kl_penalty": kl,
        }
        weights = mask.double() / (global_tokens + EPSILON)
        means = [
            loss.double() if name == "loss" else torch.where(valid, per_token[name].double() * weights, 0.0).sum()
            for name in MEANS
        ]
        return LossParts(loss, torch.stack(means), _extremes(ratio[valid].double(), clamped[valid].double()))


def _importance_weight(ours: Tensor, gen: Tensor) -> Tensor:
    """exp(ours - gen) without gradient, 0 where it is not finite."""
    return torch.nan_to_num(torch.exp((ours - gen).detach()), nan=0.0, posinf=0.0, neginf=0.0)


def reference_kl(config: LossFn, curr: Tensor, ref: Tensor) -> Tensor:
    """Per-token k3 estimate of KL(policy || reference) (Schulman, "Approximating KL Divergence"), clamped as configured."""
    raw = ref - curr
    bound = config.kl_input_clamp_value
    difference = raw if bound is None else raw.clamp(-bound, bound)
    weight = torch.exp(curr - curr.detach())
    if bound is not None:
        weight = torch.where(raw.abs() > bound, weight.detach(), weight)
    kl = weight * _k3(difference)
    bound = config.kl_output_clamp_value
    return kl if bound is None else kl.clamp(-bound, bound)


def _k3(difference: Tensor) -> Tensor:
    return torch.exp(difference) - 1 - difference


def _divergences(curr: Tensor, start: Tensor, gen: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How far trainer and generator disagree on the same tokens, and the sampled entropy."""
    middle = torch.logaddexp(start, gen) - torch.log(start.new_tensor(2.0))
    return {
        "token_mult_prob_error": torch.exp((gen - start).abs() * mask),
        "gen_kl_error": _k3(start - gen),
        "policy_kl_error": _k3(gen - start),
        "js_divergence_error": 0.5 * _k3(start - middle) + 0.5 * _k3(gen - middle),
        "approx_entropy": -torch.exp(curr - gen) * curr,
    }


def _extremes(ratio: Tensor, clamped: Tensor) -> Tensor:
    """[4] in the order of EXTREMES."""
    low, high = ratio.new_tensor([torch.inf]), ratio.new_tensor([-torch.inf])
    return torch.stack(
        [f(torch.cat([x, e])) for x in (ratio, clamped) for f, e in ((torch.amin, low), (torch.amax, high))]
    )
