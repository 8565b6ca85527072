"""The policy's loss and its metrics.

    loss = red(w l) + beta red(kl) + mu nll

with, per token, `l` the clipped policy term (`surrogate`), `w` the importance weight or 1 (`importance`), `kl` the penalty
(`kl`); `red` the mean over tokens or sequences (`reduction`); and `nll = Σ M [reward > 0] (-curr) / Σ M [reward > 0]` (VAPO,
arXiv 2504.05118), over the global count: NeMo RL takes that of the micro-batch, so that its loss depends on the split.

What `curr` is compared with:

    prev_logprobs_source    prev: the trainer's at the start of the step, or the behaviour policy's
    proximal: recompute     prox = prev (decoupled PPO, AReaL, arXiv 2505.24298): w = exp(prox - gen), r = exp(curr - prox)
    proximal: interpolate   prox = gen + (sg(curr) - gen) b / (b + 1), for a token sampled b versions before the step
    force_on_policy_ratio   sg(curr)
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headrace.config.loss import LossFn
from services.trainer.learning.losses.divergence import divergences
from services.trainer.learning.losses.importance import importance_metrics, importance_weights
from services.trainer.learning.losses.kl import reference_kl
from services.trainer.learning.losses.reduction import (
    EPSILON,
    MetricNames,
    extremes,
    loss_weights,
    mean_by_sequence,
    sequence_counts,
    token_counts,
    token_weights,
    weighted_sum,
)
from services.trainer.learning.losses.surrogate import Surrogate, outside_probability_band, surrogate
from services.trainer.learning.tokens import GlobalCounts, Logprobs, LossParts, Tokens

_SUMS = (
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
    "positive_nll_loss",
    "num_valid_samples",
)
_RATIOS = ("probs_ratio", "probs_ratio_clamped")


def policy_metric_names(config: LossFn) -> MetricNames:
    """Names of the metrics of `policy_loss`."""
    sums: tuple[str, ...] = _SUMS
    if config.truncated_importance_sampling_type is not None:
        sums += ("sampling_importance_ratio_truncated", "is_oob_ratio")
    if config.probability_difference_mask is not None:
        sums += ("probability_difference_masked",)
    return MetricNames(sums, tuple(f"{name}_min" for name in _RATIOS), tuple(f"{name}_max" for name in _RATIOS))


def policy_loss(config: LossFn, tokens: Tokens, logprobs: Logprobs, counts: GlobalCounts) -> LossParts:
    """The loss of a micro-batch and its metrics, as shares of those of the global batch that `counts` is of.

    Metrics are means over tokens with weight M, but for these: `sampling_importance_ratio` and `_truncated` are over sequences
    with `sequence_level_importance_ratios`, `is_oob_ratio` over sequences under seq-mask-tis; `kl_penalty` is reduced as the
    loss is; `num_valid_samples` counts. `kl_penalty` and `positive_nll_loss` are 0 where the loss has no such term.

    With `logprobs.unfiltered`, a token whose `curr`, `prev` or `start` is -inf was left out by top-k or top-p: it has no policy
    term, is in no sequence ratio and in no metric, but keeps its place in T and its KL term. NaN in a log-probability
    that a token's terms are made of makes the loss NaN, even where the token's importance weight counts 0.

    Raises `ValueError` for a KL term without log-probabilities of a reference policy.
    """
    view = _View.of(config, tokens, logprobs)
    prev = _denominator(config, view, tokens)
    weights = importance_weights(
        config, prev if config.weighs_by_importance else view.start, view.gen, view.inside, tokens
    )
    dropped = _dropped(config, view)
    applied = weights.per_token(tokens) if config.weighs_by_importance else torch.ones_like(view.gen)
    terms = _policy_terms(config, view, prev, applied, dropped, tokens)
    policy = weighted_sum(applied * terms.loss, loss_weights(config, tokens, view.kept, counts))
    penalty = _kl_penalty(config, tokens, logprobs, counts)
    nll = _positive_nll(config, view, tokens, counts)
    loss = policy + config.reference_policy_kl_penalty * penalty + config.positive_example_nll_weight * nll
    with torch.no_grad():
        per_token = torch.where(view.kept, token_weights(tokens, counts), 0.0)
        means = _token_metrics(config, view, terms, dropped, tokens)
        sums = {
            **{name: weighted_sum(values, per_token) for name, values in means.items()},
            **importance_metrics(weights, per_token, tokens, counts),
            "loss": loss.detach(),
            "kl_penalty": penalty.detach(),
            "positive_nll_loss": nll.detach(),
            "num_valid_samples": sequence_counts(tokens).sum(),
        }
        ends = [extremes(values, view.counted) for values in (terms.ratio, terms.clamped)]
    names = policy_metric_names(config)
    minima, maxima = ([pair[side] for pair in ends] for side in (0, 1))
    return LossParts(
        loss,
        {name: sums[name] for name in names.sums},
        dict(zip(names.minima, minima, strict=True)),
        dict(zip(names.maxima, maxima, strict=True)),
    )


@dataclasses.dataclass(frozen=True)
class _View:
    """Log-probabilities and advantages [N] as the policy term may look at them: 0 on tokens outside.

    `kept` bool: not left out by top-k or top-p. `counted`: kept, and of weight M > 0. `inside`: what may be looked at, the
    counted tokens and, where something is computed over a whole sequence, all kept tokens of sequences that count.
    """

    curr: Tensor
    prev: Tensor
    gen: Tensor
    start: Tensor
    advantages: Tensor
    kept: Tensor
    counted: Tensor
    inside: Tensor

    @classmethod
    def of(cls, config: LossFn, tokens: Tokens, logprobs: Logprobs) -> _View:
        kept = torch.ones_like(tokens.mask, dtype=torch.bool)
        if logprobs.unfiltered is not None:
            for values in (logprobs.curr, logprobs.prev, logprobs.start):
                kept = kept & ~values.detach().isneginf()
        counted = kept & (token_counts(tokens) > 0)
        whole = config.sequence_level_importance_ratios or config.truncated_importance_sampling_type == "seq-mask-tis"
        inside = kept & (tokens.multiplier > 0)[tokens.sequence] if whole else counted
        names = ("curr", "prev", "gen", "start")
        looked_at = {name: torch.where(inside, getattr(logprobs, name), 0.0) for name in names}
        return cls(
            **looked_at,
            advantages=torch.where(counted, tokens.advantages, 0.0),
            kept=kept,
            counted=counted,
            inside=inside,
        )


def _denominator(config: LossFn, view: _View, tokens: Tokens) -> Tensor:
    """[N], without a gradient: the log-probabilities that `curr` is compared with."""
    curr = view.curr.detach()
    if config.force_on_policy_ratio:
        return curr
    if config.proximal == "interpolate":
        return view.gen + (curr - view.gen) * (tokens.behind / (tokens.behind + 1))
    return view.prev


def _dropped(config: LossFn, view: _View) -> Tensor:
    """[N] bool: counted tokens without a policy term."""
    if config.probability_difference_mask is None:
        return torch.zeros_like(view.counted)
    return outside_probability_band(config.probability_difference_mask, view.curr, view.gen, view.advantages)


def _policy_terms(
    config: LossFn, view: _View, prev: Tensor, applied: Tensor, dropped: Tensor, tokens: Tokens
) -> Surrogate:
    """Policy terms [N] before their importance weights `applied` [N]; 0 on tokens that are dropped or weigh nothing."""
    log_ratio = view.curr - prev
    if config.sequence_level_importance_ratios and not config.force_on_policy_ratio:
        log_ratio = mean_by_sequence(log_ratio, view.inside, tokens).to(log_ratio.dtype)[tokens.sequence]
    # a weight that is not finite counts 0, but must not hide a log-probability that isn't
    live = view.counted & ~dropped & ((applied != 0) | log_ratio.isnan())
    return surrogate(config, view.curr, log_ratio, view.advantages, live)


def _kl_penalty(config: LossFn, tokens: Tokens, logprobs: Logprobs, counts: GlobalCounts) -> Tensor:
    """The reduced KL to the reference policy, a float64 scalar; 0 where it is no term of the loss."""
    if not config.kl_in_loss:
        return torch.zeros((), dtype=torch.float64, device=tokens.mask.device)
    if logprobs.ref is None:
        raise ValueError(
            f"loss_fn.reference_policy_kl_penalty {config.reference_policy_kl_penalty} without log-probabilities of a "
            "reference policy"
        )
    counted = token_counts(tokens) > 0
    policy = logprobs.curr if logprobs.unfiltered is None else logprobs.unfiltered
    kl = reference_kl(config, *(torch.where(counted, x, 0.0) for x in (policy, logprobs.ref, logprobs.gen)))
    return weighted_sum(kl, loss_weights(config, tokens, torch.ones_like(counted), counts))


def _positive_nll(config: LossFn, view: _View, tokens: Tokens, counts: GlobalCounts) -> Tensor:
    """Mean negative log-likelihood of sequences with a positive reward, a float64 scalar; 0 where it is no term of the loss."""
    if config.positive_example_nll_weight == 0:
        return torch.zeros((), dtype=torch.float64, device=tokens.mask.device)
    positive = view.counted & (tokens.reward > 0)[tokens.sequence]
    weights = torch.where(positive, token_counts(tokens), 0.0) / (counts.positive_tokens + EPSILON)
    return weighted_sum(-view.curr, weights)


def _token_metrics(config: LossFn, view: _View, terms: Surrogate, dropped: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    """Metrics that are means over tokens, per token [N]."""
    curr, gen = view.curr.double(), view.gen.double()
    metrics = {
        **divergences(config, view.start, view.gen, token_counts(tokens)),
        # E over the behaviour policy of -(p_curr / p_gen) log p_curr
        "approx_entropy": -torch.exp(curr - gen) * curr,
        "probs_ratio": terms.ratio,
        "probs_ratio_clamped": terms.clamped,
        "clip_fraction_low": terms.low,
        "clip_fraction_high": terms.high,
    }
    if config.probability_difference_mask is not None:
        metrics["probability_difference_masked"] = dropped
    return metrics
