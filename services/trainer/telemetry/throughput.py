"""The times and rates of a step: `timing/*`, `efficiency/*` and `performance/*`, as NeMo RL computes them, but for FLOPs (`flops`).

The loop's time is divided into intervals without gaps, so a step's idle time, overhead and work add up to the whole.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from transformers import AutoConfig

from headrace.config import Config
from headrace_services.trainer.network.backbone import choose_device
from headrace_services.trainer.network.packing import Work
from headrace_services.trainer.telemetry.flops import Architecture, Peak, peak_of

log = logging.getLogger(__name__)

TRILLION = 1e12


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of the trainer's loop between the end of one step and the end of the next.

    `training`: from the batch to its new weights; `learner` has its parts, named as in `timing/train/*`. `buffer_starvation`: no batch
    was ready; for `awaiting_scores` of it, because groups waited for their scores. `refit_bubble`: weights were sent. `validation`: a refit
    waited for a validation. `checkpoint`: the loop waited for one. `upkeep` is the rest: deciding, and writing metrics and samples.
    """

    total: float
    training: float
    learner: Mapping[str, float]
    buffer_starvation: float
    refit_bubble: float
    validation: float
    checkpoint: float
    awaiting_scores: float = 0.0

    @property
    def upkeep(self) -> float:
        known = (self.training, self.buffer_starvation, self.refit_bubble, self.validation, self.checkpoint)
        return max(0.0, self.total - sum(known))


def timing_metrics(times: StepTimes) -> dict[str, float]:
    return {
        "timing/train/total_step_time": times.total,
        "timing/train/exposed_generation": times.buffer_starvation,
        "timing/train/wait_for_generation": times.buffer_starvation - times.awaiting_scores,
        "timing/train/wait_for_scores": times.awaiting_scores,
        **{f"timing/train/{part}": seconds for part, seconds in times.learner.items()},
        "timing/train/weight_sync": times.refit_bubble,
        "timing/train/validation": times.validation,
        "timing/train/checkpointing": times.checkpoint,
    }


def efficiency_metrics(times: StepTimes) -> dict[str, float]:
    """Seconds of each category and its share of the step in percent; the shares of one step add up to 100.

    NeMo RL's shares are of the whole run so far; these are of the step.
    """
    seconds = {
        "idle/buffer_starvation": times.buffer_starvation,
        "idle/refit_bubble": times.refit_bubble,
        "idle/validation": times.validation,
        "overhead/checkpoint": times.checkpoint,
        "overhead/upkeep": times.upkeep,
    }
    return {
        **{f"efficiency/{category}_s": value for category, value in seconds.items()},
        **{f"efficiency/{category}_pct": 100 * _rate(value, times.total) for category, value in seconds.items()},
        "efficiency/productive_time_s": times.training,
        "efficiency/efficiency_pct": 100 * _rate(times.training, times.total),
    }


@dataclasses.dataclass(frozen=True)
class Devices:
    """The numbers of GPUs that train and generate; on CPUs, of processes."""

    training: int
    generation: int

    @property
    def total(self) -> int:
        return self.training + self.generation


def performance_metrics(
    times: Mapping[str, float], samples: int, tokens: int, devices: Devices, flops: float | None, peak_tflops: float
) -> dict[str, float]:
    """Rates of a step on so many trajectories and `tokens` of whole sequences, prompts included. `times` are the step's `timing/train/*`
    metrics; `flops` what its training computed, None where the policy was not trained or its architecture has no known formula.

    Replicas generate while the trainer works, so generation had both the time that the trainer waited and the time that it worked. The idle
    ratio is never cut to 0 (NeMo RL does so after waits of more than 0.1 s, which inverts the guard's purpose).
    """
    total = times["timing/train/total_step_time"]
    waited, refit = times["timing/train/exposed_generation"], times["timing/train/weight_sync"]
    training = times.get("timing/train/policy_training", 0.0)
    logprobs = times.get("timing/train/policy_and_reference_logprobs", 0.0)
    group, generation = training + logprobs, waited + training + logprobs
    metrics = {
        "samples_per_sec": _rate(samples, total),
        "tokens_per_sec": _rate(tokens, total),
        "samples_per_sec_per_gpu": _rate(samples, total * devices.total),
        "tokens_per_sec_per_gpu": _rate(tokens, total * devices.total),
        "training_worker_group_tokens_per_sec": _rate(tokens, group),
        "training_worker_group_tokens_per_sec_per_gpu": _rate(tokens, group * devices.training),
        "generation_tokens_per_sec": _rate(tokens, generation),
        "training_worker_idle_time_ratio": _rate(waited, group + waited + refit),
    }
    # there may be no generating GPU to divide by: the last replica may have died during the step
    if devices.generation:
        metrics["generation_tokens_per_sec_per_gpu"] = _rate(tokens, generation * devices.generation)
    if training:
        metrics["policy_training_tokens_per_sec_per_gpu"] = _rate(tokens, training * devices.training)
    if logprobs:
        metrics["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] = _rate(tokens, logprobs * devices.training)
    if flops is not None:
        metrics["train_flops_per_gpu"] = _rate(flops, training * devices.training) / TRILLION
        metrics["train_fp_utilization"] = metrics["train_flops_per_gpu"] / peak_tflops
    return {f"performance/{name}": value for name, value in metrics.items()}


@dataclasses.dataclass(frozen=True)
class ThroughputMeter:
    """Computes a step's time and rate metrics from the model's architecture (None: no formula is known for it) and a device's peak. Whether
    layers and projection are computed again in the backward pass: `recompute`, `chunked`."""

    architecture: Architecture | None
    peak: Peak
    recompute: bool = False
    chunked: bool = False

    @classmethod
    def of(cls, config: Config) -> ThroughputMeter:
        """The meter for the run's model and this process's device; blocking. Raises `ServiceError` for a GPU that is not there."""
        overrides = copy.deepcopy(config.policy.hf_config_overrides)
        model = AutoConfig.from_pretrained(config.policy.model_name, **overrides)
        device = choose_device(config.trainer.device)
        peak = peak_of(device, config.policy.precision)
        log.info("the device does %.3g TFLOP/s (%s)", peak.tflops, peak.source)
        architecture = Architecture.of(model, frozen=config.policy.lora_cfg.enabled)
        if architecture is None:
            log.warning("no FLOPs formula for a model of type %s: its utilisation is not measured", model.model_type)
        chunked = config.policy.chunk_size(device.type) is not None
        return cls(architecture, peak, config.policy.recomputes(device.type), chunked)

    def metrics(
        self, times: StepTimes, lengths: Sequence[Sequence[int]], devices: Devices, work: Work | None
    ) -> dict[str, float]:
        """Metrics of a step; `lengths` are the tokens of each trajectory's sequences, `work` is what training the policy computed on all
        devices, None if it was not trained."""
        flops, tokens = None, sum(length for of_trajectory in lengths for length in of_trajectory)
        if self.architecture is not None and work is not None:
            flops = self.architecture.training_flops(work, recompute=self.recompute, chunked=self.chunked)
        timing = timing_metrics(times)
        rates = performance_metrics(timing, len(lengths), tokens, devices, flops, self.peak.tflops)
        return timing | efficiency_metrics(times) | rates


def _rate(amount: float, seconds: float) -> float:
    """`amount` per second; 0, as in NeMo RL, if no time passed."""
    return amount / seconds if seconds > 0 else 0.0
