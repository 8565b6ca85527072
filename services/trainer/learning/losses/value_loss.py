"""The value model's loss and its metrics.

    v_c  = clamp(v, v_old ± cliprange)
    loss = scale / 2 · Σ M max((v - R)², (v_c - R)²) / T        without a cliprange: (v - R)²

where `v` is the current value before a token, `v_old` the value at the start of the step, and `R` the return (PPO's clipped value loss, as
in NeMo RL's `MseValueLossFn`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.config.loss import ValueLossConfig

from ..batch import GlobalCounts, MicroBatch
from .terms import LossParts, extremes, token_weights, weighted, weighted_sum


def value_loss(
    config: ValueLossConfig, values: Tensor, tokens: MicroBatch, counts: GlobalCounts, *, columns: bool = False
) -> LossParts:
    """Compute the loss of a micro-batch and its metrics, as shares of those of the mini-batch with these `counts`; and with `columns`, the
    `token_value_losses`, which add up to the loss.

    `values` [N] float32, with a gradient, are the model's current ones. Those at the start of the step, and the returns, are columns of
    `tokens`. All are ignored on tokens that don't count. `vf_clipfrac` is the share of tokens whose clipped error is the larger one.
    """
    assert tokens.values is not None
    assert tokens.returns is not None
    weights = token_weights(tokens, counts)
    counted = weights > 0
    values, old_values, returns = (torch.where(counted, x, 0.0) for x in (values, tokens.values, tokens.returns))
    error = (values - returns).square()
    clipped = torch.zeros_like(counted)
    largest = error
    if config.cliprange is not None:
        bounded = values.clamp(old_values - config.cliprange, old_values + config.cliprange)
        bounded_error = (bounded - returns).square()
        clipped = bounded_error > error
        largest = torch.where(clipped, bounded_error, error)
    terms = weighted(largest, weights)
    loss = config.scale / 2 * terms.sum()
    with torch.no_grad():
        means = {
            "vf_clipfrac": clipped,
            "returns_mean": returns,
            "values_mean": values,
            "returns_sq_mean": returns.double().square(),
            "residual_sq_mean": (returns.double() - values.double()).square(),
        }
        sums = {"loss": loss.detach(), **{name: weighted_sum(x, weights) for name, x in means.items()}}
        low, high = extremes(values, counted)
    found = {"token_value_losses": config.scale / 2 * terms.detach()} if columns else {}
    return LossParts(loss, sums, {"values_min": low}, {"values_max": high}, found)


def explained_variance(means: Mapping[str, float]) -> float:
    """Return `critic/explained_var` from the metrics of `value_loss` over a whole batch: `1 - Var(R - v) / max(Var(R), 1e-8)`.

    1 is a perfect value model. 0 is no better than the mean return.
    """
    residual = means["residual_sq_mean"] - (means["returns_mean"] - means["values_mean"]) ** 2
    variance = means["returns_sq_mean"] - means["returns_mean"] ** 2
    return 1 - residual / max(variance, 1e-8)
