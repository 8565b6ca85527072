"""The page of a run's curves."""

from __future__ import annotations

import itertools
import math
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from headrace.run.journal import Journal, Kind, Line, surviving
from headrace.run.metric_names import unknown
from headrace_services.trainer.telemetry import plots
from headrace_services.trainer.telemetry.plots import (
    CHANGES,
    CHARTS,
    POINTS,
    Shown,
    draw_curve,
    draw_disagreement,
    read_shown,
    render_page,
    write_page,
)
from tests.support.trainer import batch, trajectory

POINT = re.compile(r'<use [^>]*x="([^"]+)" y="([^"]+)"[^>]*><title>([^<]+)</title>')
FRAME = re.compile(r'<svg [^>]*viewBox="0 0 ([0-9.]+) ([0-9.]+)"')
TICK = re.compile(r"<text [^>]*>([^<]+)</text>")


def line(step: int, kind: Kind = "train", **metrics: float) -> Line:
    return Line(kind, step, "t", 0.0, metrics)


class Strict(HTMLParser):
    """Every tag that needs it is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def render(lines: Sequence[Line], *rest: Any, **named: Any) -> str:
    return render_page(Shown(lines, lines), *rest, **named)


def parsed(page: str) -> Strict:
    parser = Strict()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_every_curve_is_of_a_metric_that_there_is() -> None:
    assert unknown(curve.metric for chart in CHARTS for curve in chart.curves) == []


def test_a_page_needs_nothing_from_elsewhere_and_shows_what_there_is() -> None:
    lines = [line(step, reward=step / 10, token_mult_prob_error=1.001) for step in range(10)]
    lines.append(line(9, "validation", accuracy=0.75))
    page = render(lines, "run <b>")
    parser = parsed(page)
    assert not {"script", "img", "link", "iframe"} & set(parser.seen)
    assert parser.addresses
    assert all(address.startswith("#") for address in parser.addresses)
    assert "://" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "run &lt;b&gt;" in page
    assert parser.seen.count("section") == 2
    assert [title for _, _, title in POINT.findall(page)] == [
        *(f"step {step}: {step / 10:.4g}" for step in range(10)),
        "step 9: 0.75",
        *(f"step {step}: 1.001" for step in range(10)),
    ]
    assert "reward 0.900, held-out accuracy 0.750 at version 9" in page


def test_a_run_without_a_step_has_a_page() -> None:
    page = render([], "run")
    parsed(page)
    assert "No step" in page


def test_an_alarm_stands_above_the_curves() -> None:
    assert "disagree" in render([line(3, reward=0.0, train_inference_alarm=1.0)], "run")
    assert "disagree" not in render([line(3, reward=0.0, train_inference_alarm=0.0)], "run")


def test_the_page_says_what_prompts_failed_of() -> None:
    page = render([line(3, reward=0.0, failed_prompts=2.0)], "run", "2 prompts failed: 2 x <b>\x1b[2J")
    assert r"2 prompts failed: 2 x &lt;b&gt;\x1b[2J" in page
    assert "Failed prompts" in page
    assert 'class="failures"' not in render([line(3, reward=0.0)], "run")


def test_the_page_says_where_an_environment_went_on_by_another_build() -> None:
    def history(*builds: str) -> list[Line]:
        steps = [line(step, reward=0.5, loss=0.5) for step in range(len(builds))]
        return [replace(each, builds={"exact": [build]}) for each, build in zip(steps, builds, strict=True)]

    dotted = "stroke-dasharray: 1,"
    page = render(history("1", "1", "<b>\x1b[2J"), "run")
    assert r"step 2: environment exact scores with build &lt;b&gt;\x1b[2J, after 1" in page
    assert page.count(dotted) == 1  # in the chart of rewards
    same = render(history("1", "1", "1"), "run")
    assert dotted not in same
    assert "scores with build" not in same
    often = render(history(*map(str, range(20))), "run")
    assert often.count("scores with build") == CHANGES
    assert "step 19: environment exact scores with build 19, after 18" in often


def test_values_that_are_not_finite_are_left_out() -> None:
    page = render([line(0, reward=math.nan, loss=1.0), line(1, reward=math.inf)], "run")
    assert "<section>" not in page


@pytest.mark.parametrize("far", [4e28, -1e300, 1e6])
def test_a_value_far_from_the_others_is_marked_beyond_the_axis(far: float) -> None:
    values = [0.5, 0.75, far, 0.25, 1.0]
    page = render([line(step, reward=value) for step, value in enumerate(values)], "run")
    assert max(map(float, TICK.findall(page)[2:])) <= 1.0
    assert "1 values lie beyond the axis" in page
    points = POINT.findall(page)
    assert points[2][2] == f"step 2: {far:.4g}"
    heights = [float(y) for _, y, _ in points]
    assert heights[2] == (min(heights) if far > 0 else max(heights))


@pytest.mark.parametrize(
    "values", [[0.0, 0.0, 0.0, 0.0, 9.0], [1e-4, 1.0], [2.0, 2.1, 2.0, 90.0], [4e28, 5e28, 4e28], [1e3, 2e3, 9e5]]
)
def test_a_value_that_is_not_far_stays_on_the_axis(values: list[float]) -> None:
    page = render([line(step, reward=0.0, entropy=value) for step, value in enumerate(values)], "run")
    assert "beyond the axis" not in page
    assert "be drawn" not in page


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The pictures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *rest: Any, **named: Any) -> None:
        figures.append(figure)
        save(figure, *rest, **named)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def test_the_learning_curve_is_drawn_of_any_values(tmp_path: Path, drawn: list[Figure]) -> None:
    rewards = [0.5, math.nan, 4e28, -math.inf, *[0.6] * 12]
    lines = [line(step, reward=value) for step, value in enumerate(rewards)]
    lines += [line(step, "validation", accuracy=value) for step, value in enumerate((math.nan, 0.5, 1e28))]
    for number, some in enumerate((lines, lines[1:2], [])):
        draw_curve(some, tmp_path / f"{number}.png", "run")
        assert (tmp_path / f"{number}.png").stat().st_size > 0
    assert drawn[0].axes[0].get_ylim()[1] < 2


def test_the_tokens_of_an_alarm_are_drawn_of_any_values(tmp_path: Path, drawn: list[Figure]) -> None:
    of_tokens = batch([trajectory([1], [2, 3, 4, 5], index=index) for index in range(2)])
    # -inf where top-k or top-p leaves a token out, NaN in a trajectory where it was not computed
    of_tokens.old_logprobs = np.array([-1.0, -math.inf, -1e28, math.nan, *[math.nan] * 4], np.float32)
    draw_disagreement(of_tokens, [0], 0, tmp_path / "picture.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert -100 < low < high < 100


@pytest.mark.parametrize(("error", "drawn"), [(1.001, False), (1.04, True), (1.2, True)])
def test_the_limit_is_drawn_where_values_come_near_it(error: float, drawn: bool) -> None:
    page = render([line(step, reward=0.0, token_mult_prob_error=error) for step in range(3)], "run")
    assert ("stroke-dasharray: 3" in page) is drawn


def test_a_chart_that_can_not_be_drawn_says_so_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(title: str, *rest: object) -> str:
        if title == "Reward":
            raise ValueError("no <ticks>")
        return f"<section>{title}</section>"

    monkeypatch.setattr(plots, "_draw_card", drawn)
    page = render([line(0, reward=1.0, entropy=1.0)], "run")
    assert "ValueError: no &lt;ticks&gt;" in page
    assert "<section>Entropy</section>" in page


def test_a_long_run_is_drawn_by_means() -> None:
    page = render([line(step, reward=float(step % 2)) for step in range(10 * POINTS)], "run")
    points = POINT.findall(page)
    assert len(points) == POINTS
    assert points[-1][2] == f"step {10 * POINTS - 1}: 0.5"


def _nearly(value: float) -> st.SearchStrategy[list[float]]:
    """Values that differ by little more than the last digit, as metrics do that should be equal."""
    return st.lists(st.floats(-1e-5, 1e-5).map(lambda part: value * (1 + part)), min_size=1, max_size=20)


@given(st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=20) | st.floats(-1e38, 1e38).flatmap(_nearly))
@example([1.0000001637525064, 1.000000163758683])
@example([*(0.1 * step for step in range(19)), 1e9])  # far beyond the others: at the edge
def test_every_value_lies_within_the_frame(values: list[float]) -> None:
    page = render([line(step, reward=value) for step, value in enumerate(values)], "run")
    frame = FRAME.search(page)
    assert frame is not None
    points = POINT.findall(page)
    assert len(points) == len(values)
    for x, y, _ in points:
        assert 0 <= float(x) <= float(frame[1])
        assert 0 <= float(y) <= float(frame[2])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (0.1, 0.9, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (5.0, 5.0, ["4.4", "4.6", "4.8", "5", "5.2", "5.4", "5.6"]),
        (0.0, 0.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(low: float, high: float, ticks: list[str]) -> None:
    page = render([line(3, reward=low), line(17, reward=high)], "run")
    assert TICK.findall(page) == ["step 3", "17", *ticks]


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    write_page(Shown([line(0, reward=0.5)], [line(0, reward=0.5)]), tmp_path / "curves.html", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.html"]


def test_each_reward_component_has_a_curve_under_its_name() -> None:
    names = ["correct", "it's <b>", *(f"c{number}" for number in range(9))]
    lines = [line(step, **{f"reward/{name}": float(step) for name in names}) for step in range(3)]
    page = render([replace(one, metrics={"reward": 0.0, **one.metrics}) for one in lines], "run")
    parsed(page)
    assert "Reward components" in page
    assert "c0 <b>2</b>" in page
    assert "5 more are in metrics.jsonl" in page


def test_accuracy_is_called_by_what_it_is() -> None:
    steps = [line(0, reward=0.5), line(0, "validation", accuracy=0.5, partial_credit=0.25)]
    page = render(steps, "run")
    assert "0.500 at version 0" in page
    assert "held-out mean reward <b>0.5</b>" in page
    assert "accuracy" not in page


def test_the_first_step_after_a_start_does_not_flatten_what_took_time() -> None:
    name = "timing/train/wait_for_generation"
    steps = [line(step, reward=0.5, **{name: 100.0 if step in (0, 3) else 1.0}) for step in range(6)]
    lines = [
        replace(one, metrics=one.metrics | {"efficiency/init/total_s": 9.0}) if one.step in (0, 3) else one
        for one in steps
    ]
    titles = [title for _, _, title in POINT.findall(render(lines, "run"))]
    assert [title for title in titles if title.endswith((": 1", ": 100"))] == [
        f"step {step}: 1" for step in (1, 2, 4, 5)
    ]


def written(path: Path, steps: int, *, restarts: int = 0, validated: int = 0) -> Journal:
    """A journal of so many steps: the first after a start takes long, and each restart abandons the step before it."""
    journal, timeline = Journal(path / "metrics.jsonl", segment_bytes=200_000), "t0"
    starts = [(start + 1) * steps // (restarts + 1) for start in range(restarts)]
    for step in range(steps):
        first = {"efficiency/init/total_s": 9.0} if step == 0 else {}
        if step in starts:
            journal.append("train", step, timeline, {"reward": 1e9})
            timeline, first = f"t{step}", {"efficiency/init/total_s": 9.0}
            journal.append("rewind", step, timeline, {})
        times = {"timing/train/total_step_time": 99.0 if first else 1.0 + step % 2, **first}
        metrics = {"reward": float(step), "loss": math.nan if step % 3 == 0 else 1.0, **times}
        journal.append("train", step, timeline, metrics, builds={"math": ["1" if step < steps // 3 else "2"]})
        if validated and step % validated == 0:
            journal.append("validation", step, timeline, {"accuracy": step / steps})
    return journal


def test_a_short_run_is_shown_as_it_is(tmp_path: Path) -> None:
    journal = written(tmp_path, POINTS, restarts=3, validated=7)
    assert repr(read_shown(journal.path).lines) == repr(surviving(journal.read()))  # NaN is not itself


def test_a_long_run_is_drawn_by_means_and_its_text_stays_exact(tmp_path: Path) -> None:
    steps, restarts = 12 * POINTS, 4
    journal = written(tmp_path, steps, restarts=restarts, validated=50)
    shown, whole = read_shown(journal.path), surviving(journal.read())
    assert len([*tmp_path.glob("metrics.*.jsonl")]) > 1
    train = [line for line in shown.lines if line.kind == "train"]
    assert len(train) <= POINTS + restarts + 2
    assert [line for line in shown.lines if line.kind == "validation"] == [
        line for line in whole if line.kind == "validation"
    ]
    assert [line.step for line in shown.lines] == sorted(line.step for line in shown.lines)
    assert repr(shown.lines[-1]) == repr(whole[-1])
    starts = [line for line in train if "efficiency/init/total_s" in line.metrics]
    assert [line.metrics["timing/train/total_step_time"] for line in starts] == [99.0] * (restarts + 1)
    for earlier, line in itertools.pairwise(train):
        if earlier not in starts and line not in starts:
            assert line.metrics["reward"] == (earlier.step + 1 + line.step) / 2, "the mean of the steps between"
            assert line.metrics["loss"] == 1.0
    page, entire = render_page(shown, "run"), render(whole, "run")
    assert re.findall("<p>.*?</p>", page) == re.findall("<p>.*?</p>", entire)
    assert "scores with build 2" in page


def test_what_is_held_to_show_a_run_hardly_grows_with_its_steps(tmp_path: Path) -> None:
    def peak(steps: int) -> int:
        journal = Journal(tmp_path / f"{steps}.jsonl")
        for step in range(steps):
            journal.append("train", step, "t", {f"metric {number}": step / 7 for number in range(20)})
        tracemalloc.start()
        read_shown(journal.path)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return held

    short, long = peak(2 * POINTS), peak(12 * POINTS)
    assert (long - short) / (10 * POINTS) < 1000, "bytes a step; a line of 20 metrics takes 3,000"
