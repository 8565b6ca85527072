"""Prometheus gauges of the buffer, from its newest statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class Snapshot:
    """The newest statistics; None while the buffer can't be reached, so that no gauge shows a figure that is not so."""

    stats: dict[str, Any] | None = None


_GAUGES = {
    "bytes": "payload bytes held or reserved by leases",
    "max_bytes": "payload bytes past which leases wait",
    "leases": "groups leased",
    "line": "groups open, scoring or ready",
    "next_step": "the step that is reserved next",
    "committed": "version of the newest published checkpoint",
    "age_mean": "mean age of the newest batch, in steps",
    "age_max": "largest age in the newest batch, in steps",
}


class _Gauges(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        stats = self._snapshot.stats
        if stats is None:
            return
        for name, what in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_replay_{name}", what, value=stats[name])
        for name, what in (("waiting", "trajectories waiting for a scorer"), ("taken", "trajectories being scored")):
            yield GaugeMetricFamily(f"headrace_replay_scoring_{name}", what, value=stats["scoring"][name])
        groups = GaugeMetricFamily("headrace_replay_groups", "groups by lane and state", labels=["lane", "state"])
        for lane, counts in stats["counts"].items():
            for state, count in counts.items():
                groups.add_metric([lane, state], count)
        yield groups
        replicas = GaugeMetricFamily("headrace_replay_replicas", "replicas by state", labels=["state"])
        for state in ("HEALTHY", "STALE", "DEAD"):
            replicas.add_metric([state], sum(replica["state"] == state for replica in stats["replicas"]))
        yield replicas
        for name, label in (("refusals", "code"), ("requeues", "cause")):
            family = CounterMetricFamily(f"headrace_replay_{name}", f"{name} by {label}", labels=[label])
            for value, count in stats[name].items():
                family.add_metric([value], count)
            yield family


@contextlib.contextmanager
def exported(snapshot: Snapshot) -> Iterator[None]:
    """`/metrics` shows the buffer while the context is open."""
    gauges = _Gauges(snapshot)
    REGISTRY.register(gauges)
    try:
        yield
    finally:
        REGISTRY.unregister(gauges)
