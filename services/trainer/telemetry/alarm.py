"""The trainer's two alarms: trainer and inference engine disagree, and nothing is left to learn from.

*Train-inference.* If trainer and inference engine disagree on how likely the trained tokens are, every ratio and importance weight is
wrong. The run degrades slowly, without an error. A trajectory that the current weights sampled can differ only by numerics, so the limits
apply to it in every single step. Older tokens differ in a healthy run as well, because the weights have learnt since. That error grows with
age and learning rate, and can't be told from a fault. So older tokens raise the alarm only if most of them are beyond the clip of the
ratio, several steps in a row. The loss then cuts off most of the batch's signal, whatever the cause.

*Equal rewards.* A trajectory's advantage is measured against its group, or against the batch if the estimator has no group baseline. If no
reward differs there, rewards give no gradient.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from headrace.base.files import keep_newest
from headrace.config import Config

from ...refit.probe import Differences, tolerance

if TYPE_CHECKING:
    from ..learning.batch import Batch, Float64

REPORT_EVERY = 10  # the first step of a streak is logged, then every tenth; the metric covers all
# The limit on the share of tokens beyond the clip, and the steps in a row above it that make an alarm.
OFF_POLICY, OFF_POLICY_STEPS = 0.5, 3
EQUAL_STEPS = 5  # in a row without a group whose rewards differ: with few small groups single steps happen by chance
PICTURED, KEPT_PICTURES = 3, 10
# A replica whose disagreement is more than this many times that of the others is at fault.
SEPARATION = 3.0
LARGEST_DIFFERENCE = 500.0  # nats


OFF_POLICY_METRIC = "off_policy_tokens"


def alarm_limits(config: Config, agreement: Differences | None = None) -> dict[str, float]:
    """Return the limits of the train-inference alarm, by metric; a limit of null is left out.

    They are those of `logger.train_inference_alarm`, but never narrower than what a refit accepts as `agreement` in the mean (None: the
    configuration's; bfloat16 needs a large tolerance).
    """
    alarm, loss = config.logger.train_inference_alarm, config.loss_fn
    agreed = (agreement or tolerance(config)).mean
    error, kl = alarm.token_mult_prob_error, alarm.gen_kl_error
    kl_of_agreed = agreed if loss.reference_policy_kl_type == "k1" else math.expm1(agreed) - agreed
    limits = {
        "on_policy_token_mult_prob_error": None if error is None else max(error, math.exp(agreed)),
        "on_policy_gen_kl_error": None if kl is None else max(kl, kl_of_agreed),
        OFF_POLICY_METRIC: None if error is None else OFF_POLICY,
    }
    return {metric: limit for metric, limit in limits.items() if limit is not None}


@dataclasses.dataclass(frozen=True)
class LimitExceeded:
    """A metric above its limit."""

    metric: str
    value: float
    limit: float

    @property
    def on_policy(self) -> bool:
        """Whether it is about trajectories of the current weights. Otherwise it is an alarm only once it lasts `OFF_POLICY_STEPS`."""
        return self.metric != OFF_POLICY_METRIC

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g}, above {self.limit:.4g}"


def find_exceeded(metrics: Mapping[str, float], limits: Mapping[str, float]) -> list[LimitExceeded]:
    """Return the limits that a step's metrics exceed. NaN exceeds every limit, an absent metric none."""
    return [
        LimitExceeded(metric, metrics[metric], limit)
        for metric, limit in limits.items()
        if metric in metrics and not metrics[metric] <= limit
    ]


def has_equal_rewards(metrics: Mapping[str, float], config: Config) -> bool:
    """Return whether no reward of a step's batch differs from those that its estimator compares it with, but for rounding."""
    estimator = config.algorithm.adv_estimator
    if estimator.has_teacher:  # rewards are ignored
        return False
    if estimator.has_group_baseline:
        return metrics.get("groups_without_spread") == 1.0
    # equal ones have a deviation of rounding: 48 times 0.1 has 1e-17
    return metrics.get("reward_std", math.inf) <= 1e-6 * abs(metrics.get("reward", 0.0))


@dataclasses.dataclass
class Streak:
    """The number of steps in a row that something has lasted. From step number `after` of the streak on it is an alarm."""

    after: int = 1
    length: int = 0

    def count(self, seen: bool) -> None:
        """Count one step."""
        self.length = self.length + 1 if seen else 0

    @property
    def is_alarm(self) -> bool:
        return self.length >= self.after

    @property
    def is_reported(self) -> bool:
        """Whether to log this step: the first of the alarm, and every tenth after it."""
        return self.is_alarm and (self.length - self.after) % REPORT_EVERY == 0


def equal_rewards_message(step: int, steps: int, reward: float) -> str:
    """Return the warning that nothing is left to learn from, and what to do."""
    return (
        f"step {step}: for {steps} steps in a row the rewards of each group have all been equal (the mean is {reward:.3g}), so nothing is "
        "learnt from them. Look at samples (train_data_step<N>.jsonl.gz in the logs). If all answers fail, use easier data, or fix the "
        "prompt, the answer format or the environment. If all succeed, use harder data. If all are alike, raise the temperature "
        "(policy.generation.temperature) or the group size (num_generations_per_prompt)"
    )


def error_by_age(batch: Batch) -> dict[int, float]:
    """Return the mean of exp(|rollout - old|) over the tokens that count, by the age of the tokens in versions."""
    errors, by_age = _errors(batch), {}
    for age in np.unique(batch.ages):
        of_age = errors[(batch.ages == age) & batch.mask & ~np.isnan(errors)]
        if of_age.size:
            by_age[int(age)] = float(of_age.mean())
    return by_age


class ReplicaDisagreement(NamedTuple):
    """Sums over the `tokens` of one replica: `errors` of exp(|rollout - old|), `ages` of their ages in versions."""

    errors: float
    ages: float
    tokens: int

    @property
    def error(self) -> float:
        return self.errors / self.tokens

    @property
    def age(self) -> float:
        return self.ages / self.tokens


def error_by_replica(batch: Batch) -> dict[str, ReplicaDisagreement]:
    """Return the error of the tokens that count, by the replica that sampled them. Tokens that top-k or top-p left out in the trainer are
    not counted. |rollout - old| counts as at most `LARGEST_DIFFERENCE`, so that sums are finite, whatever a replica reports."""
    if batch.old_logprobs is None:
        return {}
    names: dict[str, int] = {}
    writers = [np.empty(0, np.intp)]
    for path in batch.paths:
        of_token = np.zeros(path.loss_mask.size, np.intp)
        for replica, start, end in path.written:
            of_token[start:end] = names.setdefault(replica, len(names))
        writers.append(of_token[path.loss_mask != 0])
    counted = batch.mask & np.isfinite(batch.old_logprobs)
    writer = np.concatenate(writers)[counted]
    differences = np.abs(batch.rollout_logprobs.astype(np.float64) - batch.old_logprobs)[counted]
    errors = np.bincount(writer, np.exp(np.minimum(differences, LARGEST_DIFFERENCE)), len(names))
    ages = np.bincount(writer, batch.ages[counted], len(names))
    tokens = np.bincount(writer, minlength=len(names))
    return {
        name: ReplicaDisagreement(float(errors[i]), float(ages[i]), int(tokens[i]))
        for name, i in names.items()
        if tokens[i]
    }


def merge(shares: Iterable[Mapping[str, ReplicaDisagreement]]) -> dict[str, ReplicaDisagreement]:
    """Combine the errors of the ranks' shares into those of the batch."""
    totals: dict[str, ReplicaDisagreement] = {}
    for share in shares:
        for replica, own in share.items():
            so_far = totals.get(replica, ReplicaDisagreement(0.0, 0.0, 0))
            totals[replica] = ReplicaDisagreement(
                so_far.errors + own.errors, so_far.ages + own.ages, so_far.tokens + own.tokens
            )
    return totals


def _widen(token_mult_prob_error: float, age: float) -> float:
    """Widen the limit for a mean age. As a rule of thumb, the error of a probability grows by its own size per step."""
    return 1 + (token_mult_prob_error - 1) * (1 + age)


def outliers(errors: Mapping[str, ReplicaDisagreement], limit: float | None) -> frozenset[str]:
    """Return the replicas whose error exceeds `limit` and far exceeds that of the others.

    `limit` is `token_mult_prob_error`, widened by age; with None no replica is an outlier. An outlier's error, less 1 and adjusted for its
    age, is more than `SEPARATION` times the median of the others. If most of the fleet disagrees with the trainer, the trainer is as likely
    to be the cause: the train-inference alarm reports that case.
    """
    if limit is None:
        return frozenset()
    excess = {replica: (of.error - 1) / (1 + of.age) for replica, of in errors.items()}

    def stands_out(replica: str) -> bool:
        others = [of for other, of in excess.items() if other != replica]
        return bool(others) and excess[replica] > SEPARATION * statistics.median(others)

    return frozenset(
        replica for replica, of in errors.items() if of.error > _widen(limit, of.age) and stands_out(replica)
    )


def disagreement_message(
    step: int, found: Sequence[LimitExceeded], by_age: Mapping[int, float], picture: Path | None
) -> str:
    """Return the warning that trainer and inference disagree: limits exceeded, error by age, what to do, and where the picture is."""
    parts = [f"step {step}: trainer and inference disagree: " + "; ".join(map(str, found))]
    if by_age:
        errors = ", ".join(f"{age}: {error:.4g}" for age, error in by_age.items())
        parts.append(f"token_mult_prob_error by age of the tokens in versions: {errors}")
    if any(excess.on_policy for excess in found):
        parts.append(
            "the current weights sampled these tokens, so the two programs compute different things. Compare precision, sampling and refit "
            "(rollout logs, headrace_rollout_weight_difference; recompute_kv_cache_after_weight_updates)"
        )
    else:
        parts.append(
            f"the share of tokens beyond the clip of the ratio has been this large for {OFF_POLICY_STEPS} steps or more: the data is too "
            "old for how fast the weights change. Lower the learning rate or the age bound, or correct for it in loss_fn; if that doesn't "
            "help, compare precision and sampling (docs/metrics.md)"
        )
    if picture is not None:
        parts.append(f"the worst trajectories are in {picture}")
    return ". ".join(parts)


def mean_errors(batch: Batch) -> list[float | None]:
    """Return [B]: the mean of exp(|rollout - old|) over the tokens that count; None for a trajectory without any."""
    found: list[float | None] = []
    for errors, mask in zip(batch.split(_errors(batch)), batch.split(batch.mask), strict=True):
        counted = errors[mask & ~np.isnan(errors)]
        found.append(float(counted.mean()) if counted.size else None)
    return found


def worst(batch: Batch, count: int = PICTURED) -> list[int]:
    """Return the trajectories with the largest mean error, largest first. At most one per group: a group's trajectories are often alike."""
    rated = [(error, i) for i, error in enumerate(mean_errors(batch)) if error is not None]
    of_group: dict[int, int] = {}
    for _, i in sorted(rated, key=lambda pair: -pair[0]):
        of_group.setdefault(int(batch.groups[i]), i)
    return list(of_group.values())[:count]


def _errors(batch: Batch) -> Float64:
    """Return [N]: exp(|rollout - old|); NaN where nothing was computed."""
    if batch.old_logprobs is None:
        return np.full(batch.trajectory.size, np.nan)
    with np.errstate(over="ignore"):
        difference = np.abs(batch.rollout_logprobs - batch.old_logprobs)
        return np.exp(difference.astype(np.float64))


def picture_path(folder: Path, step: int) -> Path:
    return folder / f"disagreement_step{step}.png"


def drop_old_pictures(folder: Path) -> None:
    keep_newest(folder, "disagreement_step*.png", KEPT_PICTURES)
