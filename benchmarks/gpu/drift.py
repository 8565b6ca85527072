"""How far the engine's log-probabilities are from the trainer's, in bfloat16, beside what bfloat16 itself changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from benchmarks.gpu import engine
from benchmarks.gpu.stage import Stage
from headrace.records.trajectory import Float32, Trajectory
from headrace_services.rollout.engine import describe, running_engine
from headrace_services.trainer.distributed.sharding import full_tensor
from headrace_services.trainer.network.packing import Packing, pack, plan
from headrace_services.trainer.network.policy_model import LogitsWarper, PolicyModel

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

REQUESTS, PROMPT, TOKENS = 16, 32, 96
BOUND = 1.05  # docs/metrics.md: from here on a run raises an alarm
# By vLLM's own switch; the trainer's is `_use_float32_head`.
FLOAT32_HEAD = "policy.hf_config_overrides={head_dtype: float32}"


def usual(stage: Stage) -> None:
    _drift(stage)


def float32_head(stage: Stage) -> None:
    _drift(stage, FLOAT32_HEAD)


def _drift(stage: Stage, *head: str) -> None:
    with running_engine(engine.config(stage, *head)) as running:
        trajectories = asyncio.run(_sample(stage, running))
    sampled = np.concatenate([one.logprobs for one in trajectories])
    computed = {}
    for precision in ("bfloat16", "float32"):
        config = stage.config(f"policy.precision={precision}")
        policy = PolicyModel(config)
        if head:
            _use_float32_head(policy)
        computed[precision] = logprobs_of(policy, Packing.of(config.policy, training=False), trajectories)
        del policy
        stage.forget()
    rounded, exact = computed["bfloat16"], computed["float32"]
    for what, ours, theirs in (
        ("engine and trainer", sampled, rounded),
        ("the engine, and the trainer in float32", sampled, exact),
        ("the trainer, and itself in float32", rounded, exact),
    ):
        apart = np.abs(ours - theirs)
        stage.rows.add(f"{what}: mean", float(apart.mean()), "nats")
        stage.rows.add(f"{what}: largest", float(apart.max()), "nats")
    error = float(np.exp(np.abs(sampled - rounded)).mean())
    stage.rows.add("token_mult_prob_error of engine and trainer", f"{error:.5f}", "", f"below {BOUND}", error < BOUND)


async def _sample(stage: Stage, running: AsyncLLM) -> list[Trajectory]:
    await running.update_weight_version("0")
    stage.rows.add("the engine", await describe(running))
    stage.rows.add("the engine's head", str(running.vllm_config.model_config.head_dtype))
    return await engine.sample(running, engine.leases(REQUESTS, PROMPT, TOKENS))


def _use_float32_head(policy: PolicyModel) -> None:
    """Compute the vocabulary projection in float32, with the weights that are trained, whatever the layers are computed in."""
    head = policy.model.get_output_embeddings()
    weight = full_tensor(head.weight.detach()).clone()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), weight)

    head.forward = forward


def logprobs_of(policy: PolicyModel, packing: Packing, trajectories: Sequence[Trajectory]) -> Float32:
    """[N] of the policy's tokens, one trajectory after the other."""
    found: dict[int, Float32] = {}
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing).to(policy.device)
        with torch.no_grad():
            values = policy.forward(packed, LogitsWarper()).logprobs.float().cpu().numpy()
        ends = np.cumsum([trajectories[i].length for i in packed.indices])
        found |= dict(zip(packed.indices, np.split(values, ends[:-1]), strict=True))
    return np.concatenate([found[i] for i in range(len(trajectories))])
