"""Do trainer and inference engine agree on how likely the trained tokens are?

Where they don't, the loss compares what it should not: every ratio and importance weight is off, and the run degrades slowly, without
an error. With data of older weights some difference is due, because the weights have learnt since. So a limit is that of data of the
current weights, and widens with the batch's mean age a, in steps: the error of a probability by as much again a step; a divergence,
quadratic in that, by (1 + a)^2. It is a rule of thumb, and so the words tell the error by the age of the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.config.logger import TrainInferenceAlarm
from services.trainer.files import atomic_write
from services.trainer.telemetry.samples import TrainingSample

# Of a streak of alarms the first is told, and then every one in this many steps: the metric has them all.
TELL_EVERY = 10
PICTURED, KEPT_PICTURES = 3, 10
NARROW = 0.06  # share of a picture's width that is too small for words
GEN, START, APART = "#4477aa", "#228833", "#cc6677"


@dataclasses.dataclass(frozen=True)
class Excess:
    """`limit` is the one that holds at mean age `age`."""

    metric: str
    value: float
    limit: float
    age: float

    def __str__(self) -> str:
        return (
            f"{self.metric} is {self.value:.4g}, above the {self.limit:.4g} that logger.train_inference_alarm.{self.metric} allows at a "
            f"mean age of {self.age:.1f} steps"
        )


def excesses(metrics: Mapping[str, float], limits: TrainInferenceAlarm) -> list[Excess]:
    """The limits that a step's metrics passed; a metric that is not a number passed its limit. One that is not there is no excess."""
    age = metrics.get("avg_trajectory_age", 0.0)
    found = []
    for name, limit in _widened(limits, age).items():
        if name in metrics and not metrics[name] <= limit:
            found.append(Excess(name, metrics[name], limit, age))
    return found


def _widened(limits: TrainInferenceAlarm, age: float) -> dict[str, float]:
    widened = {}
    if limits.token_mult_prob_error is not None:
        widened["token_mult_prob_error"] = 1 + (limits.token_mult_prob_error - 1) * (1 + age)
    if limits.gen_kl_error is not None:
        widened["gen_kl_error"] = limits.gen_kl_error * (1 + age) ** 2
    return widened


@dataclasses.dataclass
class Streak:
    """How many steps in a row an alarm has lasted."""

    length: int = 0

    def told(self, alarmed: bool) -> bool:
        """Take in one step; whether it is to be told."""
        self.length = self.length + 1 if alarmed else 0
        return alarmed and self.length % TELL_EVERY == 1


def error_by_age(samples: Sequence[TrainingSample], step: int) -> dict[int, float]:
    """Mean of exp(|gen - start|) over the tokens that count, by how many versions behind the weights were that sampled them."""
    sums: dict[int, list[float]] = {}
    for sample in samples:
        errors = np.exp(sample.difference.astype(np.float64))
        for span in sample.trajectory.spans:
            part = errors[span.start : span.end][sample.mask[span.start : span.end] > 0]
            part = part[~np.isnan(part)]
            total = sums.setdefault(step - span.version, [0.0, 0.0])
            total[0] += float(part.sum())
            total[1] += part.size
    return {age: total / count for age, (total, count) in sorted(sums.items()) if count}


def words(step: int, found: Sequence[Excess], by_age: Mapping[int, float], picture: Path | None) -> str:
    """What is wrong, how it looks, and what to do."""
    parts = [f"step {step}: trainer and inference disagree: " + "; ".join(map(str, found))]
    if by_age:
        parts.append(
            "token_mult_prob_error by age of the tokens in versions: "
            + ", ".join(f"{age}: {error:.4g}" for age, error in by_age.items())
        )
    parts.append(
        "if tokens of age 0 disagree, compare precision, sampling and refit (rollout logs, headrace_rollout_weight_difference); "
        "if only older ones do, lower the learning rate or the age bound, or correct for it in loss_fn (docs/metrics.md)"
    )
    if picture is not None:
        parts.append(f"the worst trajectories are in {picture}")
    return ". ".join(parts)


def worst(samples: Sequence[TrainingSample], count: int = PICTURED) -> list[TrainingSample]:
    """Those with the largest mean of exp(|gen - start|) over their tokens that count, largest first, and no more than one of a group: its
    trajectories are often alike."""
    rated = [(error, place) for place, sample in enumerate(samples) if (error := _error(sample)) is not None]
    of_group: dict[str, TrainingSample] = {}
    for _, place in sorted(rated, key=lambda pair: (-pair[0], pair[1])):
        of_group.setdefault(samples[place].trajectory.group_id, samples[place])
    return list(of_group.values())[:count]


def _error(sample: TrainingSample) -> float | None:
    counted = sample.difference[sample.mask > 0]
    counted = counted[~np.isnan(counted)]
    return float(np.exp(counted.astype(np.float64)).mean()) if counted.size else None


def draw(samples: Sequence[TrainingSample], step: int, path: Path) -> None:
    """A PNG of the trajectories, one beneath the other: log-probabilities of engine and trainer, and how far they are apart."""
    figure = Figure(figsize=(9, 1 + 2.4 * len(samples)), dpi=140, layout="constrained")
    rows = figure.subplots(len(samples), 1, squeeze=False)[:, 0]
    for axes, sample in zip(rows, samples, strict=True):
        _draw_one(axes, sample, step)
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper right", fontsize=9, frameon=False, ncols=3)
    rows[-1].set_xlabel("token of the completion")
    figure.suptitle(f"Step {step}: where trainer and inference disagree most", fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished)


def _draw_one(axes: Axes, sample: TrainingSample, step: int) -> None:
    trajectory, apart = sample.trajectory, sample.difference
    places = np.arange(apart.size)
    gen = np.where(trajectory.loss_mask > 0, trajectory.logprobs, np.nan)
    axes.plot(places, gen, color=GEN, lw=1.2, marker=".", ms=3, label="inference engine")
    if sample.start is not None:
        axes.plot(places, sample.start, color=START, lw=1.2, ls="--", marker=".", ms=3, label="trainer")
    axes.plot(places, apart, color=APART, lw=1.4, marker=".", ms=3, label="|difference|")
    peak = int(np.nanargmax(apart))
    axes.annotate(
        f"{apart[peak]:.3g}",
        (peak, apart[peak]),
        textcoords="offset points",
        xytext=(0, 4),
        ha="center",
        color=APART,
        fontsize=8,
    )
    for place, span in enumerate(trajectory.spans):
        axes.axvspan(span.start - 0.5, span.end - 0.5, color="#000000", alpha=0.03 if place % 2 else 0.0, lw=0)
        if span.end - span.start > NARROW * apart.size:
            low = axes.get_ylim()[0]
            axes.text(span.start, low, f" age {step - span.version}", fontsize=7, color="#777777", va="bottom")
    axes.set_title(
        f"{trajectory.group_id}[{trajectory.index}], mean exp|difference| {_error(sample):.3f}", fontsize=9, loc="left"
    )
    axes.set_ylabel("nats", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def picture_path(folder: Path, step: int) -> Path:
    return folder / f"disagreement_step{step}.png"


def pictures(folder: Path) -> list[Path]:
    """Those there are, the oldest first: by when they were written, as a rewound run takes a step again."""

    def age(path: Path) -> tuple[int, int]:  # a clock may not tell two files apart
        return path.stat().st_mtime_ns, int(path.stem.removeprefix("disagreement_step"))

    return sorted(folder.glob("disagreement_step*.png"), key=age)


def drop_old_pictures(folder: Path) -> None:
    for path in pictures(folder)[:-KEPT_PICTURES]:
        path.unlink()
