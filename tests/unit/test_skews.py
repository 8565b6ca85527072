"""When a difference between what is trained and what was generated is one to warn of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.replay.bias import MOMENTS, Distribution, Moment, TrajectoryMeter, beyond, read_meters, skews


def spread(values: Sequence[float]) -> Distribution:
    return Distribution(len(values), sum(values), sum(v * v for v in values))


def meters(
    trained: Sequence[float],
    dropped: Sequence[float],
    quantity: str = "length",
    moment: Moment = "expired",
    waiting: Sequence[float] = (),
) -> dict[Moment, TrajectoryMeter]:
    """Those of a run that dropped some at `moment`, while others wait."""
    generated = [*trained, *dropped, *waiting]
    found = dict.fromkeys(MOMENTS, TrajectoryMeter())
    for name, values in (("trained", trained), (moment, dropped), ("generated", generated)):
        found[name] = TrajectoryMeter(len(values), **{quantity: spread(values)})  # type: ignore[arg-type,index]
    return found


@pytest.mark.parametrize("quantity", ["length", "reward"])
@pytest.mark.parametrize("moment", ["expired", "filtered", "failed", "surplus"])
def test_the_difference_is_in_deviations_of_all_that_ended(quantity: str, moment: Moment) -> None:
    (skew,) = skews(meters([4.0] * 200, [0.0] * 200, quantity, moment))
    assert (skew.quantity, skew.deviations, skew.trained, skew.ended) == (quantity, 1, 4, 2)
    assert beyond([skew], 1.0) == []
    assert beyond([skew], 0.99) == [skew]
    assert beyond([skew], None) == []
    (lower,) = skews(meters([0.0] * 200, [4.0] * 200, quantity, moment))
    assert beyond([lower], 0.99) == [lower]


@pytest.mark.parametrize("quantity", ["length", "reward"])
def test_where_nothing_is_dropped_there_is_no_skew(quantity: str) -> None:
    (skew,) = skews(meters([0.0, 1.0] * 200, [], quantity, waiting=[5.0] * 200))
    assert skew.deviations == 0


@pytest.mark.parametrize(("trained", "dropped"), [(199, 400), (0, 0)])
def test_few_trajectories_say_nothing(trained: int, dropped: int) -> None:
    assert skews(meters([1.0] * trained, [2.0, 3.0] * (dropped // 2))) == []


def test_what_does_not_vary_is_not_skewed() -> None:
    assert skews(meters([1.0] * 200, [1.0] * 200)) == []


def test_moments_that_never_were_are_empty_and_latency_is_in_seconds() -> None:
    sums = {"trajectories": 3, "latency:n": 2, "latency:sum": 1500, "latency:squares": 1250000}
    found = read_meters({"failed": sums})
    assert set(found) == set(MOMENTS)
    assert found["trained"] == TrajectoryMeter()
    latency = found["failed"].latency
    assert (found["failed"].trajectories, latency.count, latency.mean, latency.deviation) == (3, 2, 0.75, 0.25)
