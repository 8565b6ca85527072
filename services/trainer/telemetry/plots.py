"""The plots of a run, drawn with matplotlib: the page of curves, the learning curve, and the tokens of an alarm."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import io
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headrace.base.files import atomic_write
from headrace.base.printable import printable
from headrace.run.findings import long_wait
from headrace.run.headlines import accuracy_name, alarms, build_changes, follows_start, seconds_per_step
from headrace.run.history import CURVES, Metric
from headrace.run.journal import JOURNAL, Kind, Line, iter_journal, surviving

from .alarm import mean_errors

if TYPE_CHECKING:
    from ..learning.batch import Batch

log = logging.getLogger(__name__)

COLOURS = ("#4477aa", "#cc6677", "#228833", "#b8860b", "#7a5195", "#2a9d9d")
ALARM_COLOUR = "#b3261e"
GREY = "#888888"  # legible on white and on black
POINTS = 200  # per curve of the page; a longer curve shows the means of this many parts
SMOOTHING = 5  # steps of the learning curve's running mean
CHANGES = 5  # the newest changes of builds, which the page names
# What the learning curve and the summary need of every line.
OUTLINE = ("reward", "accuracy", "partial_credit", "timing/train/total_step_time", "efficiency/init/total_s")
SAME = 1e-6  # values with a smaller relative difference are drawn as one: no ticks could distinguish them
# A value this many times further from the median of its curve than nine tenths of the others lies beyond the axis, which it would flatten;
# unless it is within `ORDINARY` of the median: shares, rewards and probabilities are always on the axis.
FAR, ORDINARY = 1000.0, 10.0
NARROW = 0.06  # a smaller share of a picture's width gets no label

SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
mpl.rcParams["svg.fonttype"] = "none"  # text stays text: small, and in the page's own font

# What matplotlib has freed stays with the thread that drew. With a pool's threads in turn, the trainer would grow by 12 MB for each.
_DRAWING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drawing")
P = ParamSpec("P")
T = TypeVar("T")


async def on_drawing_thread(draw: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `draw` returns, called on the one thread that draws."""
    return await asyncio.wrap_future(_DRAWING.submit(draw, *args, **kwargs))


@dataclasses.dataclass(frozen=True)
class Curve:
    """A `metric` that ends in `/<…>` stands for all metrics that match it, each with its own name after the label."""

    label: str
    metric: str
    kind: Kind = "train"


@dataclasses.dataclass(frozen=True)
class Chart:
    title: str
    note: str
    curves: tuple[Curve, ...]
    limit: float | None = None  # a line that should not be crossed
    # without the first step after each start of a trainer
    skips_start: bool = False
    of_rewards: bool = False  # with a dotted line where an environment changed its build


CHARTS = (
    Chart("Reward", "of training batches, and on held-out prompts", (
        Curve("reward", "reward"), Curve("accuracy", "accuracy", "validation")), of_rewards=True),
    Chart("Reward components", "means in training batches", (Curve("", "reward/<component>"),), of_rewards=True),
    Chart("Reward components", "means on held-out prompts", (Curve("", "reward/<component>", "validation"),)),
    Chart("Spread of rewards", "standard deviation over the batch", (
        Curve("reward", "reward_std"), Curve("", "reward_std/<component>")), of_rewards=True),
    Chart("Groups without spread", "share of groups whose rewards are all equal: they teach nothing", (
        Curve("share", "groups_without_spread"),)),
    Chart("Length of completions", "tokens", (Curve("mean", "mean_gen_tokens_per_sample"), Curve("longest", "max_gen_tokens_per_sample"))),
    Chart("Calls of an episode", "by environment", (Curve("", "episode_calls/<environment>"),)),
    Chart("Cut off at the limit", "share of completions", (
        Curve("training", "truncation_rate"), Curve("validation", "truncation_rate", "validation"))),
    Chart("Trainer against inference", "1 is agreement; it grows with the age of the data", (
        Curve("all", "token_mult_prob_error"), Curve("current weights", "on_policy_token_mult_prob_error")), limit=1.05),
    Chart("Trainer against inference, KL", "nats", (Curve("gen_kl_error", "gen_kl_error"), Curve("policy_kl_error", "policy_kl_error"))),
    Chart("Age of the data", "steps", (Curve("mean", "avg_trajectory_age"), Curve("oldest", "max_trajectory_age"))),
    Chart("Failed prompts", "since the step before", (Curve("failed", "failed_prompts"),)),
    Chart("Entropy", "nats a token", (Curve("entropy", "entropy"),)),
    Chart("Baselines", "% of trajectories whose group has a mean reward of", (
        Curve("0", "baseline_reward/pct_0"), Curve("1", "baseline_reward/pct_1"), Curve("anything else", "baseline_reward/pct_mixed"))),
    Chart("Gradient norm", "before clipping", (Curve("policy", "grad_norm"), Curve("value model", "critic/grad_norm"))),
    Chart("Clipped tokens", "share", (Curve("below", "clip_fraction_low"), Curve("above", "clip_fraction_high"))),
    Chart("KL to the reference", "nats", (Curve("kl_penalty", "kl_penalty"),)),
    Chart("Explained variance", "of the value model", (Curve("explained", "critic/explained_var"),)),
    Chart("Time of a step", "seconds; without the first after a start", (
        Curve("whole", "timing/train/total_step_time"), Curve("training", "timing/train/policy_training"),
        Curve("waiting", "timing/train/exposed_generation"), Curve("refit", "timing/train/weight_sync"),
        Curve("validation", "timing/train/validation"), Curve("checkpoint", "timing/train/checkpointing")), skips_start=True),
    Chart("What the trainer waited for", "seconds of a step; without the first after a start", (
        Curve("generation", "timing/train/wait_for_generation"), Curve("scores", "timing/train/wait_for_scores")), skips_start=True),
    Chart("Scoring", "seconds a trajectory, by environment", (
        Curve("waiting for", "scoring_wait/<environment>"), Curve("in", "scoring_time/<environment>"))),
    Chart("Throughput", "tokens a second, prompts included; without the first step after a start", (
        Curve("whole run", "performance/tokens_per_sec"), Curve("generation", "performance/generation_tokens_per_sec"),
        Curve("training", "performance/training_worker_group_tokens_per_sec")), skips_start=True),
    Chart("Model FLOP utilisation", "share of what the device can do", (Curve("training", "performance/train_fp_utilization"),)),
)  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --faint: #6b6b6b; --line: #d8d8d8; --card: #ffffff; --page: #f4f4f2 }
@media (prefers-color-scheme: dark) { :root { --text: #ececec; --faint: #a0a0a0; --line: #444; --card: #242424; --page: #181818 } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 24px; }
h1 { font-size: 20px; margin: 0 0 2px } a { color: inherit } p { margin: 0 0 16px; color: var(--faint) }
.alarm { color: #ffffff; background: #b3261e; padding: 8px 12px; border-radius: 6px; display: inline-block }
.failures { color: var(--text); border-left: 3px solid #b3261e; padding: 2px 10px; overflow-wrap: anywhere; white-space: pre-line }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 14px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px }
h2 { font-size: 14px; margin: 0 } .note { color: var(--faint); font-size: 12px; font-weight: 400 }
.key { font-size: 12px; margin-right: 12px; white-space: nowrap }
.key i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 3px 0 }
svg { width: 100%; height: auto; display: block } svg text { font-family: system-ui, sans-serif !important }
"""


def html_page(title: str, body: str, *, style: str = "", head: str = "") -> str:
    """Return a whole HTML page. `title` is text; the rest is HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}<title>{safe(title)}</title>'
        f"<style>{STYLE}{style}</style></head><body><h1>{safe(title)}</h1>{body}</body></html>\n"
    )


def safe(text: str) -> str:
    """Return text of unknown origin as HTML: without markup, and with control characters escaped as in a terminal."""
    return html.escape(printable(text, keep="\n\t"))


# -- the page of curves ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shown:
    """What the pictures show of a run's surviving history: its `lines`, of which neighbours are one, and an `outline` of every line."""

    lines: Sequence[Line]
    outline: Sequence[Line]


def read_shown(journal: Path) -> Shown:
    """Read what the pictures show. What is held meanwhile hardly grows with the number of steps.

    Of each kind at most about `POINTS` lines are returned, each with the finite means of its neighbours' metrics, at the last of their
    steps. The newest, and the first after each start, stay alone. A line of the `outline` has only the metrics in `OUTLINE`.
    """
    outlines: list[Line] = []
    builds: dict[str, list[str]] = {}
    for line in iter_journal(journal):
        if line.builds and line.builds != builds:
            builds = line.builds
        metrics = {name: line.metrics[name] for name in OUTLINE if name in line.metrics}
        outlines.append(dataclasses.replace(line, metrics=metrics, orders=[], builds=builds if line.builds else {}))
    kept = surviving(outlines)
    part_of: dict[int, int] = {}  # by outline: the first line of its part
    for kind in ("train", "validation"):
        own = [id(line) for line in kept if line.kind == kind]
        alone = {id(line) for line in kept if follows_start(line.metrics)} | {*own[-1:]}
        others = [each for each in own if each not in alone]
        for part in np.array_split(np.arange(len(others)), POINTS):
            part_of |= {others[place]: others[part[0]] for place in part}
        part_of |= {each: each for each in own if each in alone}
    parts: dict[int, _Part] = {}
    for outline, line in zip(outlines, iter_journal(journal), strict=False):
        if (first := part_of.get(id(outline))) is not None:
            part = parts.pop(first, _Part())
            part.add(line)
            parts[first] = part  # a line alone may be between those of a part
    return Shown([part.line() for part in parts.values()], kept)


class _Part:
    """Neighbouring lines of one kind, as one."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lines = 0

    def add(self, line: Line) -> None:
        self._newest, self._lines = line, self._lines + 1
        for name, value in line.metrics.items():
            if math.isfinite(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[sys.intern(name)] = total + value, count + 1

    def line(self) -> Line:
        if self._lines == 1:
            return self._newest
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return dataclasses.replace(self._newest, metrics=means)


def render_page(shown: Shown, title: str, failures: str = "") -> str:
    """Return the page of curves: one HTML file without scripts or network access. It takes about a second for long runs, because matplotlib
    draws each chart. `failures` describes prompts that failed and damaged checkpoints, a line each."""
    lines = shown.lines
    changes = build_changes((line.step, line.builds) for line in shown.outline)
    cards = "".join(_card(chart, lines, [step for step, _ in changes]) for chart in CHARTS)
    builds = "".join(f"<p>{html.escape(printable(change))}</p>" for _, change in changes[-CHANGES:])
    train = [line for line in lines if line.kind == "train"]
    alarm = "".join(
        f'<p class="alarm">{html.escape(warning)}</p>'
        for warning in (alarms(train[-1].step, train[-1].metrics) if train else ())
    )
    text = html.escape(printable(failures, keep="\n"))
    failed = f'<p class="failures">{text}</p>' if failures else ""
    main = f"<main>{cards or '<p>No step has been trained yet.</p>'}</main>"
    return html_page(title, f"<p>{summary(shown.outline, lines)}</p>{alarm}{failed}{builds}{main}")


def write_page(shown: Shown, path: Path, title: str, failures: str = "") -> None:
    with atomic_write(path) as unfinished:
        unfinished.write_text(render_page(shown, title, failures), encoding="utf-8")


def write_curves(folder: Path, run_id: str) -> None:
    """Write the page of curves of a run that is down into its folder, from its journal."""
    write_page(read_shown(folder / JOURNAL), folder / CURVES, f"Headrace, run {run_id}")


def write_comparison(histories: Mapping[str, Sequence[Line]], metrics: Sequence[Metric], path: Path) -> None:
    """Write one HTML file with a chart for each curve that any of the runs has. The curves are those of `metrics`, or without any, those of
    the page of curves. `histories` are by run name."""
    every_line = [line for lines in histories.values() for line in lines]
    wanted = [(chart, curve) for chart in CHARTS for curve in _label(chart.curves, every_line)]
    if metrics:
        wanted = [(Chart(name, kind, ()), Curve("", name, kind)) for kind, name in metrics]
    cards = []
    for chart, curve in wanted:
        drawn = [(run, points) for run, lines in histories.items() if (points := _points(curve, _select(chart, lines)))]
        note = ", ".join(part for part in (curve.label, chart.note) if part)
        cards.append(_draw_card(chart.title, note, drawn, chart.limit))
    facts = "".join(f"<p>{html.escape(run)}: {html.escape(summary(lines))}</p>" for run, lines in histories.items())
    page = html_page("Headrace, " + " and ".join(histories), f"{facts}<main>{''.join(cards)}</main>")
    with atomic_write(path) as unfinished:
        unfinished.write_text(page, encoding="utf-8")


def summary(lines: Sequence[Line], newest_lines: Sequence[Line] | None = None) -> str:
    """Return one line with steps, newest reward, newest accuracy, seconds per step, and what the trainer waited for. If `lines` are only an
    outline, `newest_lines` has all metrics of the newest step."""
    train = [line for line in lines if line.kind == "train"]
    if not train:
        return "no step has been trained yet"
    newest = train[-1]
    parts = [f"{len(train)} steps, the last one {newest.step}", f"reward {newest.metrics['reward']:.3f}"]
    accuracies = [line for line in lines if line.kind == "validation" and "accuracy" in line.metrics]
    if accuracies:
        metrics = accuracies[-1].metrics
        parts.append(f"held-out {accuracy_name(metrics)} {metrics['accuracy']:.3f} at version {accuracies[-1].step}")
    if (seconds := seconds_per_step(line.metrics for line in train)) is not None:
        parts.append(f"{seconds:.1f} s a step (median)")
    whole = [line for line in newest_lines or lines if line.kind == "train"]
    if waited := long_wait(whole[-1].metrics):
        parts.append(html.escape(waited))
    return ", ".join(parts)


def _card(chart: Chart, lines: Sequence[Line], changes: Sequence[int] = ()) -> str:
    """Draw one chart with its legend, which shows the newest values. Returns "" if no curve has a value. `changes` are steps with a new
    build."""
    lines = _select(chart, lines)
    found = [(curve.label, points) for curve in _label(chart.curves, lines) if (points := _points(curve, lines))]
    try:
        return _draw_card(chart.title, chart.note, found, chart.limit, changes if chart.of_rewards else ())
    except Exception as error:  # a chart that can't be drawn must not stop the run
        log.exception("%s can't be drawn", chart.title)
        note = html.escape(
            printable(f"can't be drawn, its values are in metrics.jsonl: {type(error).__name__}: {error}")
        )
        return f'<section><h2>{html.escape(chart.title)}</h2><p class="failures">{note}</p></section>'


def _select(chart: Chart, lines: Sequence[Line]) -> Sequence[Line]:
    """Return the lines that a chart shows."""
    if not chart.skips_start:
        return lines
    return [line for line in lines if not follows_start(line.metrics)]


def _draw_card(
    title: str,
    note: str,
    found: Sequence[tuple[str, Sequence[tuple[int, float]]]],
    limit: float | None,
    marks: Sequence[int] = (),
) -> str:
    """Draw a chart of these curves, each a label and points. `marks` are steps with a dotted line."""
    if not found:
        return ""
    drawn = found[: len(COLOURS)]
    if len(found) > len(drawn):
        note += f"; {len(found) - len(drawn)} more are in metrics.jsonl"
    low, high = _shown_range(points for _, points in drawn)
    values = [value for _, points in drawn for _, value in points]
    # a limit far above every value would only flatten the curves
    if limit is not None and max(values) <= 1 + (limit - 1) / 3:
        limit = None
    if limit is not None:
        high = max(high, limit)
    if high - low <= SAME * max(abs(low), abs(high)):
        low, high = low - 0.1 * abs(low), high + 0.1 * abs(high) or 1.0
    ticks = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    beyond = sum(not ticks[0] <= value <= ticks[-1] for value in values)
    if beyond:
        note += f"; {beyond} values lie beyond the axis (triangles)"
    figure = Figure(figsize=(4.2, 1.9))
    axes = figure.subplots(gridspec_kw={"left": 0.125, "right": 0.975, "top": 0.95, "bottom": 0.13})
    legend = []
    for place, ((label, points), colour) in enumerate(zip(drawn, COLOURS, strict=False)):
        size = 5 if len(points) <= 40 else 2
        style = {"color": colour, "lw": 1.4, "marker": ".", "ms": size, "clip_on": False, "gid": f"curve{place}"}
        _plot(axes, points, ticks[0], ticks[-1], **style)
        newest = points[-1][1]
        key = f'<i style="background:{colour}"></i>{html.escape(label)} <b>{newest:.4g}</b>'
        legend.append(f'<span class="key">{key}</span>')
    if limit is not None:
        axes.axhline(limit, color=ALARM_COLOUR, lw=1, ls="--")
    for step in marks:
        axes.axvline(step, color=GREY, lw=1, ls=":")
    axes.set_yticks(ticks, [f"{tick:.4g}" for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    first, last = min(points[0][0] for _, points in drawn), max(points[-1][0] for _, points in drawn)
    last = max(last, first + 1)
    axes.set_xlim(first, last)
    axes.set_xticks([first, last], [f"step {first}", f"{last}"])
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.get_xticklabels()[1].set_horizontalalignment("right")
    # grey is legible on a light and on a dark page
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=GREY, labelsize=7.5, length=0)
    axes.grid(axis="y", color=GREY, alpha=0.3, lw=0.7)
    hover = {
        f"curve{place}": [f"step {step}: {value:.4g}" for step, value in points]
        for place, (_, points) in enumerate(drawn)
    }
    return (
        f'<section><h2>{html.escape(title)} <span class="note">{html.escape(note)}</span></h2>'
        f"{_svg(figure, hover)}{''.join(legend)}</section>"
    )


def _shown_range(curves: Iterable[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Return the least and the greatest of the curves' values that are not far from the others of their curve (`FAR`)."""
    shown: list[float] = []
    for points in curves:
        values = [value for _, value in points]
        median = min(statistics.median_low(values), statistics.median_high(values), key=abs)
        distances = sorted(abs(value - median) for value in values)
        usual = distances[int(0.9 * (len(distances) - 1))] or abs(median)
        reach = max(FAR * usual, ORDINARY)
        shown += [value for value in values if abs(value - median) <= reach]
    return min(shown), max(shown)


def _plot(axes: Axes, points: Sequence[tuple[float, float]], low: float, high: float, **style: Any) -> None:
    """Plot a curve within `low` and `high`. A point beyond them is at the edge, marked by a triangle."""
    axes.plot([step for step, _ in points], [min(max(value, low), high) for _, value in points], **style)
    for edge, marker, beyond in (
        (high, "^", [step for step, value in points if value > high]),
        (low, "v", [step for step, value in points if value < low]),
    ):
        if beyond:
            axes.plot(beyond, [edge] * len(beyond), marker, color=style["color"], ms=6, clip_on=False)


def _label(curves: Sequence[Curve], lines: Sequence[Line]) -> Iterator[Curve]:
    """Yield the curves with the labels that are shown. A name ending in `/<…>` becomes one curve for each metric that matches it."""
    for curve in curves:
        family, wild, _ = curve.metric.partition("/<")
        if not wild:
            yield _rename(curve, lines)
            continue
        names = {
            name for line in lines if line.kind == curve.kind for name in line.metrics if name.startswith(f"{family}/")
        }
        for name in sorted(names):
            yield dataclasses.replace(
                curve, metric=name, label=f"{curve.label} {name.removeprefix(f'{family}/')}".strip()
            )


def _rename(curve: Curve, lines: Sequence[Line]) -> Curve:
    """Give the curve of `accuracy` its right label."""
    if curve.metric != "accuracy":
        return curve
    partial = {line.metrics.get("partial_credit", 0.0) for line in lines if line.kind == "validation"}
    return dataclasses.replace(curve, label=f"held-out {accuracy_name({'partial_credit': max(partial, default=0.0)})}")


def _points(curve: Curve, lines: Sequence[Line]) -> list[tuple[int, float]]:
    """Return the finite (step, value) points. Beyond `POINTS`, they are means of neighbours, each at the last of their steps."""
    found = [
        (line.step, value)
        for line in lines
        if line.kind == curve.kind and math.isfinite(value := line.metrics.get(curve.metric, math.nan))
    ]
    parts = [found[part[0] : part[-1] + 1] for part in np.array_split(np.arange(len(found)), POINTS) if part.size]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _svg(figure: Figure, hover: dict[str, list[str]]) -> str:
    """Return the figure as an `<svg>` element. `hover` has the tooltip of each point of each line, by the line's gid."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    for gid, texts in hover.items():
        for point, text in zip(root.iterfind(f".//*[@id='{gid}']//{{{SVG}}}use"), texts, strict=True):
            ElementTree.SubElement(point, f"{{{SVG}}}title").text = text
    return ElementTree.tostring(root, encoding="unicode")


# -- the learning curve ------------------------------------------------------------------------------------------------


def draw_curve(lines: Sequence[Line], path: Path, title: str) -> None:
    """Write a PNG, 1600 x 900 pixels: training reward and held-out accuracy of a run's surviving history.

    The reward of a step is drawn at the version that the step started from. With more than a dozen steps, single values are pale, and a
    running mean over the last `SMOOTHING` steps is drawn over them.
    """
    validations = [line for line in lines if line.kind == "validation" and "accuracy" in line.metrics]
    train, held_out = (
        sorted(
            (line.step, value)
            for line in lines
            if line.kind == kind and math.isfinite(value := line.metrics.get(name, math.nan))
        )
        for kind, name in (("train", "reward"), ("validation", "accuracy"))
    )
    reward, accuracy = COLOURS[:2]
    newest = validations[-1].metrics if validations else {}
    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    axes = figure.subplots()
    low, high = _shown_range(curve for curve in (train, held_out) if curve) if train or held_out else (0.0, 1.0)
    if len(train) > 12:
        _plot(axes, train, low, high, color=reward, lw=0.8, alpha=0.35)
        windows = [train[max(0, i - SMOOTHING + 1) : i + 1] for i in range(len(train))]
        # of what is shown: one value beyond the axis must not move its neighbours there
        means = [sum(min(max(value, low), high) for _, value in window) / len(window) for window in windows]
        label = f"training reward, mean of {SMOOTHING} steps"
        axes.plot([step for step, _ in train], means, color=reward, lw=2, label=label)
    elif train:
        _plot(axes, train, low, high, color=reward, lw=1.5, marker=".", label="training reward")
    if held_out:
        label = f"held-out {accuracy_name(newest)}"
        _plot(axes, held_out, low, high, color=accuracy, lw=2, marker="o", ms=5, label=label)
        for step, value in {held_out[0], held_out[-1]}:
            edge = (step, min(max(value, low), high))
            _annotate(
                axes,
                edge,
                f"{value:.2f}" if abs(value) < FAR else f"{value:.2g}",
                9,
                color=accuracy,
                fontsize=11,
                fontweight="bold",
            )
    axes.set_title(title, fontsize=13, loc="left")
    axes.set_xlabel("step (version of the weights)", fontsize=12)
    axes.set_ylabel("mean reward" if newest.get("partial_credit") else "mean reward, accuracy", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", lw=0.8)
    if train or held_out:
        axes.legend(loc="lower right", fontsize=11, frameon=False)
        if low >= 0 and high <= 1:
            axes.set_ylim(0, 1.08)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished)


# -- the tokens of an alarm --------------------------------------------------------------------------------------------


def draw_disagreement(batch: Batch, chosen: Sequence[int], step: int, path: Path) -> None:
    """Write a PNG of the chosen trajectories, one below the other: log-probabilities of engine and trainer, their difference, and the age
    of the weights that wrote each span."""
    figure = Figure(figsize=(9, 1 + 2.4 * len(chosen)), dpi=140, layout="constrained")
    rows = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    errors = mean_errors(batch)
    for axes, i in zip(rows, chosen, strict=True):
        _draw_tokens(axes, batch, i, step)
        axes.set_title(f"{batch.name(i)}, mean exp|difference| {errors[i]:.3f}", fontsize=9, loc="left")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper right", fontsize=9, frameon=False, ncols=3)
    rows[-1].set_xlabel("token of the completion")
    figure.suptitle(f"Step {step}: where trainer and inference disagree most", fontsize=12, x=0.01, ha="left")
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished)


def _draw_tokens(axes: Axes, batch: Batch, i: int, step: int) -> None:
    trajectory = batch.trajectories[i].flat()
    rollout, old = (batch.over_completion(i, column) for column in (batch.rollout_logprobs, batch.old_logprobs))
    difference = np.abs(rollout - old)
    places = np.arange(difference.size)
    axes.plot(places, rollout, color=COLOURS[0], lw=1.2, marker=".", ms=3, label="inference engine")
    axes.plot(places, old, color=COLOURS[2], lw=1.2, ls="--", marker=".", ms=3, label="trainer")
    axes.plot(places, difference, color=COLOURS[1], lw=1.4, marker=".", ms=3, label="|difference|")
    finite = [
        [(place, value) for place, value in enumerate(curve.tolist()) if math.isfinite(value)]
        for curve in (rollout, old, difference)
    ]
    if any(finite):
        low, high = _shown_range(curve for curve in finite if curve)
        axes.set_ylim(low - 0.05 * (high - low) - SAME, high + 0.15 * (high - low) + SAME)
    if finite[2]:
        peak, largest = max(finite[2], key=lambda point: point[1])
        _annotate(axes, (peak, min(largest, high)), f"{largest:.3g}", 4, color=COLOURS[1], fontsize=8)
    for place, span in enumerate(trajectory.spans):
        axes.axvspan(span.start - 0.5, span.end - 0.5, color="#000000", alpha=0.03 if place % 2 else 0.0, lw=0)
        if span.end - span.start > NARROW * difference.size:
            label = f" age {step - span.version}"
            axes.text(span.start, axes.get_ylim()[0], label, fontsize=7, color=GREY, va="bottom")
    axes.set_ylabel("nats", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _annotate(axes: Axes, point: tuple[float, float], text: str, above: int, **style: object) -> None:
    axes.annotate(text, point, textcoords="offset points", xytext=(0, above), ha="center", **style)  # type: ignore[arg-type]
