"""The trainer over HTTP: health, Prometheus, and the curves of the run at `/`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.config import Config
from headrace.service import Ready, create_app
from headrace_services.trainer.progress import Progress
from headrace_services.trainer.telemetry.journal import JOURNAL, read_journal, size, surviving
from headrace_services.trainer.telemetry.plots import render_page

REFRESH_S = 10


def build_app(config: Config, ready: Ready, progress: Progress) -> FastAPI:
    def stuck() -> str | None:
        silent, limit = progress.silent_s, config.trainer.collective_timeout_s
        return f"no progress for {silent:.0f} s; trainer.collective_timeout_s is {limit:g}" if silent > limit else None

    app = create_app("Headrace trainer", ready, stuck)
    journal = config.run_folder / JOURNAL

    @functools.lru_cache(maxsize=1)
    def curves(nbytes: int) -> str:
        """The page of curves, cached by the journal's size: it only grows, and drawing takes up to a second."""
        return render_page(surviving(read_journal(journal)), f"Headrace, run {config.run.id}", REFRESH_S)

    @app.get("/", summary="The curves of the run", response_class=HTMLResponse)
    async def main_page() -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(curves, size(journal)))

    return app


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
