"""The newest numbers of a run, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry


class Gauges(Collector):
    """The newest value of every metric as `headrace_trainer_<name>`, validation as `headrace_trainer_validation_<name>`."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def update(self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]) -> None:
        prefix = "headrace_trainer_" if kind == "train" else "headrace_trainer_validation_"
        for name, value in {"step": step, **metrics}.items():
            self._values[prefix + "".join(c if c.isalnum() else "_" for c in name)] = float(value)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in self._values.items():
            yield GaugeMetricFamily(name, "newest value", value=value)

    @contextmanager
    def registered(self, registry: CollectorRegistry = REGISTRY) -> Iterator[Gauges]:
        registry.register(self)
        try:
            yield self
        finally:
            registry.unregister(self)
