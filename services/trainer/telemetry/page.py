"""The main curves of a run as one HTML page: no scripts, nothing from elsewhere, so that it opens from a file as from a port."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence
from pathlib import Path

from services.trainer.files import atomic_write
from services.trainer.telemetry.journal import Kind, Line

CURVES = "curves.html"  # in the run's folder

COLOURS = ("#4477aa", "#cc6677", "#228833", "#b8860b", "#7a5195", "#2a9d9d")
# Drawn points of a curve: of longer ones, means of as many steps as it takes.
POINTS = 300
WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 8, 24


@dataclasses.dataclass(frozen=True)
class Curve:
    label: str
    metric: str
    kind: Kind = "train"


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    note: str
    curves: tuple[Curve, ...]
    limit: float | None = None  # a line that should not be crossed


CHARTS = (
    Chart("Reward", "of training batches, and on held-out prompts", (
        Curve("reward", "reward"), Curve("accuracy", "accuracy", "validation"))),
    Chart("Length of completions", "tokens", (Curve("mean", "mean_gen_tokens_per_sample"), Curve("longest", "max_gen_tokens_per_sample"))),
    Chart("Cut off at the limit", "share of completions", (
        Curve("training", "truncation_rate"), Curve("validation", "truncation_rate", "validation"))),
    Chart("Trainer against inference", "1 is agreement", (Curve("error", "token_mult_prob_error"),), limit=1.05),
    Chart("Trainer against inference, KL", "nats", (Curve("gen_kl_error", "gen_kl_error"), Curve("policy_kl_error", "policy_kl_error"))),
    Chart("Age of the data", "steps", (Curve("mean", "avg_trajectory_age"), Curve("oldest", "max_trajectory_age"))),
    Chart("Entropy", "nats a token", (Curve("entropy", "entropy"),)),
    Chart("Groups that teach", "% of trajectories, by baseline", (
        Curve("0", "baseline_reward/pct_0"), Curve("1", "baseline_reward/pct_1"), Curve("between", "baseline_reward/pct_mixed"))),
    Chart("Gradient norm", "before clipping", (Curve("policy", "grad_norm"), Curve("value model", "critic/grad_norm"))),
    Chart("Clipped tokens", "share", (Curve("below", "clip_fraction_low"), Curve("above", "clip_fraction_high"))),
    Chart("KL to the reference", "nats", (Curve("kl_penalty", "kl_penalty"),)),
    Chart("Explained variance", "of the value model", (Curve("explained", "critic/explained_var"),)),
    Chart("Time of a step", "seconds", (
        Curve("whole", "timing/train/total_step_time"), Curve("training", "timing/train/policy_training"),
        Curve("no batch ready", "timing/train/exposed_generation"), Curve("refit", "timing/train/weight_sync"),
        Curve("validation", "timing/train/validation"), Curve("checkpoint", "timing/train/checkpointing"))),
    Chart("Throughput", "tokens a second, prompts included", (
        Curve("whole run", "performance/tokens_per_sec"), Curve("generation", "performance/generation_tokens_per_sec"),
        Curve("training", "performance/training_worker_group_tokens_per_sec"))),
    Chart("Model FLOP utilisation", "share of what the device can do", (Curve("training", "performance/train_fp_utilization"),)),
)  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --faint: #6b6b6b; --line: #d8d8d8; --card: #ffffff; --page: #f4f4f2 }
@media (prefers-color-scheme: dark) { :root { --text: #ececec; --faint: #a0a0a0; --line: #444; --card: #242424; --page: #181818 } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 24px; }
h1 { font-size: 20px; margin: 0 0 2px } p { margin: 0 0 16px; color: var(--faint) }
.alarm { color: #ffffff; background: #b3261e; padding: 8px 12px; border-radius: 6px; display: inline-block }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 14px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px }
h2 { font-size: 14px; margin: 0 } .note { color: var(--faint); font-size: 12px; font-weight: 400 }
.key { font-size: 12px; margin-right: 12px; white-space: nowrap }
.key i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 3px 0 }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: var(--faint) }
.grid { stroke: var(--line); stroke-width: 1 } .limit { stroke: #b3261e; stroke-dasharray: 4 3 }
"""

Points = list[tuple[float, float]]


def render(lines: Sequence[Line], title: str, state: str, refresh_s: int | None = None) -> str:
    """The page of a run's surviving history. `state` says where it stands; with `refresh_s` a browser asks again that often."""
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    cards = "".join(card for chart in CHARTS if (card := _card(chart, lines)))
    train = [line for line in lines if line.kind == "train"]
    alarm = ""
    if train and train[-1].metrics.get("train_inference_alarm"):
        alarm = (
            f'<p class="alarm">Step {train[-1].step}: trainer and inference disagree; the trainer\'s log says how.</p>'
        )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}<title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><h1>{html.escape(title)}</h1><p>{html.escape(state)}</p>{alarm}"
        f"<main>{cards or '<p>No step has been trained yet.</p>'}</main></body></html>\n"
    )


def standing(lines: Sequence[Line]) -> str:
    """Where a history stands, in a line."""
    train = [line for line in lines if line.kind == "train"]
    if not train:
        return "no step has been trained yet"
    newest = train[-1]
    seconds = newest.metrics.get("timing/train/total_step_time")
    parts = [f"{len(train)} steps, the last one {newest.step}", f"reward {newest.metrics['reward']:.3f}"]
    accuracies = [line for line in lines if line.kind == "validation" and "accuracy" in line.metrics]
    if accuracies:
        parts.append(f"accuracy {accuracies[-1].metrics['accuracy']:.3f} at version {accuracies[-1].step}")
    if seconds is not None:
        parts.append(f"{seconds:.1f} s a step")
    return ", ".join(parts)


def write(lines: Sequence[Line], path: Path, title: str) -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(render(lines, title, standing(lines)), encoding="utf-8")


def _card(chart: Chart, lines: Sequence[Line]) -> str:
    """One chart; nothing where there are no values."""
    drawn = [(curve, points) for curve in chart.curves if (points := _points(curve, lines))]
    if not drawn:
        return ""
    keys = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{html.escape(curve.label)} <b>{_number(points[-1][1])}</b></span>'
        for (curve, points), colour in zip(drawn, COLOURS, strict=False)
    )
    picture = _picture([points for _, points in drawn], chart.limit)
    return f'<section><h2>{html.escape(chart.title)} <span class="note">{html.escape(chart.note)}</span></h2>{picture}{keys}</section>'


def _points(curve: Curve, lines: Sequence[Line]) -> Points:
    """(step, value), finite, in order; means of neighbours where there are too many."""
    found = [
        (float(line.step), float(line.metrics[curve.metric]))
        for line in lines
        if line.kind == curve.kind and math.isfinite(line.metrics.get(curve.metric, math.nan))
    ]
    size = math.ceil(len(found) / POINTS) or 1
    parts = [found[first : first + size] for first in range(0, len(found), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _picture(curves: Sequence[Points], limit: float | None) -> str:
    steps = [step for points in curves for step, _ in points]
    values = [value for points in curves for _, value in points]
    # a limit far above everything would flatten the curves
    if limit is not None and max(values) > 1 + (limit - 1) / 3:
        values.append(limit)
    else:
        limit = None
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first:.0f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{last:.0f}</text>')
    if limit is not None:
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>')
    for points, colour in zip(curves, COLOURS, strict=False):
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
        size = 2.5 if len(points) <= 40 else 1.0
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{size}" fill="{colour}">'
            f"<title>step {step:.0f}: {_number(value)}</title></circle>"
            for step, value in points
        ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers over [low, high]; 0 is among them where it is near."""
    if low > 0 and low < 0.35 * high:
        low = 0.0
    if high <= low:
        spread = abs(low) / 10
        low, high = (low - spread, high + spread) if spread else (0.0, 1.0)
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * 0.999)
    start = math.floor(low / step + 1e-9)
    return [place * step for place in range(start, math.ceil(high / step - 1e-9) + 1)]


def _number(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2g}"
