"""vLLM with this project's defaults: how fast it decodes, and a refit of the policy it serves."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import NEEDS_CUDA
from benchmarks.gpu.stage import Stage, seconds
from headrace.config import Config
from headrace_services.refit.probe import choose_token_ids, tolerance

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.refit import Source

DECODING, REFIT = "decoding with defaults", "a refit, with its proofs"
IN_FLIGHT = "a refit during completions"
RUNNER = "model runner V{}"
PROMPT = 64
# Ids of prompt and completion, the completion's log-probabilities, and its spans: version, first token, end.
_Completion = tuple[list[int], np.ndarray, list[tuple[str, int, int]]]
REFITS = 3
COMPLETIONS = 2  # during a refit; each is computed again on the CPU


def engine(stage: Stage) -> None:
    """With vLLM's model runner of VLLM_USE_V2_MODEL_RUNNER, of which the second needs a GPU.

    Raises `ModuleNotFoundError` where there is no vLLM or no server for the buffer: what is needed here alone is imported here.
    """
    importlib.import_module("vllm")
    from benchmarks.buffer import server
    from benchmarks.refit import Source
    from headrace_services.rollout.engine import running_engine

    size, on_gpu = stage.size, stage.device == "cuda"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and not on_gpu:
        for what in (DECODING, REFIT, IN_FLIGHT):
            stage.rows.add(f"{what}, {RUNNER.format(2)}", NEEDS_CUDA)
        return
    # vLLM's default takes 0.9 of a GPU, and of a CPU's memory as much as it likes
    vllm_cfg = {} if on_gpu else {"kv_cache_memory_bytes": 2**26}
    keys = {
        "max_total_sequence_length": PROMPT + max(size.decode, size.in_flight),
        "generation": {"max_new_tokens": max(size.decode, size.in_flight), "vllm_cfg": vllm_cfg},
    }
    config = size.config(stage.model, stage.device, "bfloat16" if on_gpu else "float32", **keys)
    source = Source(AutoModelForCausalLM.from_pretrained(config.policy.model_name, dtype=torch.float32))
    with running_engine(config) as running, server() as buffer:
        asyncio.run(_measure(stage, config, running, buffer.url, source))


async def _measure(stage: Stage, config: Config, running: AsyncLLM, redis_url: str, source: Source) -> None:
    from benchmarks.refit import PHASES, refits
    from headrace_services.rollout.engine import describe

    size = stage.size
    runner = RUNNER.format(2 if running.vllm_config.use_v2_model_runner else 1)
    stage.rows.add(f"the engine, {runner}", await describe(running))
    await _decode(running, size.requests, 1)  # kernels are compiled at their first use
    rate = size.requests * size.decode / await _decode(running, size.requests, size.decode)
    width = 2 if config.policy.precision == "bfloat16" else 4
    nbytes = width * sum(parameter.numel() for parameter in source.model.parameters())
    read = 2 * size.bandwidth_bytes / _copy(stage)  # a copy reads and writes
    limit = size.requests * read / nbytes
    stage.rows.add(
        f"{DECODING}, {runner}",
        f"{rate:,.0f} tokens/s, {rate / limit:.2g} of the limit",
        f"{limit:,.0f} tokens/s: the weights are read once for a token of each of {size.requests} requests, at {read / 1e9:,.0f} GB/s",
    )
    samples, _, sent = await refits(config, running, redis_url, source, rounds=REFITS)
    found = {phase: statistics.median(seconds) for phase, seconds in samples.items()}
    parts = ", ".join(f"{phase} {found[phase]:.2f}" for phase in PHASES)
    stage.rows.add(f"{REFIT}, {runner}", f"{sent / 1e9:.2g} GB in {found['whole']:.2f} s ({parts})")
    stage.rows.add(f"{IN_FLIGHT}, {runner}", await _in_flight(stage, config, running, redis_url, source))


async def _in_flight(stage: Stage, config: Config, running: AsyncLLM, redis_url: str, source: Source) -> str:
    """Whether each token of completions that a refit met is of the weights that its span names."""
    from benchmarks.refit import TIMELINE, follow, open_run
    from headrace_services.refit.receiver import WeightReceiver
    from headrace_services.refit.sender import WeightSender

    replay = await open_run(redis_url, f"in-flight-{secrets.token_hex(4)}")
    sender, receiver = WeightSender(config, replay), WeightReceiver(config, running, replay, "replica")
    await replay.register("replica", {"device": "cpu"})
    followed = asyncio.create_task(follow(replay, receiver))
    ids = choose_token_ids(stage.size.policy_config.vocab_size)

    async def refit(version: int, probe: np.ndarray) -> None:
        report = await sender.refit(version, TIMELINE, source, ids, probe)
        if report.verified != ("replica",):
            raise RuntimeError(f"the refit to version {version} was refused: {report.refused}")

    try:
        await refit(0, source.logprobs(ids))
        _move(source, 1)  # before the completions begin, which a large model on a CPU takes as long for
        probe = source.logprobs(ids)
        begun = [asyncio.Event() for _ in range(COMPLETIONS)]
        completions = [
            asyncio.create_task(_complete(running, number, stage.size.in_flight, event))
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await refit(1, probe)
        done = await asyncio.gather(*completions)
    finally:
        followed.cancel()
        await sender.aclose()
        await replay.aclose()
    scheduling = f"async scheduling {'on' if running.vllm_config.scheduler_config.async_scheduling else 'off'}"
    if any([version for version, _, _ in spans] != ["0", "1"] for _, _, spans in done):
        return f"failed: {scheduling}, the spans are {[spans for _, _, spans in done]}, and not of versions 0 and 1"
    computed = {"1": _computed(source, done)}
    _move(source, -1)
    computed["0"] = _computed(source, done)
    own, other = (
        max(
            float(np.abs(computed[version if same else str(1 - int(version))][number] - logprobs)[start:end].mean())
            for number, (_, logprobs, spans) in enumerate(done)
            for version, start, end in spans
        )
        for same in (True, False)
    )
    bound = tolerance(config).mean
    return (
        f"{'failed: ' if own > bound or other < 2 * own else ''}{scheduling}; of {2 * COMPLETIONS} spans, log-probabilities are at most "
        f"{own:.2g} nats in the mean from those of the weights that they name, and up to {other:.2g} from those of the others"
    )


def _move(source: Source, by: int) -> None:
    """Give each token of the vocabulary the embedding of another: of all changes the one that shows most and can be taken back."""
    with torch.no_grad():
        weight = source.model.get_input_embeddings().weight  # type: ignore[operator]
        weight.copy_(weight.roll(by, 0))


def _computed(source: Source, done: Sequence[_Completion]) -> list[np.ndarray]:
    """The log-probabilities of the completions' tokens by the source's weights."""
    return [source.logprobs(np.array(ids))[PROMPT - 1 :] for ids, _, _ in done]


async def _complete(running: AsyncLLM, number: int, tokens: int, begun: asyncio.Event) -> _Completion:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    prompt = np.random.default_rng(number).integers(0, 500, PROMPT).tolist()
    async for output in running.generate(tokens_input(prompt), params, f"in-flight-{number}"):
        begun.set()
        it = output.outputs[0]
    assert it.logprobs is not None
    logprobs = [row[token].logprob for row, token in zip(it.logprobs, it.token_ids, strict=True)]
    spans = [(span.version, span.start, span.end) for span in it.weight_versions or ()]
    return [*prompt, *it.token_ids], np.array(logprobs), spans


async def _decode(running: AsyncLLM, requests: int, tokens: int) -> float:
    """Seconds for as many requests at once, of random prompts that differ."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(tokens)

    async def one(number: int) -> None:
        ids = rng.integers(0, 500, PROMPT).tolist()
        async for _ in running.generate(tokens_input(ids), params, f"decode-{tokens}-{number}"):
            continue

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(requests)))
    return time.perf_counter() - began


def _copy(stage: Stage) -> float:
    """Seconds of a copy within the device's memory."""
    here = torch.ones(stage.size.bandwidth_bytes, dtype=torch.uint8, device=stage.torch_device)
    there = torch.empty_like(here)
    return seconds(stage.torch_device, lambda: there.copy_(here))
