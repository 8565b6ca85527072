"""Statistics of trajectories at each moment that the buffer meters, and the selection bias: how much trained trajectories differ from all
that have ended. The buffer's part is `services/replay/functions/_meter.lua`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Moment = Literal["generated", "trained", "masked", "expired", "filtered", "failed", "surplus"]
Quantity = Literal["length", "reward", "latency", "age"]

MOMENTS: tuple[Moment, ...] = get_args(Moment)
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
# The moments at which a trajectory ends.
ENDS: tuple[Moment, ...] = ("trained", "expired", "filtered", "failed", "surplus")
# With fewer trajectories than this, a difference of means is not significant.
LEAST = 200

_HIGHEST_BUCKET = 60  # holds all higher values too (_meter.lua)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The distribution of one quantity: `length` in tokens, `reward`, `latency` from lease to push in seconds, or `age` in steps.

    `buckets` are the non-empty ones, ascending, as (upper bound, number of values at or below it and above the previous bound). There are
    two bounds per octave, and the last may be infinite.
    """

    count: int = 0
    sum: float = 0.0
    squares: float = 0.0
    buckets: tuple[tuple[float, int], ...] = ()

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation of the values."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else math.nan


@dataclasses.dataclass(frozen=True)
class TrajectoryMeter:
    """The trajectories metered at one moment. A distribution counts those whose quantity is known: a failed trajectory has no reward, and
    one that was never pushed has no quantities. `tokens` is the number of tokens over age, for the moment `masked`."""

    trajectories: int = 0
    tokens: int = 0
    length: Distribution = Distribution()
    reward: Distribution = Distribution()
    latency: Distribution = Distribution()
    age: Distribution = Distribution()


@dataclasses.dataclass(frozen=True)
class Skew:
    """The distance between the mean of trained trajectories and that of all that have ended, in standard deviations of the latter."""

    quantity: Quantity
    deviations: float
    trained: float
    ended: float

    def __str__(self) -> str:
        return (
            f"mean {self.quantity} of trained trajectories {self.trained:.4g}, of all that have ended {self.ended:.4g}: "
            f"{self.deviations:+.2f} standard deviations"
        )


def skews(meters: Mapping[Moment, TrajectoryMeter]) -> list[Skew]:
    """Return the skew of length and reward, once `LEAST` trajectories were trained; values without variance have none.

    Trajectories that were generated and still wait don't count. While rewards rise they differ from those trained before, although nothing
    is selected. So where nothing is dropped there is no skew.
    """
    found = []
    for quantity in ("length", "reward"):
        trained: Distribution = getattr(meters["trained"], quantity)
        ends: list[Distribution] = [getattr(meters[moment], quantity) for moment in ENDS]
        ended = Distribution(*(sum(getattr(end, name) for end in ends) for name in ("count", "sum", "squares")))
        if trained.count >= LEAST and ended.deviation > 0:
            deviations = (trained.mean - ended.mean) / ended.deviation
            found.append(Skew(quantity, deviations, trained.mean, ended.mean))
    return found


def beyond(found: Sequence[Skew], limit: float | None) -> list[Skew]:
    """Return the skews to warn about: those of more than `limit` standard deviations (`replay.bias_warning`); none without a limit."""
    return [] if limit is None else [skew for skew in found if abs(skew.deviations) > limit]


def read_meters(fields: Mapping[str, Mapping[str, float]]) -> dict[Moment, TrajectoryMeter]:
    """Return every moment's meter, from the fields that `hr_bias` returns for each moment with any trajectory."""
    return {moment: _meter(fields.get(moment, {})) for moment in MOMENTS}


def _meter(fields: Mapping[str, float]) -> TrajectoryMeter:
    distributions = {quantity: _distribution(fields, quantity) for quantity in QUANTITIES}
    return TrajectoryMeter(int(fields.get("trajectories", 0)), int(fields.get("tokens", 0)), **distributions)


def _distribution(fields: Mapping[str, float], quantity: Quantity) -> Distribution:
    own = {
        name.removeprefix(f"{quantity}:"): value for name, value in fields.items() if name.startswith(f"{quantity}:")
    }
    count, total, squares = (own.pop(name, 0.0) for name in ("n", "sum", "squares"))
    scale = 0.001 if quantity == "latency" else 1.0
    buckets = sorted((_bound(name) * scale, int(value)) for name, value in own.items())
    return Distribution(int(count), total * scale, squares * scale**2, tuple(buckets))


def _bound(bucket: str) -> float:
    if bucket == "z":
        return 0.0
    place = int(bucket[1:])
    if bucket[0] == "n":
        return -(2.0 ** (place / 2))
    return math.inf if place == _HIGHEST_BUCKET else 2.0 ** (place / 2)
