"""What is computed for a fleet (`headrace plan balance`) is what it does on the real buffer, within a tenth."""

from __future__ import annotations

import pytest

from benchmarks.fleet import BALANCED, compare

# The others take longer.
BY_DAY = ("generation", "age 0")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly) for name in BALANCED]
)
def test_the_trainer_is_as_busy_as_computed(name: str) -> None:
    computed, measured = compare(BALANCED[name], 12 if name in BY_DAY else 40)
    assert computed == pytest.approx(measured, rel=0.1)
