"""How fast the engine decodes with this project's defaults, and how much of the processor its front end takes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from transformers import AutoConfig

from benchmarks.gpu import engine
from benchmarks.gpu.stage import Stage
from benchmarks.refit import cpu_seconds
from headrace.base.errors import HeadraceError
from headrace_services.rollout.engine import describe, running_engine
from headrace_services.trainer.memory.models import ModelSize, element_size

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

PROMPT = 64


def decode(stage: Stage) -> None:
    config = stage.config()
    width = element_size(config.policy.rollout_precision[1])
    nbytes = width * ModelSize.of(AutoConfig.from_pretrained(stage.model)).parameters
    read = 2 * engine.copy_rate(stage)  # a copy reads and writes
    stage.forget()
    with running_engine(config) as running:
        asyncio.run(_measure(stage, running, read / nbytes))


async def _measure(stage: Stage, running: AsyncLLM, passes_a_second: float) -> None:
    await running.update_weight_version("0")
    stage.rows.add("the engine", await describe(running))
    await engine.sample(
        running, engine.leases(max(stage.size.requests), PROMPT, 2)
    )  # kernels are compiled at first use
    for requests in stage.size.requests:
        what = f"{requests:,} requests at once"
        asked = engine.leases(requests, PROMPT, stage.size.decode, seed=requests)
        began, before = time.perf_counter(), cpu_seconds()
        try:
            done = await engine.sample(running, asked)
        except HeadraceError as error:
            stage.rows.fail(what, error)
            continue
        took, (front, core) = time.perf_counter() - began, cpu_seconds() - before
        tokens = sum(one.length for one in done)
        limit = (
            f"below {requests * passes_a_second:,.0f} tokens/s: the weights are read once for a token of each request"
        )
        stage.rows.add(what, tokens / took, "tokens/s", limit)
        stage.rows.add(f"{what}: CPU of the front end", front / took, "cores", "below 1: it has one thread")
        stage.rows.add(f"{what}: CPU of the engine's processes", core / took, "cores")
        stage.rows.add(f"{what}: CPU of the front end", 1e6 * front / tokens, "µs a token")
