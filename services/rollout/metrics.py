"""Prometheus metrics of a replica, read from its status when they are scraped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rollout.worker import Worker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class RolloutMetrics(Collector):
    def __init__(self, worker: Worker, engine: AsyncLLM) -> None:
        self.worker = worker
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        status = self.worker.status
        gauges = {
            "requests_running": (
                "Sequences in the engine, waiting or running",
                self.engine.get_num_unfinished_requests(),
            ),
            "leases_held": ("Groups being generated", len(self.worker.held)),
            "weight_version": ("Version verified last; -1 before the first", status.version),
            "healthy": ("1 if the replica holds verified weights and may lease", int(status.state == "HEALTHY")),
            "weight_difference": (
                "Largest |log-probability difference| to the trainer on the last probe, in nats",
                self.worker.receiver.difference,
            ),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"headrace_rollout_{name}", text, value=value)
        yield CounterMetricFamily("headrace_rollout_tokens", "Tokens of trajectories handed in", value=status.tokens)
        yield CounterMetricFamily("headrace_rollout_trajectories", "Trajectories handed in", value=status.trajectories)
        yield CounterMetricFamily(
            "headrace_rollout_saves", "Times an unfinished trajectory was saved", value=status.saves
        )
        yield CounterMetricFamily(
            "headrace_rollout_tokens_taken_over",
            "Tokens of trajectories handed in that another replica had sampled",
            value=status.tokens_taken_over,
        )
        for name, text, counts in (
            ("groups", "Leases, by how they ended", status.groups),
            ("refits", "Refits taken part in, by outcome", status.refits),
        ):
            family = CounterMetricFamily(f"headrace_rollout_{name}", text, labels=["outcome"])
            for outcome, count in counts.items():
                family.add_metric([outcome], count)
            yield family


@contextlib.contextmanager
def exported(worker: Worker, engine: AsyncLLM) -> Iterator[None]:
    """Show the replica on `/metrics` while the context is open."""
    metrics = RolloutMetrics(worker, engine)
    REGISTRY.register(metrics)
    try:
        yield
    finally:
        REGISTRY.unregister(metrics)
