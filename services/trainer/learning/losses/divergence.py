"""How far the trainer's log-probabilities are from the behaviour policy's on the same tokens: metrics without a gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.config.loss import LossFn
from services.trainer.learning.losses.kl import estimate


def divergences(config: LossFn, start: Tensor, gen: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Per token [N] float64, `start` the trainer's log-probabilities and `gen` the behaviour policy's.

    token_mult_prob_error   exp(|gen - start| M), `M` being `counted`; below 1.05 on average is healthy
    gen_kl_error            KL(generator || trainer), policy_kl_error KL(trainer || generator), of reference_policy_kl_type
    js_divergence_error     k3(start - mid) / 2 + k3(gen - mid) / 2 with mid = log(exp(start) / 2 + exp(gen) / 2)
    """
    start, gen = start.detach().double(), gen.detach().double()
    kind = config.reference_policy_kl_type
    middle = torch.logaddexp(start, gen) - math.log(2.0)
    return {
        "token_mult_prob_error": torch.exp((gen - start).abs() * counted),
        "gen_kl_error": estimate(kind, start - gen),
        "policy_kl_error": estimate(kind, gen - start),
        "js_divergence_error": (estimate("k3", start - middle) + estimate("k3", gen - middle)) / 2,
    }
