"""The learning curve of a run: training reward and held-out accuracy against the version of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from services.trainer.files import atomic_write
from services.trainer.telemetry.journal import Line

REWARD = "#4477aa"
ACCURACY = "#cc6677"
SMOOTHING = 5


def draw_curve(lines: Sequence[Line], path: Path, title: str) -> None:
    """Write a PNG, 1600 x 900 pixels, of the `train` and `validation` lines of a run's surviving history.

    A step's reward stands at the version that the step started from. With more than a dozen steps their single values are pale
    and a running mean over the last `SMOOTHING` is drawn through them.
    """
    train = sorted((line.step, line.metrics["reward"]) for line in lines if line.kind == "train")
    held_out = sorted(
        (line.step, line.metrics["accuracy"])
        for line in lines
        if line.kind == "validation" and "accuracy" in line.metrics
    )
    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    axes = figure.subplots()
    _draw_reward(axes, train)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=ACCURACY, lw=2, marker="o", ms=5, label="held-out accuracy")
        _annotate_ends(axes, held_out)
    _dress(axes, title, [value for _, value in train + held_out])
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished)


def _draw_reward(axes: Axes, train: Sequence[tuple[int, float]]) -> None:
    if not train:
        return
    steps, rewards = zip(*train, strict=True)
    if len(train) <= 12:
        axes.plot(steps, rewards, color=REWARD, lw=1.5, marker=".", label="training reward")
        return
    axes.plot(steps, rewards, color=REWARD, lw=0.8, alpha=0.35)
    window = [rewards[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(rewards))]
    means = [sum(part) / len(part) for part in window]
    axes.plot(steps, means, color=REWARD, lw=2, label=f"training reward, mean of {SMOOTHING} steps")


def _annotate_ends(axes: Axes, held_out: Sequence[tuple[int, float]]) -> None:
    for step, value in {held_out[0], held_out[-1]}:
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            color=ACCURACY,
            fontsize=11,
            fontweight="bold",
        )


def _dress(axes: Axes, title: str, values: Sequence[float]) -> None:
    axes.set_title(title, fontsize=13, loc="left")
    axes.set_xlabel("step (version of the weights)", fontsize=12)
    axes.set_ylabel("mean reward, accuracy", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if values and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(0, 1.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.8)
    axes.set_axisbelow(True)
    if values:
        axes.legend(loc="lower right", fontsize=11, frameon=False)
