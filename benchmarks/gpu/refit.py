"""Refits during completions: how long no token is generated, how fast the weights travel, and whether each token is of the weights that its
span names."""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.buffer import server
from benchmarks.gpu import engine
from benchmarks.gpu.rows import NOT_RUN
from benchmarks.gpu.runs import PAUSED
from benchmarks.gpu.stage import Stage
from benchmarks.refit import TIMELINE, Source, follow, open_run
from headrace.config import Config
from headrace.records.trajectory import Float32, Trajectory
from headrace_services.refit.probe import choose_token_ids, tolerance
from headrace_services.refit.receiver import WeightReceiver
from headrace_services.refit.sender import RefitReport, WeightSender
from headrace_services.rollout.engine import describe, running_engine
from headrace_services.rollout.generate import Saver

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

REFITS = 3
REQUESTS, PROMPT = 8, 64
CHECKED = 2  # completions that the trainer's model computes again
FIRST_TOKENS = 8
RECEIVING = "receiving weights"


def in_flight(stage: Stage) -> None:
    """With vLLM's model runner of VLLM_USE_V2_MODEL_RUNNER, of which the second needs Triton."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" and not stage.on_gpu:
        stage.rows.add("refits during completions", f"{NOT_RUN}: model runner V2 needs a GPU")
        return
    # otherwise later tokens attend to keys and values of older weights, and no model reproduces them
    recompute = "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"
    config = engine.config(stage, recompute, *([] if stage.on_gpu else ["policy.precision=float32"]))
    limit = engine.copy_rate(stage, to_host=True)
    stage.forget()
    with running_engine(config) as running, server() as buffer:
        model = AutoModelForCausalLM.from_pretrained(stage.model, dtype=torch.float32).to(stage.torch_device)
        asyncio.run(_measure(stage, config, running, buffer.url, Source(model), limit))


async def _measure(
    stage: Stage, config: Config, running: AsyncLLM, redis_url: str, source: Source, limit: float
) -> None:
    stage.rows.add("the engine", await describe(running))
    replay = await open_run(redis_url, f"in-flight-{secrets.token_hex(4)}")
    sender, receiver = WeightSender(config, replay), WeightReceiver(config, running, replay, "replica")
    await replay.register("replica", {"device": "cpu"})
    followed = asyncio.create_task(follow(replay, receiver))
    ids = choose_token_ids(_vocabulary(source))
    seconds: list[dict[str, float]] = []

    async def refit(version: int) -> RefitReport:
        report = await sender.refit(version, TIMELINE, source, ids, source.logprobs(ids))
        if report.verified != ("replica",):
            raise RuntimeError(f"the refit to version {version} was refused: {report.refused}")
        seconds.append(dict(receiver.seconds))
        return report

    try:
        report = await refit(0)  # forms the group
        begun = asyncio.Event()

        async def note(unfinished: Trajectory) -> None:
            begun.set()

        asked = engine.leases(REQUESTS, PROMPT, stage.size.in_flight)
        completions = asyncio.create_task(engine.sample(running, asked, Saver(FIRST_TOKENS, note)))
        await asyncio.wait([asyncio.create_task(begun.wait()), completions], return_when=asyncio.FIRST_COMPLETED)
        for version in range(1, REFITS + 1):
            _move(source, version)
            report = await refit(version)
        done = await completions
    finally:
        followed.cancel()
        await sender.aclose()
        await replay.aclose()
    pauses = [sum(phases.get(phase, 0.0) for phase in PAUSED) for phases in seconds[1:]]
    stage.rows.add(
        "the pause: no token is generated", 1000 * statistics.median(pauses), "ms", "the transfer, and little more"
    )
    took = statistics.median(phases[RECEIVING] for phases in seconds[1:])
    expected = f"below {limit / 1e9:.3g} GB/s, a copy to the host; gloo has about 2.5 on a CPU"
    stage.rows.add("weights received and loaded", report.nbytes / took / 1e9, "GB/s", expected)
    stage.rows.add("bytes of a refit", report.nbytes / 1e9, "GB")
    _report_tokens(stage, config, source, done)


def _report_tokens(stage: Stage, config: Config, source: Source, done: Sequence[Trajectory]) -> None:
    """Rows of whether the tokens are of the weights that their spans name: near those, and far from the others."""
    versions = sorted({span.version for one in done for span in one.spans})
    met = [version % 2 for version in versions]
    stage.rows.add("versions in the completions", str(versions), "", "more than one", len(set(met)) == 2)
    chosen = sorted(done, key=lambda one: len(one.spans))[-CHECKED:]
    computed = {REFITS % 2: [_logprobs(source, one) for one in chosen]}
    _move(source, REFITS + 1)
    computed[1 - REFITS % 2] = [_logprobs(source, one) for one in chosen]
    own, other = (
        max(
            float(np.abs(computed[span.version % 2 ^ odd][number] - one.logprobs)[span.start : span.end].mean())
            for number, one in enumerate(chosen)
            for span in one.spans
        )
        for odd in (0, 1)
    )
    bound = tolerance(config).mean
    stage.rows.add("a span, from the weights that it names: mean", own, "nats", f"below {bound:g}", own < bound)
    stage.rows.add("a span, from the other weights: mean", other, "nats", "twice as much, or more", other > 2 * own)


def _move(source: Source, version: int) -> None:
    """Give each token of the vocabulary the embedding of another, or its own again: odd versions are equal, and even ones."""
    with torch.no_grad():
        weight = source.model.get_input_embeddings().weight  # type: ignore[operator]
        weight.copy_(weight.roll(1 if version % 2 else -1, 0))


def _logprobs(source: Source, one: Trajectory) -> Float32:
    ids = np.concatenate([one.prompt_token_ids, one.completion_token_ids])
    found: Float32 = source.logprobs(ids)[one.prompt_token_ids.size - 1 :]
    return found


def _vocabulary(source: Source) -> int:
    config: Any = source.model.config
    return int(config.vocab_size)
