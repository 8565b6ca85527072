"""Generates one trajectory of a lease: tokens, log-probabilities and weight-version spans from the engine, after a prefix that another
replica may have sampled."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.base.errors import HeadraceError
from headrace.net import tracing
from headrace.records.trajectory import FinishReason, Group, Sampling, Span, Trajectory
from headrace.replay import Lease

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

_CONTEXT_TOKENS = 5  # as many as vLLM's own detokenizer looks back
# (version, first token) of each run of this request's tokens that were sampled from the same weights
Labels = Sequence[tuple[str, int]]
# returns the text of a completion's first tokens
Text = Callable[[Sequence[int]], str]


class GenerationError(HeadraceError):
    """Raised when the engine's output is not a valid trajectory: the attempt has failed."""


class RequestAborted(GenerationError):
    """Raised when this replica aborted the request. Its tokens so far are saved."""


@dataclasses.dataclass(frozen=True)
class Saver:
    """Saves an unfinished trajectory with `save`, each time it has grown by `every` tokens (None: never), and when it is aborted."""

    every: int | None
    save: Callable[[Trajectory], Awaitable[None]]


def prompt_problem(group: Group, context: int) -> str | None:
    """Return why no replica can ever generate this group, or None. `context` is the engine's context length in tokens."""
    length = group.prompt_token_ids.size
    if length >= context:
        return (
            f"the prompt has {length} tokens; policy.max_total_sequence_length {context} leaves no room for a completion: "
            f"raise it, or set data.max_input_seq_length"
        )
    return None


def request_id(lease: Lease, index: int) -> str:
    """Return the trajectory's request id in the engine."""
    return f"{lease.token}-{index}"


async def generate(
    engine: AsyncLLM, lease: Lease, index: int, replica: str, saver: Saver | None = None, cache_salt: str | None = None
) -> Trajectory:
    """Sample trajectory `index` of the lease's group, continuing the prefix that another replica may have sampled (`lease.prefixes`).
    `cache_salt` is `WeightReceiver.cache_salt`. Cancellation aborts the request in the engine.

    Raises `GenerationError` if the request ended unfinished or its tokens are not from known weights (`RequestAborted` if it was aborted
    and there is a `saver`), whatever `saver.save` raises, and vLLM's own errors (`EngineDeadError`, or `VLLMClientError` for a request that
    it refuses).
    """
    from vllm.inputs.engine import tokens_input

    sampled = SampledTokens(lease, index, replica)
    prompt = [*lease.group.prompt_token_ids.tolist(), *sampled.ids]
    every = saver.every if saver else None
    if every is not None and lease.group.sampling.max_new_tokens - sampled.begun <= every:
        every = None  # it ends before its first save: intermediate outputs would only cost time
    params = sampling_params(lease.group.sampling, index, begun=sampled.begun, every=every)
    request = request_id(lease, index)
    saved = 0

    # closed at once if saving fails, so that the request does not keep running
    async with contextlib.aclosing(
        engine.generate(tokens_input(prompt, cache_salt=cache_salt), params, request)
    ) as outputs:
        async for output in outputs:
            completion = output.outputs[0]
            sampled.add(completion)
            if output.finished:
                trace_request(output)
                labels = read_labels(completion)
                if completion.finish_reason == "abort" and saver is not None:
                    if sampled.new:
                        await saver.save(sampled.record(labels, "length", "", sampled.begun + sampled.new))
                    raise RequestAborted(f"trajectory {index}: aborted after {sampled.new} tokens")
                return _finish(engine, sampled, completion, labels)
            if saver is not None and every is not None and sampled.new - saved >= every:
                labels = _labels(engine, request)
                if labels:  # empty if the request has ended in the meantime
                    saved = sampled.new
                    await saver.save(sampled.record(labels, "length", "", sampled.begun + sampled.new))
    raise GenerationError(f"trajectory {index}: the engine returned no output")


def trace_request(output: RequestOutput) -> None:
    """Add what the engine knows of a finished request to the current span, under vLLM's own names."""
    span = tracing.current()
    if span is tracing.NO_SPAN:
        return
    completion, stats = output.outputs[0], output.metrics
    span.set(
        {
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids or ()),
            "gen_ai.usage.completion_tokens": len(completion.token_ids)
            if stats is None
            else stats.num_generation_tokens,
            "gen_ai.response.finish_reasons": [str(completion.finish_reason)],
            "headrace.cached_tokens": output.num_cached_tokens or 0,
        }
    )
    if stats is not None and stats.first_token_ts:
        span.set(
            {
                "gen_ai.latency.time_in_queue": stats.scheduled_ts - stats.queued_ts,
                "gen_ai.latency.time_to_first_token": stats.first_token_latency,
                "gen_ai.latency.time_in_model_prefill": stats.first_token_ts - stats.scheduled_ts,
                "gen_ai.latency.time_in_model_decode": stats.last_token_ts - stats.first_token_ts,
                "headrace.preemptions": stats.num_preemptions,
            }
        )


def _labels(engine: AsyncLLM, request: str) -> Labels:
    """Return the weight versions of a running request's tokens, as the engine will report them at the end."""
    return [label for state in _states(engine, request) for label in state.weight_version_starts]


def sampled_tokens(engine: AsyncLLM, request: str) -> int:
    """Return how many tokens the engine has sampled for a running request, whether or not it has returned them. 0 if it doesn't run."""
    return sum(state.detokenizer.num_output_tokens() for state in _states(engine, request) if state.detokenizer)


def _states(engine: AsyncLLM, request: str) -> list[RequestState]:
    processor = engine.output_processor
    internals = processor.external_req_ids.get(request, ())
    return [processor.request_states[internal] for internal in internals if internal in processor.request_states]


def _finish(engine: AsyncLLM, sampled: SampledTokens, output: CompletionOutput, labels: Labels) -> Trajectory:
    """Return the finished trajectory. The end token belongs to the completion's ids, but not to its text."""
    finish = output.finish_reason
    if finish != "stop" and finish != "length":
        raise GenerationError(f"trajectory {sampled.index}: the engine ended it with {finish!r}")
    ids, group = sampled.ids, sampled.lease.group
    stops, tokenizer, prompt = (
        group.sampling.stop_strings,
        engine.renderer.get_tokenizer(),
        group.prompt_token_ids.tolist(),
    )
    end = len(ids) if finish == "length" or isinstance(output.stop_reason, str) else len(ids) - 1

    def text_of(part: Sequence[int]) -> str:
        return detokenize(tokenizer, prompt, part[:end])

    if stops and sampled.begun:
        length, text = end_at_stop(text_of, ids, sampled.begun, stops)
        return sampled.record(labels, "stop" if length < len(ids) else finish, text, length)
    return sampled.record(labels, finish, sampled.text if stops else text_of(ids), len(ids))


def sampling_params(sampling: Sampling, index: int, *, begun: int = 0, every: int | None = None) -> SamplingParams:
    """Return vLLM's parameters for trajectory `index`, of which `begun` tokens exist already. They ask for log-probabilities of sampled
    tokens only, and for one output at the end, or one every `every` tokens."""
    params = copy.copy(_params(sampling, sampling.max_new_tokens - begun, every))
    params.seed = _seed(sampling.seed, index, begun)
    return params


@functools.lru_cache(maxsize=256)
def _params(sampling: Sampling, max_tokens: int, every: int | None) -> SamplingParams:
    """Return the sampling parameters that the trajectories of many groups share. They are cached, because vLLM checks each new object,
    which takes a fifth of the time that a trajectory costs here."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        bad_words=list(sampling.bad_words),
        seed=sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        # only stop strings need the text of each token as it comes
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY if every is None else RequestOutputKind.DELTA,
        stream_interval=every,
        skip_clone=True,  # vLLM then makes a shallow copy per request, which is enough: it modifies no nested object for a single request
    )


def _seed(seed: int | None, index: int, begun: int) -> int | None:
    """Return the seed of a request. A continuation draws different random numbers than its prefix did."""
    if seed is None:
        return None
    if not begun:
        return seed + index
    return int(np.random.SeedSequence([seed + index, begun]).generate_state(1)[0])


def detokenize(
    tokenizer: Any, prompt: Sequence[int], completion: Sequence[int], *, special_tokens: bool = False
) -> str:
    """Return the completion's text as it continues the prompt, without special tokens unless `special_tokens`.

    With some tokenizers, a completion that is decoded alone loses a leading space. So the last few tokens of the prompt are decoded with
    it.
    """
    context = list(prompt[-_CONTEXT_TOKENS:])
    lead, whole = (
        tokenizer.decode(ids, skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False)
        for ids in (context, [*context, *completion])
    )
    return str(whole[len(lead) :])


class SampledTokens:
    """The tokens of a trajectory, collected from the engine's outputs. Every record starts with the `begun` tokens of the prefix."""

    def __init__(self, lease: Lease, index: int, replica: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease = lease
        self.index = index
        self._replica = replica
        self._clock = clock
        self._began_at = clock()
        self._prefix = lease.prefixes.get(index)
        self._begun: list[int] = self._prefix.completion_token_ids.tolist() if self._prefix else []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self.text = ""

    @property
    def new(self) -> int:
        """The number of tokens sampled by this replica."""
        return len(self._ids)

    @property
    def begun(self) -> int:
        return len(self._begun)

    @property
    def ids(self) -> list[int]:
        """The completion so far."""
        return [*self._begun, *self._ids]

    def add(self, output: CompletionOutput) -> None:
        """Add the tokens since the last output. Raises `GenerationError` if their log-probabilities are missing."""
        if not output.token_ids:
            return
        self._logprobs += sampled_logprobs(output, f"trajectory {self.index}")
        self._ids += output.token_ids
        self.text += output.text

    def record(self, labels: Labels, finish: FinishReason, text: str, length: int) -> Trajectory:
        """Return the first `length` tokens as a trajectory."""
        ids = np.asarray(self.ids[:length], dtype=np.int32)
        prefix = self._prefix
        before = prefix.logprobs if prefix else np.empty(0, dtype=np.float32)
        fresh = make_spans(labels, self.begun, len(self.ids), f"trajectory {self.index}")
        spans = [*(prefix.spans if prefix else ()), *fresh]
        writers = (*(prefix.written if prefix else ()), (self._replica, self.begun, length))
        seconds = self._clock() - self._began_at + (prefix.timings.get("generate_s", 0.0) if prefix else 0.0)
        record = Trajectory(
            group_id=self.lease.group.id,
            attempt=self.lease.attempt,
            index=self.index,
            prompt_token_ids=self.lease.group.prompt_token_ids,
            completion_token_ids=ids,
            logprobs=np.concatenate([before, np.asarray(self._logprobs, dtype=np.float32)])[:length],
            loss_mask=np.ones(ids.size, dtype=np.uint8),
            spans=merge_spans(spans, length),
            finish_reason=finish,
            text=text,
            replica=self._replica,
            turns=((0, ids.size),),
            timings={"generate_s": seconds},
            writers=writers,
        )
        record.check()
        return record


def sampled_logprobs(output: CompletionOutput, what: str) -> list[float]:
    """Return the log-probabilities of the output's tokens. Raises `GenerationError`, whose message begins with `what`, if they belong to
    other tokens."""
    # one sampled token per position, so the flat lists match the ids
    if output.logprobs is None or list(output.logprobs.token_ids) != list(output.token_ids):
        raise GenerationError(
            f"{what}: the log-probabilities are not those of the {len(output.token_ids)} sampled tokens"
        )
    logprobs: list[float] = output.logprobs.logprobs
    return logprobs


def read_labels(output: CompletionOutput) -> Labels:
    return [(span.version, span.start) for span in output.weight_versions or ()]


def make_spans(labels: Labels, begun: int, end: int, what: str) -> list[Span]:
    """Return the weight-version spans of tokens `[begun, end)`.

    Law 2 computes age from the spans, so a token whose weights have no version never leaves the replica: it raises `GenerationError`, whose
    message begins with `what`.
    """
    if not labels or not all(version.isdecimal() for version, _ in labels):
        raise GenerationError(f"{what}: sampled from weights that no refit has given a version ({list(labels)})")
    starts = [begun + start for _, start in labels]
    return [
        Span(int(version), start, stop)
        for (version, _), start, stop in zip(labels, starts, [*starts[1:], end], strict=True)
    ]


def merge_spans(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Return the spans of the first `length` tokens, with neighbours of the same version merged."""
    whole: list[Span] = []
    for span in spans:
        end = min(span.end, length)
        if end <= span.start:
            continue
        if whole and whole[-1].version == span.version:
            whole[-1] = Span(span.version, whole[-1].start, end)
        else:
            whole.append(Span(span.version, span.start, end))
    return tuple(whole)


def end_at_stop(text_of: Text, ids: Sequence[int], begun: int, stops: Sequence[str]) -> tuple[int, str]:
    """Return the length and text of a completion that continues a prefix of `begun` tokens, cut off at its first stop string.

    The engine searches only the tokens that it sampled itself. This function also finds a stop string that begins in the prefix. The text
    ends where the stop string begins.
    """
    longest = max(len(stop.encode()) for stop in stops)
    lengths = [*range(begun + 1, min(begun + longest, len(ids))), len(ids)]
    for length in lengths:
        text = text_of(ids[:length])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return length, text[: min(found)]
    return len(ids), text
