"""The replica's HTTP API: vLLM's own OpenAI-compatible endpoints on the same engine, the replica's state, and its metrics."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.config import Config
from headrace.service import create_app, problems
from headrace_services.rollout.worker import RolloutWorker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def build_app(config: Config, engine: AsyncLLM, worker: RolloutWorker) -> FastAPI:
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/weights`, and the pages every service has."""

    async def ready() -> str | None:
        return worker.status.problem()

    app = create_app("Headrace rollout", ready)

    @app.get("/weights", summary="The weights this replica generates with")
    async def weights() -> dict[str, Any]:
        status = worker.status
        return {
            "replica": worker.replica,
            "state": status.state,
            "version": status.version,
            "timeline": status.timeline,
            "difference": worker.receiver.difference,
            "tolerance": config.weight_channel.verify_tolerance,
            "problem": status.problem(),
        }

    _add_openai(app, config, engine, worker)
    return app


def _add_openai(app: FastAPI, config: Config, engine: AsyncLLM, worker: RolloutWorker) -> None:
    """Attach vLLM's routers with the state that they expect of their application."""
    from vllm.entrypoints.openai.chat_completion import api_router as chat
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion import api_router as completion
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models import api_router as models
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.renderers.online_renderer import OnlineRenderer

    async def whole_weights() -> None:
        """Refuse requests while the engine is paused after a failed refit: they would wait until another succeeds."""
        if worker.status.torn is not None:
            raise HTTPException(503, f"no whole weights: {worker.status.torn}")

    async def text_alone(request: Request) -> None:
        """Refuse half a surrogate pair, which JSON can carry, and no tokenizer can read."""
        with contextlib.suppress(ValueError):  # no JSON: FastAPI says so
            body = json.dumps(await request.json(), ensure_ascii=False)
            if not body.isascii() and any("\ud800" <= character <= "\udfff" for character in body):
                raise HTTPException(
                    400, "the request holds half a surrogate pair, which is no text; send valid Unicode"
                )

    name = config.policy.model_name
    template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
    template["default_chat_template_kwargs"] = config.policy.tokenizer.chat_template_kwargs
    renderer = OnlineRenderer(engine.model_config, engine.renderer, request_logger=None, **template)
    served = OpenAIServingModels(engine, [BaseModelPath(name=name, model_path=name)])
    shared = {"online_renderer": renderer, "request_logger": None}
    app.state.args = Namespace(log_error_stack=False)
    # when the engine is dead, vLLM's handlers ask the server to exit; here the worker notices and ends the service
    app.state.server = Namespace(should_exit=False)
    app.state.engine_client = engine
    app.state.openai_serving_models = served
    after = BehindTraining(engine)
    app.state.openai_serving_completion = OpenAIServingCompletion(after, served, **shared)
    app.state.openai_serving_chat = OpenAIServingChat(after, served, "assistant", **shared, **template)
    app.state.openai_serving_chat_batch = None
    refusals = problems(415) | {503: {"model": ErrorResponse, "description": "The replica holds no whole weights now"}}
    app.include_router(models.router)
    for router in (completion.router, chat.router):
        app.include_router(router, dependencies=[Depends(whole_weights), Depends(text_alone)], responses=refusals)
    init_exception_handler(app)


class BehindTraining:
    """The engine for requests from outside: whatever priority they ask for, the run's own (0) are scheduled first."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *arguments: Any, priority: int = 0, **named: Any) -> Any:
        return self._engine.generate(*arguments, priority=max(1, priority), **named)


class RolloutMetrics(Collector):
    """Prometheus metrics, read from the worker's status at each scrape."""

    def __init__(self, worker: RolloutWorker, engine: AsyncLLM) -> None:
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
def exported(worker: RolloutWorker, engine: AsyncLLM) -> Iterator[None]:
    """Show the replica on `/metrics` while the context is open."""
    metrics = RolloutMetrics(worker, engine)
    REGISTRY.register(metrics)
    try:
        yield
    finally:
        REGISTRY.unregister(metrics)
