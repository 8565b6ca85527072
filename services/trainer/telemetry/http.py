"""The trainer's HTTP server: health, Prometheus metrics, the curves of the run at `/`, and its samples."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import HTMLResponse
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.base.errors import CodecError
from headrace.config import Config
from headrace.net.http_access import FORM_PAGE
from headrace.net.service import Ready, create_app, problems
from headrace.run.journal import JOURNAL, size
from headrace.run.samples import SampleFiles
from headrace_services.trainer.distributed.liveness import Progress
from headrace_services.trainer.telemetry.batch_samples import OF, Order, render_samples
from headrace_services.trainer.telemetry.plots import on_drawing_thread, read_shown, render_page

REFRESH_S = 10
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


def build_app(config: Config, ready: Ready, progress: Progress, failures: Callable[[], str] = str) -> FastAPI:
    """Make the trainer's application. `failures` returns the page's text about what failed."""

    def stuck() -> str | None:
        silent, limit = progress.silent_s, config.trainer.collective_timeout_s
        return f"no progress for {silent:.0f} s; trainer.collective_timeout_s is {limit:g}" if silent > limit else None

    app = create_app("Headrace trainer", ready, stuck)
    journal = config.run_folder / JOURNAL

    @functools.lru_cache(maxsize=1)
    def curves(nbytes: int, failed: str) -> str:
        """Return the page of curves. It is cached by the journal's size, which only grows, because drawing takes up to a second."""
        return render_page(read_shown(journal), f"Headrace, run {config.run.id}", failed, REFRESH_S)

    @app.get("/", summary="The curves of the run", response_class=HTMLResponse)
    async def main_page() -> HTMLResponse:
        return HTMLResponse(await on_drawing_thread(curves, size(journal), failures()))

    files = SampleFiles.of(config)

    @app.get(
        "/samples",
        summary="Prompts and completions of a step, of a validation, or of groups that failed",
        response_class=HTMLResponse,
        responses=problems(404, 500),
    )
    async def samples(
        of: Annotated[str, Query(pattern=OF, description="`train-STEP`, `val-VERSION`, or failed")] = "train",
        order: Order = "stored",
        text: Annotated[str, Query(max_length=1000, description="in the prompt")] = "",
    ) -> HTMLResponse:
        title = f"Headrace, run {config.run.id}"
        try:
            page = await asyncio.to_thread(render_samples, files, title, of, order, text)
        except CodecError as error:
            raise HTTPException(500, str(error)) from error
        if page is None:
            raise HTTPException(404, f"no samples of {of} are kept (logger.keep_step_data {files.keep})")
        return HTMLResponse(page, headers=FORM_PAGE)

    return app


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
                self._families[prefix + "".join(c if c.isalnum() else "_" for c in name)] = [], {"": float(value)}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (labels, values) in self._families.items():
            gauge = GaugeMetricFamily(name, "newest value", labels=labels)
            for label, value in values.items():
                gauge.add_metric([label] if labels else [], value)
            if values:
                yield gauge

    @contextmanager
    def registered(self, registry: CollectorRegistry = REGISTRY) -> Iterator[Gauges]:
        registry.register(self)
        try:
            yield self
        finally:
            registry.unregister(self)
