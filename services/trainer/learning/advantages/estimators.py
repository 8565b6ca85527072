"""From rewards to the advantage of each token, by the estimator that the configuration names.

With `r` a trajectory's reward after scaling and shaping, `KL_t` the divergence of its tokens from the reference policy (`kl.py`) and
β the KL penalty where it is taken from rewards (`loss_fn.use_kl_in_reward`, else 0):

    grpo                 (r - baseline) / deviation, of the group or of its others               (`group.py`)
    gdpo                 the same of each reward component, weighed, brought to mean 0 and deviation 1 over the batch
    reinforce_plus_plus  whiten(r - mean of the group - β KL_t), or - β Σ_{i≥t} KL_i under `kl_to_go`   (arXiv 2501.03262)
    gae                  whiten(Σ_{i≥t} (γλ)^{i-t} δ_i), of token rewards -β KL_t, and r at the last   (`recursion.py`)
    raw_reward           whiten(r)
    opd                  log-probability of the teacher - of the policy                          (arXiv 2601.02780)

Whitening is over all tokens of the batch, each weighed by its trajectory's multiplier (`whitening.py`). It, and what runs over
whole trajectories, sees tokens over age too. Then advantages are clamped to the configured bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.config.advantages import KL_IN_REWARD, AdvEstimator, PPOAdvEstimator
from headrace.config.algorithm import GRPO, Algorithm
from headrace.config.loss import LossFn
from headrace.errors import ServiceError
from services.trainer.learning.advantages.group import group_advantages, weighed_components
from services.trainer.learning.advantages.kl import kl_of_tokens
from services.trainer.learning.advantages.metrics import baseline_metrics, token_metrics
from services.trainer.learning.advantages.recursion import generalized_advantages, length_adaptive_lambdas, sums_to_go
from services.trainer.learning.advantages.share import AllRanks, Share
from services.trainer.learning.advantages.whitening import whiten_biased, whiten_unbiased
from services.trainer.learning.tokens import Episode, Estimates, Float64


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `estimate` goes by: the estimator's section, and what `grpo` says beside it. `clip_low` and `clip_high` bound
    advantages."""

    estimator: AdvEstimator | PPOAdvEstimator
    normalize_rewards: bool = True
    leave_one_out: bool = True
    clip_low: float | None = None
    clip_high: float | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> Settings:
        clips = algorithm.advantage_clip_low, algorithm.advantage_clip_high
        if isinstance(algorithm, GRPO):
            return cls(algorithm.adv_estimator, algorithm.normalizes, algorithm.leaves_one_out, *clips)
        return cls(algorithm.adv_estimator, False, False, *clips)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Which of an episode's arrays an estimator reads: each is a pass over the batch."""

    start: bool
    ref: bool
    values: bool


def needs(settings: Settings, loss_fn: LossFn) -> Needs:
    """What `estimate` will ask of each episode. `ref` is the reference policy's, under `opd` the teacher's."""
    name = settings.estimator.name
    compared = name == "opd" or (loss_fn.kl_in_reward and name in KL_IN_REWARD)
    return Needs(start=compared, ref=compared, values=name == "gae")


def estimate(
    settings: Settings,
    loss_fn: LossFn,
    episodes: Sequence[Episode],
    rewards: Float64,
    components: Mapping[str, Float64],
    generations: int,
    ranks: AllRanks,
) -> Estimates:
    """A collective: advantages of this rank's `episodes`, token by token, and for `gae` returns.

    `rewards` [P·n], after scaling and shaping, and `components` (by name, [P·n] each, scaled; `gdpo` alone reads them) are the whole
    batch's, groups of `generations` one after the other; every rank gives the same. What comes out is the same for
    any number of ranks, to the last bit.

    Metrics: `advantages/mean`, `/std`, `/min`, `/max` over all tokens of the batch; of the estimators of `grpo` also
    `baseline_reward/pct_0`, `_1` and `_mixed`; of `opd` `on_policy_distillation/teacher_student_logprob_gap_mean`.

    Raises `ServiceError` naming the trajectory, on every rank, for log-probabilities or values that are not finite; `ValueError`
    for arrays that are not as `Episode` says, or not what `needs` asks for.
    """
    share = Share(episodes, rewards.size, ranks)
    estimator = settings.estimator
    returns, metrics = None, {}
    if isinstance(estimator, PPOAdvEstimator):
        advantages = _of_rewards(share, rewards)
        if estimator.name == "gae":
            advantages, returns = _generalized(share, estimator, loss_fn, rewards)
        elif estimator.normalize_advantages:
            advantages = whiten_biased(share, advantages)
    else:
        metrics = baseline_metrics(rewards, generations, leave_one_out=settings.leave_one_out)
        if estimator.name == "opd":
            advantages = _distilled(share)
            metrics["on_policy_distillation/teacher_student_logprob_gap_mean"] = token_metrics(
                share, "gap", advantages
            )["gap/mean"]
        elif estimator.name == "reinforce_plus_plus":
            advantages = _reinforced(share, estimator, loss_fn, rewards, generations)
        else:
            advantages = _of_rewards(share, _of_groups(settings, estimator, rewards, components, generations))
    if settings.clip_low is not None or settings.clip_high is not None:
        advantages = np.clip(advantages, settings.clip_low, settings.clip_high)
    metrics |= token_metrics(share, "advantages", advantages)
    return Estimates(share.split(advantages), None if returns is None else share.split(returns), metrics)


def _of_rewards(share: Share, of_batch: Float64) -> Float64:
    """Each trajectory's number at each of its tokens."""
    return share.own(of_batch)[share.sequence]


def _of_groups(
    settings: Settings,
    estimator: AdvEstimator,
    rewards: Float64,
    components: Mapping[str, Float64],
    generations: int,
) -> Float64:
    how = {"leave_one_out": settings.leave_one_out, "normalize": settings.normalize_rewards}
    if estimator.name == "gdpo":
        return weighed_components(components, estimator.reward_weights, generations, **how)
    return group_advantages(rewards.reshape(-1, generations), **how).ravel()


def _distilled(share: Share) -> Float64:
    return _finite(share, share.tokens("ref") - share.tokens("start"), "log-probabilities")


def _reinforced(share: Share, estimator: AdvEstimator, loss_fn: LossFn, rewards: Float64, generations: int) -> Float64:
    if estimator.minus_baseline:
        groups = rewards.reshape(-1, generations)
        rewards = group_advantages(groups, leave_one_out=False, normalize=False).ravel()
    advantages = _of_rewards(share, rewards)
    if loss_fn.kl_in_reward:
        penalty = _kl_penalty(share, loss_fn)
        if estimator.kl_to_go:
            penalty = sums_to_go(share, penalty, np.ones(len(share.episodes)))
        advantages = advantages - penalty
    return whiten_biased(share, advantages)


def _generalized(
    share: Share, estimator: PPOAdvEstimator, loss_fn: LossFn, rewards: Float64
) -> tuple[Float64, Float64]:
    """Advantages and the value model's returns, [N]: its λ and the policy's may differ (VAPO). Both are of the same token rewards."""
    of_tokens = np.where(share.to_go == 0, _of_rewards(share, rewards), 0.0)
    if loss_fn.kl_in_reward:
        of_tokens = of_tokens - _kl_penalty(share, loss_fn)
    values = _finite(share, share.tokens("values"), "values")
    of_value, of_policy = _lambdas(share, estimator)
    gamma = estimator.gae_gamma
    returns = generalized_advantages(share, of_tokens, values, gamma, of_value) + values
    advantages = generalized_advantages(share, of_tokens, values, gamma, of_policy)
    if estimator.normalize_advantages:
        advantages = whiten_unbiased(share, advantages)
    return np.where(share.multipliers[share.sequence] > 0, advantages, 0.0), returns


def _lambdas(share: Share, estimator: PPOAdvEstimator) -> tuple[Float64, Float64]:
    """λ of the value model and of the policy, [E] each."""

    def own_or_shared(own: float | None) -> Float64:
        return np.full(len(share.episodes), estimator.gae_lambda if own is None else own)

    if estimator.length_adaptive_alpha > 0:
        of_policy = length_adaptive_lambdas(share, estimator.length_adaptive_alpha)
    else:
        of_policy = own_or_shared(estimator.gae_lambda_policy)
    return own_or_shared(estimator.gae_lambda_value), of_policy


def _kl_penalty(share: Share, loss_fn: LossFn) -> Float64:
    kl = kl_of_tokens(share.tokens("start"), share.tokens("ref"), loss_fn.reference_policy_kl_type)
    return loss_fn.reference_policy_kl_penalty * _finite(share, kl, "log-probabilities")


def _finite(share: Share, tokens: Float64, what: str) -> Float64:
    """A collective: `tokens`, unless one of the batch is not finite; whoever holds it, every rank says the same."""
    own = [share.episodes[i] for i in np.flatnonzero(share.sums((~np.isfinite(tokens)).astype(np.float64)))]
    found = share.ranks.gather([(episode.index, episode.name) for episode in own])
    names = [name for _, name in sorted(bad for of_rank in found for bad in of_rank)]
    if names:
        others = f" and {len(names) - 1} more of the {share.size} trajectories" if len(names) > 1 else ""
        raise ServiceError(
            f"{names[0]}{others}: {what} that are not finite; the weights of a model are broken, or its precision is too low: go on "
            "from an earlier checkpoint with a lower learning rate or in float32"
        )
    return tokens
