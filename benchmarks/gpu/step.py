"""A training step of the example, full and with an adapter, with and without checkpointing: how fast, and its memory beside the plan."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from benchmarks.gpu.stage import Stage
from benchmarks.train_step import Memory, distance
from headrace.base.devices import DeviceMemory, Site
from headrace.config import Config
from headrace_services.trainer.distributed.ranks import Ranks
from headrace_services.trainer.distributed.sharding import full_tensor
from headrace_services.trainer.learning.learner import Learner
from headrace_services.trainer.learning.step import train_step
from headrace_services.trainer.memory.fit import phases
from headrace_services.trainer.memory.parts import CUDA_PART, GIB, total
from headrace_services.trainer.telemetry.throughput import ThroughputMeter

STEPS = 3  # that are timed, after one that is not
_LORA = "policy.lora_cfg={enabled: true, dim: 32}"
_KEPT, _RECOMPUTED = (f"policy.activation_checkpointing={value}" for value in ("false", "true"))
MODES = {
    "full, checkpointed": (_RECOMPUTED,),
    "full": (_KEPT,),
    "LoRA, checkpointed": (_LORA, _RECOMPUTED),
    "LoRA": (_LORA, _KEPT),
}
# Whose gradient is compared with that in float32: the example's own.
COMPARED = "full, checkpointed"
PADDED = (_RECOMPUTED, "policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=1")
EXACT = (*PADDED, "policy.precision=float32")
APART = 1.5  # times as far from float32 as the padded batch in bfloat16: only the order of sums differs
PLANNED = (0.8, 1.1)  # the share of the plan that a step takes


def step(stage: Stage) -> None:
    if stage.on_gpu:  # memory is asked for before anything is on the device
        torch.cuda.set_device(stage.torch_device)
        torch.cuda.init()
    for name, overrides in MODES.items():
        try:
            gradient = _measure(stage, name, training_config(stage, *overrides))
            stage.forget()
            if name == COMPARED:
                exact, _ = Steps(stage, training_config(stage, *EXACT)).first()
                stage.forget()
                padded, _ = Steps(stage, training_config(stage, *PADDED)).first()
                apart, rounding = distance(gradient, exact), distance(padded, exact)
                what = "gradient of the packed batch against float32, padded"
                expected = f"{rounding:.3g} for the padded batch in bfloat16; below {APART:g} times that"
                stage.rows.add(what, apart, "of its length", expected, apart < APART * rounding)
        except Exception as error:  # noqa: BLE001 - out of memory, or a kernel that is not there: the other modes go on
            stage.rows.fail(name, error)
        stage.forget()


def training_config(stage: Stage, *overrides: str) -> Config:
    """The example's configuration for the size's batch. Ratios of log-probabilities that nobody sampled say nothing, and gradients are
    compared as they are."""
    return stage.config(
        f"grpo.num_prompts_per_step={stage.size.groups}",
        f"grpo.num_generations_per_prompt={stage.size.generations}",
        "loss_fn.prev_logprobs_source=recompute",
        "loss_fn.force_on_policy_ratio=true",
        "policy.max_grad_norm=1e9",
        *overrides,
    )


class Steps:
    """Steps of a learner on the size's batch, of which each rank has its part."""

    def __init__(self, stage: Stage, config: Config, ranks: Ranks | None = None) -> None:
        self.learner = Learner(config, ranks=ranks)
        self._size = stage.size

    def one(self) -> dict[str, float]:
        ranks, vocabulary = self.learner.ranks, self.learner.policy.vocab_size
        return train_step(self.learner, self._size.batch(vocabulary, ranks.rank, ranks.size))

    def first(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The gradient of a step, whole, and the step's metrics."""
        gradient: dict[str, torch.Tensor] = {}

        def keep(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
            found = {name: p.grad for name, p in self.learner.policy.model.named_parameters() if p.grad is not None}
            gradient.update({name: full_tensor(part).float().cpu() for name, part in found.items()})

        handle = register_optimizer_step_pre_hook(keep)
        try:
            metrics = self.one()
        finally:
            handle.remove()
        return gradient, metrics


def _measure(stage: Stage, name: str, config: Config) -> dict[str, torch.Tensor]:
    """Rows of a mode. Returns the gradient of its first step."""
    memory = Memory(stage.torch_device)
    steps = Steps(stage, config)
    gradient, _ = steps.first()
    taken = []
    for _ in range(STEPS):
        steps.one()
        taken.append(steps.learner.seconds["policy_training"])
    peak, planned = memory.peak() / GIB, _planned(config, stage) / GIB
    seconds, work = statistics.median(taken), steps.learner.work
    meter = ThroughputMeter.of(config, steps.learner.policy.model.config)
    assert work is not None
    assert meter.architecture is not None
    flops = meter.architecture.training_flops(work, recompute=meter.recompute, chunked=meter.chunked)
    lengths = [
        len(one.prompt_token_ids) + one.length for one in stage.size.trajectories(steps.learner.policy.vocab_size)
    ]
    stage.rows.add(f"{name}: policy training", seconds, "s")
    stage.rows.add(f"{name}: policy training", sum(lengths) / seconds, "tokens/s")
    share = flops / seconds / 1e12 / meter.peak.tflops
    limit = f"of {meter.peak.tflops:,.3g} TFLOP/s ({meter.peak.source}); 0.3 to 0.5 is usual on a GPU"
    stage.rows.add(f"{name}: share of the peak (MFU)", share, "", limit)
    fits = PLANNED[0] < peak / planned < PLANNED[1] if stage.on_gpu else None
    plan = f"{planned:.3g} GiB planned for a GPU (headrace plan memory, without a refit)"
    stage.rows.add(f"{name}: memory at its peak", peak, "GiB", plan, fits)
    return gradient


def _planned(config: Config, stage: Stage) -> int:
    """The most bytes of torch's that a step takes, by `headrace plan memory`: without a refit, and without CUDA's own."""
    total_memory = torch.cuda.get_device_properties(stage.torch_device).total_memory if stage.on_gpu else 80 * GIB
    device = DeviceMemory(stage.device, total_memory, total_memory)
    found = phases(config, Site(device, None, gpus=1, gpus_per_host=1))
    return max(total(parts) - parts[CUDA_PART] for phase, parts in found.items() if phase != "refit")
