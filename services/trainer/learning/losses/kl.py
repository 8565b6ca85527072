"""Kullback-Leibler divergences estimated from log-probabilities of sampled tokens: the penalty of the loss, and metrics."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from headrace.config.loss import LossConfig


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
    """Per-token penalty [N] that holds the policy near the reference policy; the gradient is that of `logprobs`.

        d  = clamp(ref - logprobs, ± kl_input_clamp_value)       k = k1, k2 or k3 of d
        u  = exp(logprobs - sg(logprobs)), or exp(logprobs - rollout) with use_on_policy_kl_approximation; 0 if not finite
        kl = clamp(u k, ± kl_output_clamp_value)

    `u` carries the score-function gradient of the sampled KL (arXiv 2506.09477), without which the gradient of k is not that
    of the KL; it carries none where the input clamp is active. GRPO's paper and TRL omit it: compare with them at KL 0.
    """
    raw = ref_logprobs - logprobs
    bound, limit = config.kl_input_clamp_value, config.kl_output_clamp_value
    difference = raw if bound is None else raw.clamp(-bound, bound)
    weight = _finite_exp(logprobs - (rollout_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()))
    if bound is not None:
        weight = torch.where(raw.abs() > bound, weight.detach(), weight)
    value = (weight * kl_estimate(config.reference_policy_kl_type, difference)).detach()
    # clamped values are constant: replace them before the exponential, whose derivative may be infinite, and 0 · inf is NaN
    constant = (weight.detach() == 0) & ~raw.isnan()
    value = torch.where(constant, 0.0, value)
    if limit is not None:
        constant = constant | (value.abs() > limit)
        value = value.clamp(-limit, limit)
    kl = weight * kl_estimate(config.reference_policy_kl_type, torch.where(constant, 0.0, difference))
    return torch.where(constant, value, kl)


def divergences(
    config: LossConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, counted: Tensor
) -> dict[str, Tensor]:
    """How far the trainer's log-probabilities are from the generator's on the same tokens: metrics [N] float64 without a gradient.

    token_mult_prob_error   exp(|rollout - old| M), `M` being `counted`; below 1.05 on average is healthy
    gen_kl_error            KL(generator || trainer), policy_kl_error KL(trainer || generator), of reference_policy_kl_type
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
    """exp, but 0 with a gradient of 0 where the result is not finite."""
    finite = exponent.detach().exp().isfinite()
    return torch.where(finite, torch.where(finite, exponent, 0.0).exp(), 0.0)
