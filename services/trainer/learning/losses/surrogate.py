"""The policy term of a token: its advantage times a ratio of probabilities, clipped.

    PPO, GRPO, GSPO    r = exp(curr - prev)     r_c = clamp(r, 1 - ratio_clip_min, 1 + ratio_clip_max)
                       l = max(-A r, -A r_c)    dual clip: min(l, -A c) where A < 0
    CISPO              l = -A sg(r_c) curr
    forced on policy   r = r_c = exp(curr - sg(curr)), which is 1 with the gradient of curr
    without a ratio    r = r_c = curr

The last two have no clip, and no dual clip either: `l` is below `-A c` always.

Sources: PPO (arXiv 1707.06347), the two bounds of the clip (DAPO, arXiv 2503.14476), dual clip (arXiv 1912.09729), ratios of
sequences (GSPO, arXiv 2507.18071), CISPO (MiniMax-M1, arXiv 2506.13585), without a ratio (RLOO, arXiv 2402.14740).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.config.loss import LossFn


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """Per token [N]: the policy term `loss` with its gradient; `ratio` r, `clamped` r_c, and whether the clip cut the term below
    (`low`) or above (`high`), without one."""

    loss: Tensor
    ratio: Tensor
    clamped: Tensor
    low: Tensor
    high: Tensor


def surrogate(config: LossFn, curr: Tensor, log_ratio: Tensor, advantages: Tensor, live: Tensor) -> Surrogate:
    """The policy terms of tokens [N]; `log_ratio` is curr - prev, of the token or the mean over its sequence.

    Tokens that are not `live` [N] bool have a term of 0. No gradient comes from a ratio that the clip cuts, however large.
    """
    # an advantage of 0 takes no part, however large the ratio, unless that is to be seen not to be a number
    live = live & ((advantages != 0) | log_ratio.isnan())
    if config.force_on_policy_ratio or config.disable_ppo_ratio:
        ratio = (curr - curr.detach()).exp() if config.force_on_policy_ratio else curr
        never = torch.zeros_like(live)
        loss = torch.where(live, -advantages * ratio, 0.0)
        return Surrogate(loss, ratio.detach(), ratio.detach(), never, never)
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    ratio = log_ratio.detach().exp()
    clamped = ratio.clamp(low, high)
    if config.use_cispo:
        loss = -advantages * torch.where(live, clamped, 0.0) * curr
        return Surrogate(loss, ratio, clamped, ratio < low, ratio > high)
    below, above = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
    used = _used_ratio(config, log_ratio, ratio, advantages, live)
    return Surrogate(torch.where(live, -advantages * used, 0.0), ratio, clamped, below, above)


def _used_ratio(config: LossFn, log_ratio: Tensor, ratio: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    """The ratio, or the bound that cuts it: `max(-A r, -A r_c)` is `-A min(r, high)` for A > 0 and `-A max(r, low)` for A < 0.

    Where a bound holds, or nothing depends on it, the ratio is cut out before the exponential: its derivative may be
    infinite, and 0 times that is not 0.
    """
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    cut = torch.where(advantages > 0, ratio > high, (advantages < 0) & (ratio < low))
    bound = torch.where(advantages > 0, torch.full_like(ratio, high), low)
    if config.ratio_clip_c is not None:
        over = (advantages < 0) & (ratio > config.ratio_clip_c)
        cut, bound = cut | over, torch.where(over, config.ratio_clip_c, bound)
    cut, bound = cut | ~live, torch.where(live, bound, 1.0)
    return torch.where(cut, bound, torch.where(cut, 0.0, log_ratio).exp())


def outside_probability_band(bound: float, curr: Tensor, gen: Tensor, advantages: Tensor) -> Tensor:
    """[N] bool: tokens whose probability is more than `bound` above the behaviour policy's and has a positive advantage, or
    more than `bound` below and has a negative one (DPPO, binary total variation, arXiv 2602.04879)."""
    difference = curr.detach().exp() - gen.exp()
    return torch.where(advantages > 0, difference > bound, (advantages < 0) & (difference < -bound))
