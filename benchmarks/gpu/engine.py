"""vLLM with this project's defaults: how fast it decodes, and a refit of the policy it serves."""

from __future__ import annotations

import asyncio
import importlib
import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import NEEDS_CUDA
from benchmarks.gpu.stage import Stage, seconds
from headrace.config import Config

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from benchmarks.refit import Source

DECODING, REFIT = "decoding with defaults", "a refit, with its proofs"
RUNNER = "model runner V{}"
PROMPT = 64
REFITS = 3


def engine(stage: Stage) -> None:
    """With vLLM's model runner of VLLM_USE_V2_MODEL_RUNNER, of which the second needs a GPU.

    Raises `ModuleNotFoundError` where there is no vLLM or no server for the buffer: what is needed here alone is imported here.
    """
    importlib.import_module("vllm")
    from benchmarks.refit import Source, buffer
    from headrace_services.rollout.engine import running_engine

    size, on_gpu = stage.size, stage.device == "cuda"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and not on_gpu:
        for what in (DECODING, REFIT):
            stage.rows.add(f"{what}, {RUNNER.format(2)}", NEEDS_CUDA)
        return
    # vLLM's default takes 0.9 of a GPU, and of a CPU's memory as much as it likes
    vllm_cfg = {} if on_gpu else {"kv_cache_memory_bytes": 2**26}
    keys = {
        "max_total_sequence_length": PROMPT + size.decode,
        "generation": {"max_new_tokens": size.decode, "vllm_cfg": vllm_cfg},
    }
    config = size.config(stage.model, stage.device, "bfloat16" if on_gpu else "float32", **keys)
    source = Source(AutoModelForCausalLM.from_pretrained(config.policy.model_name, dtype=torch.float32))
    with running_engine(config) as running, buffer(stage.folder / "buffer") as server:
        asyncio.run(_measure(stage, config, running, server.url, source))


async def _measure(stage: Stage, config: Config, running: AsyncLLM, redis_url: str, source: Source) -> None:
    from benchmarks.refit import PHASES, refits
    from headrace_services.rollout.engine import described

    size = stage.size
    runner = RUNNER.format(2 if running.vllm_config.use_v2_model_runner else 1)
    stage.rows.add(f"the engine, {runner}", await described(running))
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
