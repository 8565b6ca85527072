"""One trajectory: from a lease to the tokens, log-probabilities and weight-version spans that the engine sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.replay import Lease
from headrace.trajectory import Group, Sampling, Span, Trajectory

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_CONTEXT_TOKENS = 5  # vLLM's own detokenizer looks back as far


class GenerationError(HeadraceError):
    """The engine gave something that is no trajectory; the attempt at the group has failed."""


def prompt_problem(group: Group, context: int) -> str | None:
    """Why no replica can ever generate this group, if so. `context` is the engine's, in tokens."""
    length = group.prompt_token_ids.size
    if length >= context:
        return (
            f"the prompt has {length} tokens; policy.max_total_sequence_length {context} leaves no room for a completion: "
            f"raise it, or set data.max_input_seq_length"
        )
    return None


async def generate(engine: AsyncLLM, lease: Lease, index: int, replica: str) -> Trajectory:
    """Sample trajectory `index` of the lease's group. Cancelling it aborts the request in the engine.

    Raises `GenerationError` if the request ended without being finished or its tokens are not from known weights, and vLLM's
    own errors (`EngineDeadError`, or a `VLLMClientError` for a request that it refuses).
    """
    from vllm.inputs.engine import tokens_input

    began = time.monotonic()
    prompt = lease.group.prompt_token_ids.tolist()
    params = sampling_params(lease.group.sampling, index)
    # FINAL_ONLY: one output, the finished one
    outputs = [
        final.outputs[0] async for final in engine.generate(tokens_input(prompt), params, f"{lease.token}-{index}")
    ]
    if not outputs:
        raise GenerationError(f"trajectory {index}: the engine gave no output")
    output = outputs[-1]
    text = output.text if params.detokenize else detokenize(engine.renderer.get_tokenizer(), prompt, output.token_ids)
    return trajectory(lease, index, output, replica, text, time.monotonic() - began)


def sampling_params(sampling: Sampling, index: int) -> SamplingParams:
    """vLLM's parameters for trajectory `index`: the sampled token's log-probability alone, and one output at the end."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        seed=None if sampling.seed is None else sampling.seed + index,
        logprobs=0,
        flat_logprobs=True,
        # text token by token, at twice the cost of all else in this process, is needed only to find stop strings in it
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def detokenize(tokenizer: Any, prompt: Sequence[int], completion: Sequence[int]) -> str:
    """The completion's text as it continues the prompt, without special tokens.

    Decoded alone, a completion loses a leading space with some tokenizers, so a few tokens of the prompt lead the way.
    """
    context = list(prompt[-_CONTEXT_TOKENS:])
    lead, whole = (
        tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for ids in (context, [*context, *completion])
    )
    return str(whole[len(lead) :])


def trajectory(
    lease: Lease, index: int, output: CompletionOutput, replica: str, text: str, seconds: float
) -> Trajectory:
    """The record of a finished completion. The end token belongs to the completion's ids, not to its text."""
    ids = np.asarray(output.token_ids, dtype=np.int32)
    where = f"trajectory {index}"
    if output.finish_reason not in ("stop", "length"):
        raise GenerationError(f"{where}: the engine ended it with {output.finish_reason!r}")
    # one sampled token a position, so the flat lists are in step with the ids
    if output.logprobs is None or output.logprobs.token_ids != ids.tolist():
        raise GenerationError(f"{where}: log-probabilities are not of the {ids.size} sampled tokens")
    record = Trajectory(
        group_id=lease.group.id,
        attempt=lease.attempt,
        index=index,
        prompt_token_ids=lease.group.prompt_token_ids,
        completion_token_ids=ids,
        logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        loss_mask=np.ones(ids.size, dtype=np.uint8),
        spans=_spans(output, where),
        finish_reason=output.finish_reason,
        text=text,
        replica=replica,
        turns=((0, ids.size),),
        timings={"generate_s": seconds},
    )
    record.check()
    return record


def _spans(output: CompletionOutput, where: str) -> tuple[Span, ...]:
    """Law 2 counts age by these, so a token whose weights have no version never leaves the replica."""
    labels = output.weight_versions or []
    if not labels or not all(span.version.isdecimal() for span in labels):
        raise GenerationError(f"{where}: sampled from weights that no refit has named ({labels})")
    return tuple(Span(int(span.version), span.start, span.end) for span in labels)
