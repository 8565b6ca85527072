"""Prometheus gauges of the buffer, from its newest statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headrace.replay import ReplicaState
from headrace.replay.bias import Distribution, Moment, Quantity, TrajectoryMeter, skews


class LatestStats:
    """The newest statistics, or None while the buffer is unreachable, so that no gauge shows a stale value. `wanted` is how many replicas
    are wanted (`headrace.run.replicas_wanted`)."""

    stats: dict[str, Any] | None = None
    wanted: int | None = None
    meters: Mapping[Moment, TrajectoryMeter] | None = None


def _powers(first: int, last: int) -> list[float]:
    return [2.0**place for place in range(first, last + 1)]


# Upper bounds of the histograms: the bounds of the meters' buckets, one per octave. Latency is metered in milliseconds.
_HISTOGRAMS: dict[Quantity, tuple[str, str, list[float]]] = {
    "length": ("length_tokens", "completion tokens of trajectories", _powers(0, 17)),
    "reward": (
        "reward",
        "rewards of trajectories",
        [*(-bound for bound in reversed(_powers(-3, 7))), 0.0, *_powers(-3, 7)],
    ),
    "latency": ("latency_seconds", "from lease to push", [0.001 * bound for bound in _powers(4, 22)]),
    "age": ("age_steps", "steps since the weights of the oldest token", [0.0, *_powers(0, 6)]),
}


_GAUGES = {
    "bytes": "payload bytes held or reserved by leases",
    "max_bytes": "payload bytes beyond which leases wait",
    "full": "bytes that the server refused because it was out of memory, until they fit",
    "leases": "groups leased",
    "line": "groups open, scoring or ready",
    "next_step": "the step to be reserved next",
    "committed": "version of the newest published checkpoint",
    "age_mean": "mean age of the newest batch, in steps",
    "age_max": "largest age in the newest batch, in steps",
}


class BufferGauges(Collector):
    def __init__(self, latest: LatestStats) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        stats = self._latest.stats
        if stats is None:
            return
        for name, what in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_replay_{name}", what, value=stats[name])
        for name, what in (("waiting", "trajectories waiting for a scorer"), ("taken", "trajectories being scored")):
            yield GaugeMetricFamily(f"headrace_replay_scoring_{name}", what, value=stats["scoring"][name])
        for name, what in (
            ("waiting", "trajectories waiting for the environment"),
            ("taken", "trajectories being scored by the environment"),
            ("broken", "1 while the environment's breaker is open"),
        ):
            found = {each["name"]: float(each[name]) for each in stats["environments"]}
            yield _labelled(GaugeMetricFamily, f"headrace_replay_environment_{name}", what, "environment", found)
        groups = GaugeMetricFamily("headrace_replay_groups", "groups by lane and state", labels=["lane", "state"])
        for lane, counts in stats["counts"].items():
            for state, count in counts.items():
                groups.add_metric([lane, state], count)
        yield groups
        states = Counter(replica["state"] for replica in stats["replicas"])
        by_state = {state: states[state] for state in get_args(ReplicaState)}
        yield _labelled(GaugeMetricFamily, "headrace_replay_replicas", "replicas by state", "state", by_state)
        if self._latest.wanted is not None:
            yield GaugeMetricFamily(
                "headrace_replay_replicas_wanted",
                "replicas that keep the trainer busy, to scale the fleet by",
                value=self._latest.wanted,
            )
        what = "token_mult_prob_error on the replica's tokens, in the newest step that trained on any"
        errors = {each["id"]: each["logprob_error"] for each in stats["replicas"] if each["logprob_error"] is not None}
        yield _labelled(GaugeMetricFamily, "headrace_replay_replica_logprob_error", what, "replica", errors)
        for name, label in (("refusals", "code"), ("requeues", "cause")):
            yield _labelled(CounterMetricFamily, f"headrace_replay_{name}", f"{name} by {label}", label, stats[name])
        if self._latest.meters is not None:
            yield from _bias(self._latest.meters)


def _bias(meters: Mapping[Moment, TrajectoryMeter]) -> Iterable[Metric]:
    ended = {moment: meter.trajectories for moment, meter in meters.items()}
    yield _labelled(CounterMetricFamily, "headrace_replay_trajectories", "trajectories by outcome", "moment", ended)
    yield CounterMetricFamily(
        "headrace_replay_masked_tokens", "tokens over age that were left out of the loss", value=meters["masked"].tokens
    )
    for quantity, (name, what, bounds) in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"headrace_replay_trajectory_{name}", what, labels=["moment"])
        mean = GaugeMetricFamily(f"headrace_replay_trajectory_{name}_mean", f"mean {quantity}", labels=["moment"])
        for moment, meter in meters.items():
            distribution: Distribution = getattr(meter, quantity)
            if distribution.count:
                histogram.add_metric([moment], _cumulative(distribution, bounds), distribution.sum)
                mean.add_metric([moment], distribution.mean)
        yield histogram
        yield mean
    what = "mean over trained trajectories minus the mean over all that ended, in standard deviations of the latter"
    bias = {skew.quantity: skew.deviations for skew in skews(meters)}
    yield _labelled(GaugeMetricFamily, "headrace_replay_selection_bias", what, "quantity", bias)


def _labelled(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, what: str, label: str, values: Mapping[Any, float]
) -> Metric:
    """Return a metric with a value for each value of its label."""
    metric = family(name, what, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric


def _cumulative(distribution: Distribution, bounds: list[float]) -> list[tuple[str, float]]:
    """Return (upper bound, number of values at or below it) for each bound, and last for an infinite bound."""
    # a bound and its bucket's bound may differ by rounding
    counts = [sum(n for upper, n in distribution.buckets if upper <= bound + 1e-9 * abs(bound)) for bound in bounds]
    return [*zip(map(str, bounds), map(float, counts), strict=True), ("+Inf", float(distribution.count))]
