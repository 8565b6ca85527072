"""The replica's HTTP API: calls of episodes, vLLM's own OpenAI-compatible endpoints on the same engine, the replica's state, and its
metrics."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.config import Config
from headrace.net import tracing
from headrace.net.replica_client import (
    RENDER,
    SAMPLE,
    ErrorBody,
    ErrorDetail,
    Rendered,
    RenderRefused,
    RenderRequest,
    ReplicaFenced,
    Sampled,
    SampleRequest,
)
from headrace.net.service import create_app, problems, read_body

from . import peers
from .chat_format import ChatFormat, Written
from .engine_stats import EngineStats
from .generate import GenerationError
from .pulling import Puller
from .sequence_slots import SequenceSlots
from .worker import RolloutWorker

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


T = TypeVar("T", bound=msgspec.Struct)
# bytes in a body: of a token id in JSON, and of all fields other than tokens, messages and tools
_TOKEN_BYTES, _FIELDS_BYTES = 12, 2**16


def build_app(config: Config, engine: AsyncLLM, worker: RolloutWorker, puller: Puller | None) -> FastAPI:
    """Build the application: `/sample`, `/render`, `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/weights`, what others that
    pull fetch, and the pages that every service has. Raises `ServiceError` for a parser that can't be used."""

    async def ready() -> str | None:
        return worker.status.problem()

    app = create_app("Headrace rollout", ready)

    @app.get("/weights", summary="The weights this replica generates with")
    async def weights() -> dict[str, Any]:
        status, verdict = worker.status, worker.receiver.verdict
        return {
            "replica": worker.replica,
            "state": status.state,
            "version": status.version,
            "timeline": status.timeline,
            "difference": verdict and verdict.difference,
            "tolerance": verdict and verdict.tolerance,
            "mean_difference": verdict and verdict.mean,
            "mean_tolerance": verdict and verdict.mean_tolerance,
            "problem": status.problem(),
        }

    if puller is not None:
        served: Any = puller.served  # an ASGI application, which starlette takes too
        app.add_route(peers.PATH, served, ["POST"], include_in_schema=False)
    chat_format = ChatFormat(config, engine.model_config, engine.renderer)
    _add_openai(app, config, engine, worker, chat_format)
    _add_calls(app, worker, chat_format, longest_body(config))
    return app


def longest_body(config: Config) -> int:
    """Return the largest size in bytes of a runner's request: a program's messages and tools, or its tools and a context of tokens."""
    return config.agents.max_request_bytes + _TOKEN_BYTES * config.policy.max_total_sequence_length + _FIELDS_BYTES


def _add_calls(app: FastAPI, worker: RolloutWorker, chat_format: ChatFormat, most: int) -> None:
    """Add the endpoints that the runners of episodes call. Their sampling is the run's own work, with the same priority as its
    trajectories."""

    async def sample(request: SampleRequest) -> Sampled:
        it = await worker.sample(request, special_tokens=chat_format.special_tokens)
        if not request.message:
            return it
        # in the same request: a second one would cost the caller and the replica as much as the parsing
        written = Written(it.token_ids, it.finish_reason, request.tools, it.stop_reason, request.token_ids)
        return msgspec.structs.replace(it, message=await chat_format.derender(written))

    async def render(request: RenderRequest) -> Rendered:
        return Rendered(await chat_format.render(request))

    @app.exception_handler(ReplicaFenced)
    async def fenced(_: Request, error: ReplicaFenced) -> Response:
        return _json(409, ErrorBody(ErrorDetail(str(error), error.reason)))

    @app.exception_handler(RenderRefused)
    async def refused(_: Request, error: RenderRefused) -> Response:
        return _json(413 if error.reason == "too_large" else 400, ErrorBody(ErrorDetail(str(error), error.reason)))

    @app.exception_handler(GenerationError)
    async def failed(_: Request, error: GenerationError) -> Response:
        return _json(500, ErrorBody(ErrorDetail(str(error))))

    description = "Complete token ids: the completion, its log-probabilities, and the message that it forms"
    _add_call(app, SAMPLE, description, SampleRequest, Sampled, sample, most)
    _add_call(app, RENDER, "Convert messages to token ids", RenderRequest, Rendered, render, most)


def _add_call(
    app: FastAPI,
    path: str,
    summary: str,
    asked: type[T],
    given: type[msgspec.Struct],
    answer: Callable[[T], Awaitable[msgspec.Struct]],
    most: int,
) -> None:
    """Add a route that takes a JSON body of type `asked`, of at most `most` bytes, and answers with one of type `given`. It is cancelled
    when its caller disconnects."""
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    async def body(raw_request: Request) -> T:
        content = await read_body(raw_request, most)
        if content is None:
            raise RenderRefused(
                "too_large",
                f"the body has more than {most} bytes, the limit that agents.max_request_bytes and the tokens of a context amount to",
            )
        try:
            return msgspec.json.decode(content, type=asked)
        except (ValueError, RecursionError) as error:
            raise RenderRefused("invalid", f"the body is not a valid request: {error}") from error

    # read before the handler runs: from then on the connection is watched for a caller that disconnects
    parsed = Depends(body)

    async def post(raw_request: Request, request: Any = parsed) -> Response:
        caller = tracing.SpanContext.parse(raw_request.headers.get(tracing.HEADER, ""))
        with tracing.span("generate" if path == SAMPLE else "render", caller) if caller else tracing.NO_SPAN:
            return _json(200, await answer(request))

    schemas = {name: _schema(kind) for name, kind in (("asked", asked), ("given", given), ("refusal", ErrorBody))}
    refusals = {
        400: "The request can't be answered",
        409: "This replica can't sample for the request now; another may",
        413: "The body is too large",
        500: "The engine failed",
    }
    app.post(
        path,
        summary=summary,
        openapi_extra={"requestBody": {"required": True, "content": _content(schemas["asked"])}},
        responses={
            **problems(415),
            200: {"content": _content(schemas["given"])},
            **{
                status: {"description": text, "content": _content(schemas["refusal"])}
                for status, text in refusals.items()
            },
        },
    )(with_cancellation(post))


def _json(status: int, content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema for an OpenAPI document, with its definitions inlined."""
    schema = msgspec.json.schema(kind)
    definitions = schema.pop("$defs")

    def inline(part: Any) -> Any:
        if isinstance(part, dict):
            name = part.get("$ref", "").rpartition("/")[2]
            return inline(definitions[name]) if name else {key: inline(value) for key, value in part.items()}
        return [inline(item) for item in part] if isinstance(part, list) else part

    inlined: dict[str, Any] = inline(schema)
    return inlined


def _add_openai(app: FastAPI, config: Config, engine: AsyncLLM, worker: RolloutWorker, chat_format: ChatFormat) -> None:
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

    async def whole_weights() -> None:
        """Refuse requests while the engine is paused after a failed refit: they would wait until a refit succeeds."""
        if worker.status.torn is not None:
            raise HTTPException(503, f"the replica has no verified weights: {worker.status.torn}")

    async def text_alone(request: Request) -> None:
        """Refuse half a surrogate pair, which JSON can carry but no tokenizer can read."""
        with contextlib.suppress(ValueError):  # FastAPI reports a body that is not JSON
            body = json.dumps(await request.json(), ensure_ascii=False)
            if not body.isascii() and any("\ud800" <= character <= "\udfff" for character in body):
                raise HTTPException(
                    400, "the request holds half a surrogate pair, which is not text; send valid Unicode"
                )

    name = config.policy.model_name
    served = OpenAIServingModels(engine, [BaseModelPath(name=name, model_path=name)])
    shared = {"online_renderer": chat_format.online, "request_logger": None}
    app.state.args = Namespace(log_error_stack=False)
    # when the engine dies, vLLM's handlers ask the server to exit; here the worker notices and ends the service
    app.state.server = Namespace(should_exit=False)
    app.state.engine_client = engine
    app.state.openai_serving_models = served
    after = BehindTraining(engine, worker.slots, lambda: worker.receiver.cache_salt)
    app.state.openai_serving_completion = OpenAIServingCompletion(after, served, **shared)
    app.state.openai_serving_chat = OpenAIServingChat(
        after, served, "assistant", **shared, **chat_format.template, **chat_format.parsers
    )
    app.state.openai_serving_chat_batch = None
    refusals = problems(415) | {503: {"model": ErrorResponse, "description": "The replica has no verified weights now"}}
    app.include_router(models.router)
    for router in (completion.router, chat.router):
        app.include_router(router, dependencies=[Depends(whole_weights), Depends(text_alone)], responses=refusals)
    init_exception_handler(app)


class BehindTraining:
    """The engine for requests from outside the run. Whatever priority they ask for, the run's own (priority 0) are scheduled first.

    Each combination of a salt that they ask for and of `cache_salt` (`WeightReceiver.cache_salt`) has its own part of the prefix cache.
    """

    def __init__(self, engine: AsyncLLM, slots: SequenceSlots, cache_salt: Callable[[], str | None]) -> None:
        self._engine = engine
        self._slots = slots
        self._cache_salt = cache_salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, params: Any, *arguments: Any, priority: int = 0, **named: Any
    ) -> AsyncIterator[Any]:
        """Like the engine's `generate`. Raises `ValueError` at once, before a stream begins, for more sequences than there are slots."""
        self._slots.check(params.n)
        return self._outputs(prompt, params, *arguments, priority=max(1, priority), **named)

    async def _outputs(
        self, prompt: Any, params: Any, *arguments: Any, priority: int, **named: Any
    ) -> AsyncIterator[Any]:
        async with self._slots.take(params.n, priority):
            salt = self._cache_salt()
            if salt is not None:
                prompt = {**prompt, "cache_salt": f"{salt} {prompt.get('cache_salt', '')}"}
            outputs = self._engine.generate(prompt, params, *arguments, priority=priority, **named)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output


class RolloutMetrics(Collector):
    """The replica's Prometheus metrics, read from the worker's status at each scrape."""

    def __init__(self, worker: RolloutWorker, engine: AsyncLLM, puller: Puller | None) -> None:
        self.worker = worker
        self.engine = engine
        self.puller = puller

    def collect(self) -> Iterator[Metric]:
        status, verdict = self.worker.status, self.worker.receiver.verdict
        gauges = {
            "requests_running": (
                "Sequences in the engine, waiting or running",
                self.engine.get_num_unfinished_requests() + self.worker.slots.waiting,
            ),
            "leases_held": ("Groups being generated", len(self.worker.held)),
            "weight_version": ("Weight version verified last; -1 before the first", status.version),
            "healthy": ("1 if the replica holds verified weights and may lease", int(status.state == "HEALTHY")),
            "weight_difference": (
                "Largest |log-probability difference| to the trainer on the last probe, in nats",
                verdict and verdict.difference,
            ),
        }
        stats = EngineStats.of(self.engine)
        gauges |= {
            "kv_cache_use": ("Share of the engine's KV cache that running sequences hold", stats.kv_cache_use),
            "engine_running": ("Sequences that the engine computes in a step", stats.running),
            "engine_waiting": ("Sequences that have no room in the engine's steps", stats.waiting),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"headrace_rollout_{name}", text, value=value)
        for name, text, value in (
            ("tokens", "Tokens of trajectories handed in", status.tokens),
            ("trajectories", "Trajectories handed in", status.trajectories),
            ("saves", "Times an unfinished trajectory was saved", status.saves),
            (
                "tokens_taken_over",
                "Tokens of trajectories handed in that another replica sampled",
                status.tokens_taken_over,
            ),
            ("call_tokens", "Tokens sampled for answered calls", status.call_tokens),
            ("call_prompt_tokens", "Tokens that these calls continued", status.call_prompt_tokens),
            (
                "call_cached_tokens",
                "Tokens that these calls continued and that were in the prefix cache",
                status.call_cached_tokens,
            ),
            ("preemptions", "Times a running sequence lost its KV cache to others", stats.preemptions),
            ("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens of prompts found in the prefix cache", stats.prefix_hits),
            ("engine_prompt_tokens", "Tokens of prompts that the engine computed", stats.prompt_tokens),
            ("engine_generated_tokens", "Tokens that the engine sampled", stats.generated_tokens),
        ):
            yield CounterMetricFamily(f"headrace_rollout_{name}", text, value=value)
        labelled: list[tuple[str, str, str, Mapping[str, int]]] = [
            ("groups", "Leases, by how they ended", "outcome", status.groups),
            ("calls", "Calls of episodes, by how they ended", "outcome", status.calls),
            ("refits", "Refits taken part in, by outcome", "outcome", status.refits),
        ]
        if self.puller is not None:
            labelled.append(("pulled_bytes", "Bytes of weights, by source", "source", self.puller.fetched_from))
            served = self.puller.served.served_bytes
            yield CounterMetricFamily("headrace_rollout_served_bytes", "Bytes of weights sent to others", value=served)
        for name, text, label, counts in labelled:
            family = CounterMetricFamily(f"headrace_rollout_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
