"""The trainer's step in each way of packing, in bfloat16, and how far its gradients are from those in float32."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from benchmarks.gpu.rows import line
from benchmarks.gpu.stage import Stage
from benchmarks.train_step import Memory, distance
from headrace_services.trainer.distributed.sharding import full_tensor
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.telemetry.throughput import ThroughputMeter

GIB = 2**30
STEPS = 3  # that are timed, after one that is not
# All the logits of a micro-batch at once, and activations kept: what the other ways are compared with.
PLAIN: dict[str, Any] = {"logprob_chunk_size": 2**20, "activation_checkpointing": False}
CHUNKED = {"logprob_chunk_size": 2048}
CHECKPOINTED = {"activation_checkpointing": True}
PACKED = {"sequence_packing": {"enabled": True}}
SHARED = {"share_prompts": True}
MODES: dict[str, dict[str, Any]] = {
    "padded": PLAIN,
    "packed": PLAIN | PACKED,
    "shared prompts": PLAIN | SHARED,
    "shared prompts, packed": PLAIN | SHARED | PACKED,
    "chunked": PLAIN | CHUNKED,
    "checkpointed": PLAIN | CHECKPOINTED,
    "packed, chunked, checkpointed": PACKED | CHUNKED | CHECKPOINTED,
}
FLOAT32 = "float32: padded, chunked, checkpointed"


def step(stage: Stage) -> None:
    exact = _measure(stage, FLOAT32, "float32", CHUNKED | CHECKPOINTED, None)
    for name, keys in MODES.items():
        _measure(stage, name, "bfloat16", keys, exact)


def _measure(
    stage: Stage, name: str, precision: str, keys: dict[str, Any], exact: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """A row; a way that fails is one too. Returns its gradients."""
    gradients = None
    try:
        measured, limit, gradients = _steps(stage, precision, keys)
        off = "" if exact is None else f", gradient off by {distance(gradients, exact):.1e}"
        stage.rows.add(name, measured + off, limit)
    except Exception as error:  # noqa: BLE001 - out of memory, or a kernel that is not there: the other ways go on
        stage.rows.add(name, f"failed: {line(error)}")
    stage.forget()
    return gradients


def _steps(stage: Stage, precision: str, keys: dict[str, Any]) -> tuple[str, str, dict[str, torch.Tensor]]:
    config = stage.size.config(stage.model, stage.device, precision, **keys)
    memory, learner = Memory(stage.torch_device), Learner(config)
    parameters = dict(learner.policy.model.named_parameters())
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if not gradients:  # those of the first step, of the weights that all ways begin with
            found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            gradients.update({name: full_tensor(gradient).cpu() for name, gradient in found.items()})

    taken = []
    with register_optimizer_step_pre_hook(keep):
        for _ in range(STEPS + 1):
            train_step(learner, stage.size.batch())
            taken.append(learner.seconds["policy_training"])
    seconds, work = statistics.median(taken[1:]), learner.work
    assert work is not None
    meter = ThroughputMeter.of(config)
    peak = meter.peak
    assert meter.architecture is not None
    flops = meter.architecture.training_flops(work, recompute=meter.recompute, chunked=meter.chunked)
    tokens = sum(one.prompt_token_ids.size + one.completion_token_ids.size for one in stage.size.trajectories)
    tflops = flops / seconds / 1e12
    measured = (
        f"{tokens / seconds:,.0f} tokens/s, {tflops / peak.tflops:.2g} of the peak, {memory.peak() / GIB:.2g} GiB"
    )
    return measured, f"{peak.tflops:,.3g} TFLOP/s ({peak.source})", gradients
