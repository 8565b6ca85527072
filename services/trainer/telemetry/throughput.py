"""Where a step's time went, and how much was done in it. Names and formulae are NeMo RL's (`print_performance_metrics`).

The loop's clock is cut into intervals without gaps: what a step spent idle, on the run's upkeep and at work adds up to the whole.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from transformers import AutoConfig

from headrace.config import Config
from services.trainer.network.backbone import choose_device
from services.trainer.telemetry.flops import Architecture, Peak, peak_of

log = logging.getLogger(__name__)

TRILLION = 1e12


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of the trainer's loop between the end of one step and the end of the next.

    `buffer_starvation`: no batch was ready. `refit_bubble`: weights were sent. `validation`: a refit waited for a validation.
    `checkpoint`: a checkpoint was written. `training`: from the batch to its new weights, of which `learner` has
    the parts (`policy_training` and others, named as in `timing/train/*`). What is left of `total` went into looking round and
    writing down.
    """

    total: float
    training: float
    learner: Mapping[str, float]
    buffer_starvation: float
    refit_bubble: float
    validation: float
    checkpoint: float

    @property
    def upkeep(self) -> float:
        known = (self.training, self.buffer_starvation, self.refit_bubble, self.validation, self.checkpoint)
        return max(0.0, self.total - sum(known))


def timing_metrics(times: StepTimes) -> dict[str, float]:
    """Seconds, named as NeMo RL names them."""
    return {
        "timing/train/total_step_time": times.total,
        "timing/train/exposed_generation": times.buffer_starvation,
        **{f"timing/train/{part}": seconds for part, seconds in times.learner.items()},
        "timing/train/weight_sync": times.refit_bubble,
        "timing/train/validation": times.validation,
        "timing/train/checkpointing": times.checkpoint,
    }


def efficiency_metrics(times: StepTimes) -> dict[str, float]:
    """Seconds of each category and its share of the step in percent; the shares of one step add up to 100.

    There, the shares are of the run's whole time so far; here of the step, so that they say what the step was like.
    """
    categories = {
        "idle/buffer_starvation": times.buffer_starvation,
        "idle/refit_bubble": times.refit_bubble,
        "idle/validation": times.validation,
        "overhead/checkpoint": times.checkpoint,
        "overhead/upkeep": times.upkeep,
    }
    metrics: dict[str, float] = {}
    for category, seconds in categories.items():
        metrics[f"efficiency/{category}_s"] = seconds
        metrics[f"efficiency/{category}_pct"] = _percent(seconds, times.total)
    metrics["efficiency/productive_time_s"] = times.training
    metrics["efficiency/efficiency_pct"] = _percent(times.training, times.total)
    return metrics


@dataclasses.dataclass(frozen=True)
class Devices:
    """GPUs at work; on CPUs, processes."""

    training: int
    generation: int

    @property
    def total(self) -> int:
        return self.training + self.generation


def performance_metrics(
    times: Mapping[str, float], lengths: Sequence[int], devices: Devices, flops: float | None, peak_tflops: float
) -> dict[str, float]:
    """Rates of a step of whole sequences of `lengths` tokens, prompts included. `times` are the step's `timing/train/*` metrics;
    `flops` the model FLOPs of its training, None where the policy was not trained or its architecture has no known formula.

    Generation goes on while the trainer works, so the time it had is what was waited for and what the trainer worked. The idle
    ratio is never cut to 0 (there it is where more than 0.1 s were waited, the reverse of what its guard is for).
    """
    total, samples, tokens = times["timing/train/total_step_time"], len(lengths), sum(lengths)
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
    # no replica is left to divide by where the last one died while the step was trained
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
class Meter:
    """What rates are measured against: the model's architecture (None: no formula is known for it) and what one device can do."""

    architecture: Architecture | None
    peak: Peak

    @classmethod
    def of(cls, config: Config) -> Meter:
        """Of the run's model and this process's device; blocking. Raises `ServiceError` for a GPU that is not there."""
        overrides = copy.deepcopy(config.policy.hf_config_overrides)
        model = AutoConfig.from_pretrained(config.policy.model_name, **overrides)
        peak = peak_of(choose_device(config.trainer.device), config.policy.precision)
        log.info("the device does %.3g TFLOP/s (%s)", peak.tflops, peak.source)
        architecture = Architecture.of(model)
        if architecture is None:
            log.warning(
                "no formula is known for the FLOPs of a model of type %s: utilisation is not metered", model.model_type
            )
        return cls(architecture, peak)

    def metrics(self, times: StepTimes, lengths: Sequence[int], devices: Devices, epochs: int) -> dict[str, float]:
        """`timing/*`, `efficiency/*` and `performance/*` of a step that trained the policy `epochs` times on sequences of `lengths`
        tokens."""
        flops = None
        if self.architecture is not None and epochs:
            flops = epochs * self.architecture.training_flops(lengths)
        timing = timing_metrics(times)
        rates = performance_metrics(timing, lengths, devices, flops, self.peak.tflops)
        return timing | efficiency_metrics(times) | rates


def _rate(amount: float, seconds: float) -> float:
    """A clock that did not move measured nothing; its rate is 0, as there."""
    return amount / seconds if seconds > 0 else 0.0


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole > 0 else 0.0
