"""The trainer's alarms, each with a reason to be one: trainer and inference engine disagree; nothing is left to learn from.

*Train-inference.* If trainer and inference engine disagree on how likely the trained tokens are, every ratio and importance weight is
wrong, and the run degrades slowly, without an error. Where the very weights that are trained sampled a trajectory, only numerics tell the
two apart: the limits hold there, in every single step. Older tokens differ in a healthy run as well, because the weights have learnt since
(the error grows with age and learning rate), and nothing tells that from a fault. So they raise the alarm only where most of them are
beyond the clip of the ratio, several steps in a row: the loss then cuts off most of what the batch says, whatever the cause.

*Equal rewards.* The advantage of a trajectory is measured against its group (or against the batch, where the estimator has no baseline of
the group). Where nothing differs there, there is no gradient from rewards.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headrace.config import Config
from headrace.files import keep_newest
from headrace.weights.probe import tolerance
from headrace_services.trainer.learning.batch import Batch, Float64

REPORT_EVERY = 10  # the first step of a streak is reported, then every tenth; the metric covers them all
# The share of tokens beyond the clip that is too large, and for how many steps in a row.
OFF_POLICY, OFF_POLICY_STEPS = 0.5, 3
EQUAL_STEPS = 5  # in a row in which no group's rewards differ: of a few small groups that happens by chance
PICTURED, KEPT_PICTURES = 3, 10
# How many times the disagreement of a replica is that of the others, if it is the replica that is wrong.
SEPARATION = 3.0
LARGEST_DIFFERENCE = 500.0  # nats


@dataclasses.dataclass(frozen=True)
class AlarmLimits:
    """The limits of the train-inference alarm; None never raises it. `error` and `kl` hold for trajectories of the current weights,
    `off_policy` for the share of all tokens that are beyond the clip."""

    error: float | None
    kl: float | None
    off_policy: float | None

    @classmethod
    def of(cls, config: Config) -> AlarmLimits:
        """The limits of `logger.train_inference_alarm`, but never narrower than what `weight_channel.verify_mean_tolerance` lets pass as
        agreement (bfloat16 needs a large one)."""
        alarm, loss = config.logger.train_inference_alarm, config.loss_fn
        agreed = tolerance(config).mean
        error, kl = alarm.token_mult_prob_error, alarm.gen_kl_error
        kl_of_agreed = agreed if loss.reference_policy_kl_type == "k1" else math.expm1(agreed) - agreed
        return cls(
            error=None if error is None else max(error, math.exp(agreed)),
            kl=None if kl is None else max(kl, kl_of_agreed),
            off_policy=None if error is None else OFF_POLICY,
        )


@dataclasses.dataclass(frozen=True)
class LimitExceeded:
    """A metric above the limit that holds for it. `on_policy`: whether it is of tokens that the current weights sampled."""

    metric: str
    value: float
    limit: float
    on_policy: bool

    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g}, above {self.limit:.4g}"


def on_policy_violations(metrics: Mapping[str, float], limits: AlarmLimits) -> list[LimitExceeded]:
    """The limits that a step's trajectories of the current weights exceed. NaN exceeds every limit, an absent metric none."""
    return _above(
        metrics,
        {"on_policy_token_mult_prob_error": limits.error, "on_policy_gen_kl_error": limits.kl},
        on_policy=True,
    )


def off_policy_violations(metrics: Mapping[str, float], limits: AlarmLimits) -> list[LimitExceeded]:
    """As `on_policy_violations`, of all of a step's tokens. It is an alarm once it lasts `OFF_POLICY_STEPS`."""
    return _above(metrics, {"off_policy_tokens": limits.off_policy}, on_policy=False)


def _above(metrics: Mapping[str, float], limits: Mapping[str, float | None], *, on_policy: bool) -> list[LimitExceeded]:
    return [
        LimitExceeded(name, metrics[name], limit, on_policy)
        for name, limit in limits.items()
        if limit is not None and name in metrics and not metrics[name] <= limit
    ]


def has_equal_rewards(metrics: Mapping[str, float], config: Config) -> bool:
    """Whether no reward of a step's batch differs from those that its estimator compares it with."""
    algorithm, estimator = config.algorithm, config.algorithm.adv_estimator
    if estimator.has_teacher:  # rewards move nothing
        return False
    minus_baseline = config.grpo is not None and estimator.takes_kl and config.grpo.adv_estimator.minus_baseline
    if (estimator.compares_groups or minus_baseline) and algorithm.num_generations_per_prompt > 1:
        return metrics.get("groups_without_spread") == 1.0
    return metrics.get("reward_std") == 0.0


@dataclasses.dataclass
class Streak:
    """How many steps in a row something has lasted; it is an alarm from the step `after` on."""

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
        """Whether to report this step: the first of the alarm, and every tenth after it."""
        return self.is_alarm and (self.length - self.after) % REPORT_EVERY == 0


def equal_rewards_message(step: int, steps: int, reward: float) -> str:
    """The warning that nothing is left to learn from, and what to do."""
    return (
        f"step {step}: for {steps} steps in a row the rewards of each group have all been equal (the mean is {reward:.3g}): nothing is "
        "learnt from them. Look at samples (train_data_step<N>.jsonl.gz in the logs): if all answers fail, take easier data or mend "
        "prompt, answer format or environment; if all succeed, take harder data; if they are all alike, raise the temperature "
        "(policy.generation.temperature) or the group size (num_generations_per_prompt)"
    )


def error_by_age(batch: Batch) -> dict[int, float]:
    """Mean of exp(|rollout - old|) over the tokens that count, by the age of the tokens in versions."""
    errors, by_age = _errors(batch), {}
    for age in np.unique(batch.ages):
        of_age = errors[(batch.ages == age) & batch.mask & ~np.isnan(errors)]
        if of_age.size:
            by_age[int(age)] = float(of_age.mean())
    return by_age


class ReplicaDisagreement(NamedTuple):
    """Sums over `tokens` of one replica: of exp(|rollout - old|), and of their ages in versions."""

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
    """The error of the tokens that count, by the replica that sampled them; those that top-k or top-p left out in the trainer say
    nothing. A |rollout - old| counts for at most `LARGEST_DIFFERENCE`, so that sums are finite, whatever a replica claims."""
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


def merged(shares: Iterable[Mapping[str, ReplicaDisagreement]]) -> dict[str, ReplicaDisagreement]:
    """The errors of a batch, from those of the ranks' shares of it."""
    totals: dict[str, ReplicaDisagreement] = {}
    for share in shares:
        for replica, own in share.items():
            so_far = totals.get(replica, ReplicaDisagreement(0.0, 0.0, 0))
            totals[replica] = ReplicaDisagreement(
                so_far.errors + own.errors, so_far.ages + own.ages, so_far.tokens + own.tokens
            )
    return totals


def _widened(token_mult_prob_error: float, age: float) -> float:
    """The limit at a mean age: a rule of thumb, by which the error of a probability grows by its own size per step."""
    return 1 + (token_mult_prob_error - 1) * (1 + age)


def apart(errors: Mapping[str, ReplicaDisagreement], limit: float | None) -> frozenset[str]:
    """The replicas whose error exceeds `limit` (`token_mult_prob_error`, widened by age; None: none does), and by far exceeds that of the
    others: less 1 and for its age, it is more than `SEPARATION` times their median. If most of the fleet disagrees with the trainer, the
    cause is as likely to be the trainer: that is for the alarm to say."""
    if limit is None:
        return frozenset()
    excess = {replica: (of.error - 1) / (1 + of.age) for replica, of in errors.items()}

    def stands_out(replica: str) -> bool:
        others = [of for other, of in excess.items() if other != replica]
        return bool(others) and excess[replica] > SEPARATION * statistics.median(others)

    return frozenset(
        replica for replica, of in errors.items() if of.error > _widened(limit, of.age) and stands_out(replica)
    )


def message(step: int, found: Sequence[LimitExceeded], by_age: Mapping[int, float], picture: Path | None) -> str:
    """The warning: which limits are exceeded, the error by age, what to do, and where the picture is."""
    parts = [f"step {step}: trainer and inference disagree: " + "; ".join(map(str, found))]
    if by_age:
        errors = ", ".join(f"{age}: {error:.4g}" for age, error in by_age.items())
        parts.append(f"token_mult_prob_error by age of the tokens in versions: {errors}")
    if any(excess.on_policy for excess in found):
        parts.append(
            "the current weights sampled these tokens, so the two programs compute different things: compare precision, sampling and refit "
            "(rollout logs, headrace_rollout_weight_difference; recompute_kv_cache_after_weight_updates)"
        )
    else:
        parts.append(
            f"the share of tokens beyond the clip of the ratio has been as large for {OFF_POLICY_STEPS} steps or more: the data is too old "
            "for how fast the weights change. Lower the learning rate or the age bound, or correct for it in loss_fn; if that doesn't "
            "help, compare precision and sampling (docs/metrics.md)"
        )
    if picture is not None:
        parts.append(f"the worst trajectories are in {picture}")
    return ". ".join(parts)


def mean_errors(batch: Batch) -> list[float | None]:
    """[B]: mean of exp(|rollout - old|) over the tokens that count; None for a trajectory without any."""
    found: list[float | None] = []
    for errors, mask in zip(batch.split(_errors(batch)), batch.split(batch.mask), strict=True):
        counted = errors[mask & ~np.isnan(errors)]
        found.append(float(counted.mean()) if counted.size else None)
    return found


def worst(batch: Batch, count: int = PICTURED) -> list[int]:
    """The trajectories with the largest mean error, largest first, at most one per group: a group's trajectories are often alike."""
    rated = [(error, i) for i, error in enumerate(mean_errors(batch)) if error is not None]
    of_group: dict[int, int] = {}
    for _, i in sorted(rated, key=lambda pair: -pair[0]):
        of_group.setdefault(int(batch.groups[i]), i)
    return list(of_group.values())[:count]


def _errors(batch: Batch) -> Float64:
    """[N]: exp(|rollout - old|); NaN where nothing was computed."""
    if batch.old_logprobs is None:
        return np.full(batch.trajectory.size, np.nan)
    with np.errstate(over="ignore"):
        difference = np.abs(batch.rollout_logprobs - batch.old_logprobs)
        return np.exp(difference.astype(np.float64))


def picture_path(folder: Path, step: int) -> Path:
    return folder / f"disagreement_step{step}.png"


def drop_old_pictures(folder: Path) -> None:
    keep_newest(folder, "disagreement_step*.png", KEPT_PICTURES)
