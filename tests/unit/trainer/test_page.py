"""The page of a run's curves."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.telemetry.journal import Kind, Line
from services.trainer.telemetry.metric_names import unknown
from services.trainer.telemetry.page import CHARTS, POINTS, _ticks, render, standing, write


def line(step: int, kind: Kind = "train", **metrics: float) -> Line:
    return Line(kind, step, "t", 0.0, metrics)


class Strict(HTMLParser):
    """Every tag that needs it is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


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
    page = render(lines, "run <b>", standing(lines))
    tags = parsed(page).seen
    assert not {"script", "img", "link", "iframe"} & set(tags)
    assert "://" not in page
    assert "run &lt;b&gt;" in page
    assert tags.count("section") == 2
    assert "step 9: 0.75" in page
    assert "reward 0.900, accuracy 0.750 at version 9" in page


def test_a_run_without_a_step_has_a_page() -> None:
    page = render([], "run", standing([]), refresh_s=5)
    parsed(page)
    assert "No step has been trained yet" in page
    assert 'http-equiv="refresh" content="5"' in page


def test_an_alarm_stands_above_the_curves() -> None:
    assert "disagree" in render([line(3, reward=0.0, train_inference_alarm=1.0)], "run", "")
    assert "disagree" not in render([line(3, reward=0.0, train_inference_alarm=0.0)], "run", "")


def test_values_that_are_not_finite_are_left_out() -> None:
    page = render([line(0, reward=math.nan, loss=1.0), line(1, reward=math.inf)], "run", "")
    assert "<section>" not in page


def test_a_long_run_is_drawn_by_means() -> None:
    page = render([line(step, reward=float(step % 2)) for step in range(10 * POINTS)], "run", "")
    assert page.count("<circle") == POINTS
    assert f"step {10 * POINTS - 1}: 0.5" in page


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=20))
def test_every_value_lies_within_the_frame(values: list[float]) -> None:
    page = render([line(step, reward=value) for step, value in enumerate(values)], "run", "")
    for cx, cy in re.findall(r'<circle cx="([^"]+)" cy="([^"]+)"', page):
        assert 0 <= float(cx) <= 420
        assert 0 <= float(cy) <= 190


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1.0]),
        (0.1, 0.9, [0, 0.25, 0.5, 0.75, 1.0]),
        (5, 5, [4.5, 4.75, 5, 5.25, 5.5]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert _ticks(low, high) == pytest.approx(ticks)


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    write([line(0, reward=0.5)], tmp_path / "curves.html", "run")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.html"]
