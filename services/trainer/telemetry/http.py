"""The trainer's HTTP server: health and Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from fastapi import FastAPI
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.config import Config
from headrace.net.service import Ready, create_app

from ..distributed.liveness import Progress

# For metrics `<first>/<name>`, by <first>: the family of gauges, and the label that holds the name.
LABELLED = {
    "reward": ("reward_component", "component"),
    "reward_std": ("reward_component_std", "component"),
    "scoring_wait": ("scoring_wait", "environment"),
    "scoring_time": ("scoring_time", "environment"),
    **{
        name: (name, "environment")
        for name in ("episode_calls", "episode_tokens", "episode_roots", "episode_rendered_again")
    },
}


def build_app(config: Config, ready: Ready, progress: Progress) -> FastAPI:
    """Make the trainer's application."""

    def stuck() -> str | None:
        silent, limit = progress.silent_s, config.trainer.collective_timeout_s
        return f"no progress for {silent:.0f} s; trainer.collective_timeout_s is {limit:g}" if silent > limit else None

    return create_app("Headrace trainer", ready, stuck)


class Gauges(Collector):
    """The newest value of every metric as `headrace_trainer_<name>`, or `headrace_trainer_validation_<name>` from a validation. Metrics of
    each reward component or environment have its name as a label."""

    def __init__(self) -> None:
        # by name: labels, and values by the value of the label
        self._families: dict[str, tuple[list[str], dict[str, float]]] = {}

    def update(self, kind: Literal["train", "validation"], step: int, metrics: Mapping[str, float]) -> None:
        prefix = "headrace_trainer_" if kind == "train" else "headrace_trainer_validation_"
        for family, label in LABELLED.values():
            self._families[prefix + family] = [label], {}
        for name, value in {"step": step, **metrics}.items():
            first, _, rest = name.partition("/")
            if rest and first in LABELLED:
                self._families[prefix + LABELLED[first][0]][1][rest] = float(value)
            else:
                self._families[prefix + re.sub(r"\W", "_", name)] = [], {"": float(value)}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (labels, values) in self._families.items():
            gauge = GaugeMetricFamily(name, "newest value", labels=labels)
            for label, value in values.items():
                gauge.add_metric([label] if labels else [], value)
            if values:
                yield gauge
