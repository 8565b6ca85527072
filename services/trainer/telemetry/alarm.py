"""The train-inference alarm: do trainer and inference engine agree on how likely the trained tokens are?

If they don't, every ratio and importance weight is wrong, and the run degrades slowly, without an
error. With data of older weights some difference is expected, because the weights have learnt since. So a limit applies to data of the
current weights, and widens with the batch's mean age a, in steps: the limit on a probability's error grows by its own size per step, the
limit on a divergence, which is quadratic in that error, by a factor (1 + a)^2. This is a rule of thumb, so the message shows the error by
the age of the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.config.logger import TrainInferenceAlarmConfig
from headrace_services.trainer.learning.batch import Batch, Float64
from headrace_services.trainer.telemetry.samples import keep_newest

REPORT_EVERY = 10  # the first step of a streak is reported, then every tenth; the metric covers them all
PICTURED, KEPT_PICTURES = 3, 10


@dataclasses.dataclass(frozen=True)
class LimitExceeded:
    """A metric above its limit; `limit` is the one that holds at mean age `age`."""

    metric: str
    value: float
    limit: float
    age: float

    def __str__(self) -> str:
        return (
            f"{self.metric} is {self.value:.4g}, above the {self.limit:.4g} that logger.train_inference_alarm.{self.metric} allows at a "
            f"mean age of {self.age:.1f} steps"
        )


def violations(metrics: Mapping[str, float], limits: TrainInferenceAlarmConfig) -> list[LimitExceeded]:
    """The limits that a step's metrics exceed. NaN exceeds every limit; a metric that is absent exceeds none."""
    age = metrics.get("avg_trajectory_age", 0.0)
    widened = {}
    if limits.token_mult_prob_error is not None:
        widened["token_mult_prob_error"] = 1 + (limits.token_mult_prob_error - 1) * (1 + age)
    if limits.gen_kl_error is not None:
        widened["gen_kl_error"] = limits.gen_kl_error * (1 + age) ** 2
    return [
        LimitExceeded(name, metrics[name], limit, age)
        for name, limit in widened.items()
        if name in metrics and not metrics[name] <= limit
    ]


@dataclasses.dataclass
class Streak:
    """How many steps in a row an alarm has lasted."""

    length: int = 0

    def is_reported(self, alarmed: bool) -> bool:
        """Count one step; returns whether to report it."""
        self.length = self.length + 1 if alarmed else 0
        return alarmed and self.length % REPORT_EVERY == 1


def error_by_age(batch: Batch) -> dict[int, float]:
    """Mean of exp(|rollout - old|) over the tokens that count, by the age of the tokens in versions."""
    errors, by_age = _errors(batch), {}
    for age in np.unique(batch.ages):
        of_age = errors[(batch.ages == age) & batch.mask & ~np.isnan(errors)]
        if of_age.size:
            by_age[int(age)] = float(of_age.mean())
    return by_age


def message(step: int, found: Sequence[LimitExceeded], by_age: Mapping[int, float], picture: Path | None) -> str:
    """The warning: which limits are exceeded, the error by age, what to do, and where the picture is."""
    parts = [f"step {step}: trainer and inference disagree: " + "; ".join(map(str, found))]
    if by_age:
        errors = ", ".join(f"{age}: {error:.4g}" for age, error in by_age.items())
        parts.append(f"token_mult_prob_error by age of the tokens in versions: {errors}")
    parts.append(
        "if tokens of age 0 disagree, compare precision, sampling and refit (rollout logs, headrace_rollout_weight_difference); "
        "if only older ones do, lower the learning rate or the age bound, or correct for it in loss_fn (docs/metrics.md)"
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
