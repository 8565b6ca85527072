"""Curves and lanes of more than can be drawn."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from headrace.page.metric_series import thin_out
from headrace.page.timeline import merge


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
    chance = random.Random(1)
    bars = []
    for number in range(500):
        start = chance.uniform(0, 100)
        about = {"version": None, "step": number % 2, "group": str(number), "index": 0, "text": "one"}
        bars.append({"start": start, "end": start + chance.expovariate(5), "what": "scoring", **about})
    merged = merge(bars, 0.0, 100.0, most=40)
    assert len(merged) <= 40
    assert sum(bar.get("count", 1) for bar in merged) == 500
    longest = max(bars, key=lambda bar: bar["end"] - bar["start"])
    assert longest in merged
    for bar in bars:
        assert any(one["start"] <= bar["start"] and bar["end"] <= one["end"] for one in merged)
