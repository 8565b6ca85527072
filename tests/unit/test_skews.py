"""When a difference between what is trained and what was generated is one to warn of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.replay.bias import MOMENTS, Distribution, Moment, TrajectoryMeter, beyond, meters_of, skews


def spread(values: Sequence[float]) -> Distribution:
    return Distribution(len(values), sum(values), sum(v * v for v in values))


def meters(
    trained: Sequence[float], generated: Sequence[float], quantity: str = "length"
) -> dict[Moment, TrajectoryMeter]:
    found = dict.fromkeys(MOMENTS, TrajectoryMeter())
    return found | {
        "trained": TrajectoryMeter(len(trained), **{quantity: spread(trained)}),  # type: ignore[arg-type]
        "generated": TrajectoryMeter(len(generated), **{quantity: spread(generated)}),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("quantity", ["length", "reward"])
def test_the_difference_is_told_in_deviations_of_what_was_generated(quantity: str) -> None:
    (skew,) = skews(meters([2.0, 4.0] * 100, [0.0, 4.0] * 100, quantity))
    assert (skew.quantity, skew.deviations, skew.trained, skew.generated) == (quantity, 0.5, 3, 2)
    assert beyond([skew], 0.5) == []
    assert beyond([skew], 0.49) == [skew]
    assert beyond([skew], None) == []
    (lower,) = skews(meters([0.0, 2.0] * 100, [0.0, 4.0] * 100, quantity))
    assert beyond([lower], 0.49) == [lower]


@pytest.mark.parametrize(("trained", "generated"), [(199, 400), (400, 199), (0, 0)])
def test_few_trajectories_say_nothing(trained: int, generated: int) -> None:
    assert skews(meters([1.0] * trained, ([2.0, 3.0] * 200)[:generated])) == []


def test_what_does_not_vary_is_not_skewed() -> None:
    assert skews(meters([1.0] * 200, [1.0] * 200)) == []


def test_moments_that_never_were_are_empty_and_latency_is_in_seconds() -> None:
    sums = {"trajectories": 3, "latency:n": 2, "latency:sum": 1500, "latency:squares": 1250000}
    found = meters_of({"failed": sums})
    assert set(found) == set(MOMENTS)
    assert found["trained"] == TrajectoryMeter()
    latency = found["failed"].latency
    assert (found["failed"].trajectories, latency.count, latency.mean, latency.deviation) == (3, 2, 0.75, 0.25)
