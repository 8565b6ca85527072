"""A replica as a process: a real vLLM engine, the buffer's client and the receiver. Does what the lines of its standard input ask for.

Argument: config, redis_url, arguments (merged into vLLM's), and whether it schedules asynchronously. A line is
`{"join": {"run_id": …, "replica": …}}`, which leaves the run it was in, `{"generate": {"ids": …, "max_tokens": …}}`, `{"look": …}`, or
`{"inject": …}`, a fault of the worker extension. Writes one JSON line for each event.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from headrace.config import Config
from headrace.replay import Epoch, ReplayClient
from headrace_services.refit.receiver import WeightReceiver
from headrace_services.rollout import engine
from tests.support.paced_engine import pace


def say(**fields: object) -> None:
    sys.__stdout__.write(json.dumps(fields) + "\n")
    sys.__stdout__.flush()


async def generate(engine: Any, ids: list[int], max_tokens: int, salt: str | None) -> None:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, logprobs=0, ignore_eos=True)
    announced = False
    async for output in engine.generate(tokens_input(ids, cache_salt=salt), params, f"request-{id(params)}"):
        if not announced:
            announced = True
            say(event="generating")
        if output.finished:
            done = output.outputs[0]
            say(
                event="generated",
                ids=list(done.token_ids),
                logprobs=[row[token].logprob for row, token in zip(done.logprobs, done.token_ids, strict=True)],
                cached=output.num_cached_tokens,
                spans=[[span.version, span.start, span.end] for span in done.weight_versions],
            )


async def take_part_in(
    receivers: list[WeightReceiver], config: Config, engine: Any, redis_url: str, run_id: str, replica: str
) -> None:
    """In the refits of a run, until cancelled. `receivers` gets the one of this run."""
    replay = await ReplayClient.connect(redis_url, run_id)
    try:
        await replay.register(replica, {"device": "cpu"})
        receivers.append(WeightReceiver(config, engine, replay, replica))
        say(event="joined")
        await follow_epochs(replay, receivers[-1], engine, replica)
    finally:
        await replay.aclose()


async def follow_epochs(replay: ReplayClient, receiver: WeightReceiver, engine: Any, replica: str) -> None:
    seen: tuple[str, str] | None = None
    running: asyncio.Task[None] | None = None

    async def take_part(epoch: Epoch) -> None:
        healthy = await receiver.take_part(epoch)
        say(event="refit", version=epoch.version, healthy=healthy, paused=await engine.is_paused())

    while True:
        reply = await replay.heartbeat(replica, [])
        epoch = reply.epoch
        idle = running is None or running.done()
        if epoch is not None and idle and replica in epoch.members and (epoch.id, epoch.state) != seen:
            seen = (epoch.id, epoch.state)
            if epoch.state == "announced":
                await receiver.acknowledge(epoch)
            elif epoch.state == "transfer":
                running = asyncio.create_task(take_part(epoch))
        await asyncio.sleep(0.05)


async def serve(spec: dict[str, Any], config: Config, engine: Any) -> None:
    member: asyncio.Task[None] | None = None
    tasks = []
    receivers: list[WeightReceiver] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if "generate" in asked:
            tasks.append(asyncio.create_task(generate(engine, **asked["generate"], salt=receivers[-1].cache_salt)))
            continue
        if "look" in asked:
            say(event="looked", asynchronous=engine.vllm_config.scheduler_config.async_scheduling)
            continue
        if "inject" in asked:
            await engine.collective_rpc("inject", args=(asked["inject"],))
            say(event="injected")
            continue
        if member is not None:
            member.cancel()
            await asyncio.wait([member])
        member = asyncio.create_task(take_part_in(receivers, config, engine, spec["redis_url"], **asked["join"]))
    if member is not None:
        member.cancel()


def start_as_on_a_gpu(start: Callable[..., Any], *given: Any) -> Any:
    """`start` with the scheduling asked for, which vLLM turns off on a CPU, and with forked workers: on a CPU it starts an interpreter for
    each, which imports everything again, 15 s of a core. Not earlier: the service sets what vLLM reads when it is imported."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        own(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check)  # type: ignore[method-assign, assignment]
    return start(*given)


def main(spec: dict[str, Any]) -> None:
    config = Config.model_validate(spec["config"])
    pace()
    if spec["asynchronous"] or config.policy.generation.vllm_cfg.tensor_parallel_size > 1:
        engine._start = functools.partial(start_as_on_a_gpu, engine._start)
    with engine.running_engine(config, spec["arguments"]) as running:
        asyncio.run(serve(spec, config, running))
