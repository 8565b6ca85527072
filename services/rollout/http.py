"""The replica's HTTP side: vLLM's own OpenAI-compatible endpoints on the same engine, and what the replica is doing."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from headrace.config import Config
from headrace.service import create_app
from services.rollout.worker import Worker

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.v1.engine.async_llm import AsyncLLM


def build_app(config: Config, engine: AsyncLLM, worker: Worker) -> FastAPI:
    """`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/weights`, and the pages every service has."""

    async def ready() -> str | None:
        return worker.status.problem()

    app = create_app("Headrace rollout", ready)

    @app.get("/weights", summary="The weights this replica generates with")
    async def weights() -> dict[str, Any]:
        status = worker.status
        difference = worker.receiver.difference
        return {
            "replica": worker.replica,
            "state": status.state,
            "version": status.version,
            "timeline": status.timeline,
            # JSON has no infinity, which is what a probe with a NaN differs by
            "difference": difference if difference is None or math.isfinite(difference) else str(difference),
            "tolerance": config.weight_channel.verify_tolerance,
            "problem": status.problem(),
        }

    _add_openai(app, config, engine, worker)
    return app


def _add_openai(app: FastAPI, config: Config, engine: AsyncLLM, worker: Worker) -> None:
    """Attach vLLM's routers with the state that they expect of their application."""
    from fastapi import Depends, HTTPException
    from vllm.entrypoints.openai.chat_completion import api_router as chat
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion import api_router as completion
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.models import api_router as models
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.renderers.online_renderer import OnlineRenderer

    async def whole_weights() -> None:
        """After a failed refit the engine is paused: a request would wait for as long as that lasts."""
        if worker.status.torn is not None:
            raise HTTPException(503, f"no whole weights: {worker.status.torn}")

    name = config.policy.model_name
    template: dict[str, Any] = {"chat_template": None, "chat_template_content_format": "auto"}
    template["default_chat_template_kwargs"] = config.policy.tokenizer.chat_template_kwargs
    renderer = OnlineRenderer(engine.model_config, engine.renderer, request_logger=None, **template)
    served = OpenAIServingModels(engine, [BaseModelPath(name=name, model_path=name)])
    shared = {"online_renderer": renderer, "request_logger": None}
    app.state.args = Namespace(log_error_stack=False)
    # vLLM's handlers ask a server to exit when the engine is dead; here the worker sees that and ends the service
    app.state.server = Namespace(should_exit=False)
    app.state.engine_client = engine
    app.state.openai_serving_models = served
    app.state.openai_serving_completion = OpenAIServingCompletion(engine, served, **shared)
    app.state.openai_serving_chat = OpenAIServingChat(engine, served, "assistant", **shared, **template)
    app.state.openai_serving_chat_batch = None
    app.include_router(models.router)
    for router in (completion.router, chat.router):
        app.include_router(router, dependencies=[Depends(whole_weights)])
    init_exception_handler(app)
