"""Curves and lanes of more than can be drawn."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from headrace.page.metric_series import thin_out
from headrace.page.timeline import Bars, show


@pytest.mark.parametrize(("count", "points"), [(0, 5), (1, 5), (5, 5), (17, 5), (1000, 7), (10, 1)])
def test_buckets_hold_each_value_once(count: int, points: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    steps, means, low, high = thin_out(np.arange(count), values, points)
    assert len(steps) == min(count, points)
    start, seen = 0, 0
    for step, mean, least, most in zip(steps, means, low, high, strict=True):
        inside = values[start : step + 1]
        assert (mean, least, most) == (pytest.approx(inside.mean()), inside.min(), inside.max())
        start, seen = step + 1, seen + len(inside)
    assert seen == count


def test_extreme_values_have_means() -> None:
    values = np.array([1e308, 1e308, math.nan, math.inf, 2.0, -math.inf])
    steps, means, low, high = thin_out(np.arange(6), values, 3)
    assert means[0] == pytest.approx(1e308)
    assert (means[1], low[1], high[1]) == (None, None, None)
    assert (steps[2], means[2]) == (5, pytest.approx(2.0))


def test_merged_lanes_cover_what_they_stand_for() -> None:
    chance = np.random.default_rng(1)
    start = chance.uniform(0, 100, 500)
    length = chance.exponential(0.2, 500)
    length[[7, 70]] = 6.0, 40.0  # the others are shorter than a place in the drawing
    number, none = np.arange(500), np.full(500, -1)
    groups = [str(group) for group in number]
    bars = Bars(start, start + length, number % 2, ("scoring", "waiting"), str, none, number % 2, number, none, groups)
    merged = show(bars, 0.0, 100.0, most=40)
    assert len(merged) <= 40
    assert sum(bar.get("count", 1) for bar in merged) == 500
    told = {bar["group"]: bar for bar in merged if "count" not in bar}
    assert {"7", "70"} <= told.keys()
    assert (told["7"]["start"], told["7"]["end"], told["7"]["text"]) == (start[7], start[7] + 6.0, "7")
    assert len(merged) <= 20 + 2, "the short ones are together"
    for place in number.tolist():
        assert any(one["start"] <= start[place] and start[place] + length[place] <= one["end"] for one in merged)
    several = [bar for bar in merged if bar.get("count", 1) > 1]
    assert max(bar["end"] - bar["start"] for bar in several) <= 100 / 20 + 5, "its place is told"
    assert merged == sorted(merged, key=lambda bar: (bar["start"], bar["end"]))
    at = ((start + length / 2) / 5).astype(int).clip(0, 19)
    at[[7, 70]] = -1
    for bar, mine in zip(several, (at == slot for slot in range(20)), strict=True):
        time_of = {kind: length[mine & (number % 2 == code)].sum() for code, kind in enumerate(bars.kinds)}
        kinds = sorted(bars.kinds, key=lambda kind: -time_of[kind])
        assert (bar["start"], bar["end"]) == (start[mine].min(), (start + length)[mine].max())
        assert (bar["what"], bar["text"], bar["count"]) == (kinds[0], f"{mine.sum()} of {', '.join(kinds)}", mine.sum())
    assert all(bar["step"] is None and bar["group"] is None and bar["version"] is None for bar in several)
    one_kind = dataclasses.replace(bars, step=number * 0 + 7, what=number * 0)
    assert {(bar["what"], bar["step"]) for bar in show(one_kind, 0.0, 100.0, most=40)} == {("scoring", 7)}
