"""Estimates of a Kullback-Leibler divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace.config.loss import LossFn


def estimate(kind: Literal["k1", "k2", "k3"], difference: Tensor) -> Tensor:
    """KL(p || q) for a token sampled from p, with `difference` = log q - log p: `-d`, `d² / 2` or `exp(d) - 1 - d`.

    Schulman, "Approximating KL Divergence", 2020.
    """
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def reference_kl(config: LossFn, policy: Tensor, ref: Tensor, gen: Tensor) -> Tensor:
    """Per-token penalty [N] that holds `policy` [N] near `ref` [N]; the gradient is that of `policy`.

        d  = clamp(ref - policy, ± kl_input_clamp_value)         k = k1, k2 or k3 of d
        u  = exp(policy - sg(policy)), or exp(policy - gen) with use_on_policy_kl_approximation; not finite counts 0
        kl = clamp(u k, ± kl_output_clamp_value)

    `u` carries the score-function gradient of the sampled KL (arXiv 2506.09477), without which the gradient of k is not that
    of the KL; it carries none where the input clamp is active. GRPO's paper and TRL do without: compare with them at KL 0.
    """
    raw = ref - policy
    bound, limit = config.kl_input_clamp_value, config.kl_output_clamp_value
    difference = raw if bound is None else raw.clamp(-bound, bound)
    weight = _finite_exp(policy - (gen if config.use_on_policy_kl_approximation else policy.detach()))
    if bound is not None:
        weight = torch.where(raw.abs() > bound, weight.detach(), weight)
    value = (weight * estimate(config.reference_policy_kl_type, difference)).detach()
    # what is constant anyway is cut out before the exponential: its derivative may be infinite, and 0 times that is not 0
    constant = (weight.detach() == 0) & ~raw.isnan()
    value = torch.where(constant, 0.0, value)
    if limit is not None:
        constant = constant | (value.abs() > limit)
        value = value.clamp(-limit, limit)
    kl = weight * estimate(config.reference_policy_kl_type, torch.where(constant, 0.0, difference))
    return torch.where(constant, value, kl)


def _finite_exp(exponent: Tensor) -> Tensor:
    """exp, and 0 with a gradient of 0 where that is not finite."""
    finite = exponent.detach().exp().isfinite()
    return torch.where(finite, torch.where(finite, exponent, 0.0).exp(), 0.0)
