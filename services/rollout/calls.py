"""Samples the completion of one call of an episode from the engine. A call needs no lease."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING

from headrace.net.replica_client import RenderRefused, SampleRequest, StopReason
from headrace.records.trajectory import FinishReason, Span

from .generate import (
    GenerationError,
    make_spans,
    merge_spans,
    read_labels,
    sampled_logprobs,
    sampling_params,
    trace_request,
)

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclasses.dataclass(frozen=True)
class Completion:
    """The engine's part of a `Sampled`: all that is known before the weights are verified."""

    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    stop_reason: StopReason
    cached_tokens: int


def check_request(request: SampleRequest, context: int, vocabulary: int) -> None:
    """Raise `RenderRefused` for a request that must not reach the engine. `context` is the engine's context length, `vocabulary` the number
    of rows of its embedding."""
    if not request.token_ids:
        raise RenderRefused("invalid", "token_ids is empty; a completion continues at least one token")
    length = len(request.token_ids)
    if length + request.max_new_tokens > context:
        raise RenderRefused(
            "context",
            f"token_ids has {length} tokens, which with max_new_tokens {request.max_new_tokens} exceed the context of {context}",
        )
    for name, ids in (("token_ids", request.token_ids), ("stop_token_ids", request.stop_token_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
            place = next(place for place, token in enumerate(ids) if not 0 <= token < vocabulary)
            raise RenderRefused(
                "invalid", f"{name}[{place}] is {ids[place]}; the model has tokens 0 to {vocabulary - 1}"
            )


async def complete(
    engine: AsyncLLM, request: SampleRequest, name: str, *, special_tokens: bool, cache_salt: str | None
) -> Completion:
    """Sample the completion. Cancellation aborts the request, `name`, in the engine. With `special_tokens`, stop strings are searched in
    text that includes special tokens. `cache_salt` is `WeightReceiver.cache_salt`.

    Raises `RenderRefused` for what vLLM refuses, `GenerationError` if the engine returned no whole completion, and vLLM's
    `EngineDeadError`.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.inputs.engine import tokens_input

    prompt = tokens_input(list(request.token_ids), cache_salt=cache_salt)
    try:
        params = sampling_params(request.sampling, 0)
        params.skip_special_tokens = not special_tokens
        async with contextlib.aclosing(engine.generate(prompt, params, name)) as outputs:
            async for output in outputs:
                if output.finished:
                    trace_request(output)
                    return _completion(output.outputs[0], output.num_cached_tokens or 0, name)
    except (VLLMClientError, ValueError) as error:  # not all of vLLM's refusals have their own type
        raise RenderRefused("invalid", str(error)) from error
    raise GenerationError(f"{name}: the engine returned no output")


def _completion(output: CompletionOutput, cached_tokens: int, name: str) -> Completion:
    finish, ids = output.finish_reason, list(output.token_ids)
    if not ids or (finish != "stop" and finish != "length"):
        raise GenerationError(f"{name}: the engine ended it with {finish!r} after {len(ids)} tokens")
    logprobs = sampled_logprobs(output, name)
    if not all(map(math.isfinite, logprobs)):
        raise GenerationError(f"{name}: a log-probability is not finite")
    spans = merge_spans(make_spans(read_labels(output), 0, len(ids), name), len(ids))
    # vLLM gives no reason if the model's own end token ended the completion
    reason = None if finish == "length" else ids[-1] if output.stop_reason is None else output.stop_reason
    return Completion(ids, logprobs, spans, finish, reason, cached_tokens)
