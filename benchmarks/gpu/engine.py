"""What parts with an engine share: an engine of the example, and requests to it as a lease makes them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.gpu.stage import Stage, seconds
from headrace.config import Config
from headrace.records.trajectory import Group, Sampling, Trajectory
from headrace.replay import Lease
from headrace_services.rollout.generate import Saver, generate

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

# The trainer's weights are on the same device.
BESIDE_TRAINER = "policy.generation.vllm_cfg.gpu_memory_utilization=0.45"


def config(stage: Stage, *overrides: str) -> Config:
    """The example's configuration, for an engine beside a trainer's model."""
    return stage.config(*([BESIDE_TRAINER] if stage.on_gpu else []), *overrides)


def leases(requests: int, prompt: int, tokens: int, seed: int = 0) -> list[Lease]:
    """So many, of random prompts that differ."""
    rng = np.random.default_rng(seed)
    return [
        Lease(
            group=Group(
                id=f"benchmark-{number}",
                lane="train",
                order=number,
                task_name="benchmark",
                env_name="benchmark",
                messages=(),
                prompt_token_ids=rng.integers(3, 250, prompt).astype(np.int32),
                extra_env_info={},
                dataset_index=number,
                n=1,
                sampling=Sampling(1.0, tokens),
            ),
            token=secrets.token_hex(8),
            attempt=1,
            ticket=number,
            version=0,
            timeline="benchmark",
            incarnation="benchmark",
            expires_in_s=3600.0,
            count=1,
            missing=(0,),
        )
        for number in range(requests)
    ]


async def sample(running: AsyncLLM, asked: Sequence[Lease], saver: Saver | None = None) -> list[Trajectory]:
    """The trajectories of all of them at once, as a replica generates them. The weights are those of some version."""
    return await asyncio.gather(*(generate(running, lease, 0, "replica", saver) for lease in asked))


def copy_rate(stage: Stage, *, to_host: bool = False) -> float:
    """Bytes a second of a copy within the device's memory, or to pinned memory of the host."""
    here = torch.ones(stage.size.nbytes, dtype=torch.uint8, device=stage.torch_device)
    there = torch.empty_like(here, device="cpu" if to_host else None, pin_memory=to_host and stage.on_gpu)
    return stage.size.nbytes / seconds(stage.torch_device, lambda: there.copy_(here))
