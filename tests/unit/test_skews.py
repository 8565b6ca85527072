"""When a difference between what is trained and what was generated is one to warn of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.replay.bias import MOMENTS, Distribution, Meter, Moment, beyond, meters_of, skews


def spread(values: Sequence[float]) -> Distribution:
    return Distribution(len(values), sum(values), sum(v * v for v in values))


def meters(trained: Sequence[float], generated: Sequence[float], quantity: str = "length") -> dict[Moment, Meter]:
    found = dict.fromkeys(MOMENTS, Meter())
    return found | {
        "trained": Meter(len(trained), **{quantity: spread(trained)}),  # type: ignore[arg-type]
        "generated": Meter(len(generated), **{quantity: spread(generated)}),  # type: ignore[arg-type]
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
    found = meters_of(
        [
            b"failed",
            [b"trajectories", b"3", b"latency:n", b"2", b"latency:sum", b"1500", b"latency:squares", b"1250000"],
        ]
    )
    assert set(found) == set(MOMENTS)
    assert found["trained"] == Meter()
    latency = found["failed"].latency
    assert (found["failed"].trajectories, latency.count, latency.mean, latency.deviation) == (3, 2, 0.75, 0.25)
