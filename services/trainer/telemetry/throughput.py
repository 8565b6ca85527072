"""The times, rates and FLOPs of a step: `timing/*`, `efficiency/*` and `performance/*`. All but the FLOPs are NeMo RL's.

The loop's time is divided into intervals without gaps, so a step's idle time, overhead and work add up to the whole.

FLOPs are those of matrix products. A product of [m, k] with [k, n] takes 2mkn. The backward pass takes twice as many as the forward pass
(PaLM, appendix B; NeMo RL counts the same). A causal model needs half of the attention matrix. Take a model with hidden size h, L layers, a
query projection of width q, keys and values of width k each, an MLP of width f with g matrices (3 if gated, 2 if plain) and a vocabulary of
V. A pass over p places, of which t precede a policy token, with a pairs of a token and one that it attends to, takes

    forward    2 p L (2 h q + 2 h k + g h f) + 2 t h V + 4 L q a

and three times that with its backward pass. NeMo RL's "model FLOPs" are those of whole sequences, each projected to the vocabulary, with
nothing computed twice. The count here is of what is computed:

- Padding goes through the layers.
- A prompt that a group shares is computed once.
- Only the places before policy tokens are projected to the vocabulary.
- With activation checkpointing, a layer is computed again in the backward pass, except for its last product if nothing needs the result.
- A projection whose logits are computed in chunks is computed again.
- A mixture of experts counts the router, and the experts that a token passes through.
- With an adapter the weights are frozen and take no gradients: their backward pass costs as much as the forward pass. The adapter itself,
  a hundredth of the model or less, is not counted.
- Softmax, norms and what attention kernels recompute internally are not counted.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headrace.config import Config

from ..network.backbone import choose_device
from ..network.packing import Work

log = logging.getLogger(__name__)

TRILLION = 1e12


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of the trainer's loop between the end of one step and the end of the next.

    `training`: from the batch to its new weights. `learner`: the parts of that, named as in `timing/train/*`. `buffer_starvation`: no batch
    was ready. `awaiting_scores`: the part of it in which groups waited for their scores. `refit_bubble`: weights were sent. `validation`: a
    validation was begun, its results were read and written, or a refit waited for it. `checkpoint`: the loop waited for a checkpoint.
    `upkeep`: the rest, which is deciding, and writing metrics and samples.
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
    """Return the seconds of each category, and its share of the step in percent. The shares of one step add up to 100.

    NeMo RL's shares are of the whole run so far.
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


def performance_metrics(
    times: Mapping[str, float],
    samples: int,
    tokens: int,
    *,
    training_devices: int,
    generating_devices: int,
    flops: float | None,
    peak_tflops: float,
) -> dict[str, float]:
    """Return the rates of a step on `samples` trajectories with `tokens` tokens in whole sequences, prompts included.

    `times` are the step's `timing/train/*` metrics. Devices are GPUs, or processes on CPUs. `flops` is what training computed; None if the
    policy was not trained or its architecture has no known formula.

    Replicas generate while the trainer works, so generation had the time that the trainer waited and the time that it worked. The idle
    ratio is never cut to 0. (NeMo RL sets it to 0 after waits of more than 0.1 s, which inverts the purpose of that guard.)
    """
    total = times["timing/train/total_step_time"]
    waited, refit = times["timing/train/exposed_generation"], times["timing/train/weight_sync"]
    training = times.get("timing/train/policy_training", 0.0)
    logprobs = times.get("timing/train/policy_and_reference_logprobs", 0.0)
    group, generation = training + logprobs, waited + training + logprobs
    metrics = {
        "samples_per_sec": _rate(samples, total),
        "tokens_per_sec": _rate(tokens, total),
        "samples_per_sec_per_gpu": _rate(samples, total * (training_devices + generating_devices)),
        "tokens_per_sec_per_gpu": _rate(tokens, total * (training_devices + generating_devices)),
        "training_worker_group_tokens_per_sec": _rate(tokens, group),
        "training_worker_group_tokens_per_sec_per_gpu": _rate(tokens, group * training_devices),
        "generation_tokens_per_sec": _rate(tokens, generation),
        "training_worker_idle_time_ratio": _rate(waited, group + waited + refit),
    }
    # the last replica may have died during the step
    if generating_devices:
        metrics["generation_tokens_per_sec_per_gpu"] = _rate(tokens, generation * generating_devices)
    if training:
        metrics["policy_training_tokens_per_sec_per_gpu"] = _rate(tokens, training * training_devices)
    if logprobs:
        metrics["policy_and_reference_logprobs_tokens_per_sec_per_gpu"] = _rate(tokens, logprobs * training_devices)
    if flops is not None:
        metrics["train_flops_per_gpu"] = _rate(flops, training * training_devices) / TRILLION
        metrics["train_fp_utilization"] = metrics["train_flops_per_gpu"] / peak_tflops
    return {f"performance/{name}": value for name, value in metrics.items()}


@dataclasses.dataclass(frozen=True)
class ThroughputMeter:
    """Computes a step's time and rate metrics from the model's architecture (None if it has no known formula) and a device's peak.

    `recompute` and `chunked` tell whether the layers and the projection are computed again in the backward pass.
    """

    architecture: Architecture | None
    peak: Peak
    recompute: bool = False
    chunked: bool = False

    @classmethod
    def of(cls, config: Config, model: Any) -> ThroughputMeter:
        """Make the meter for the policy's `model`, a Hugging Face configuration, and this process's device. It blocks. Raises
        `ServiceError` without the configured GPU."""
        device = choose_device(config.trainer.device)
        peak = find_peak(device, config.policy.precision)
        log.info("the device does %.3g TFLOP/s (%s)", peak.tflops, peak.source)
        architecture = Architecture.of(model, frozen=config.policy.lora_cfg.enabled)
        if architecture is None:
            log.warning("no FLOPs formula for a model of type %s: its utilisation is not measured", model.model_type)
        chunked = config.policy.chunk_size(device.type) is not None
        return cls(architecture, peak, config.policy.recomputes(device.type), chunked)

    def metrics(
        self,
        times: StepTimes,
        lengths: Sequence[Sequence[int]],
        work: Work | None,
        *,
        training_devices: int,
        generating_devices: int,
    ) -> dict[str, float]:
        """Return the metrics of a step. `lengths` are the tokens of each trajectory's sequences. `work` is what training the policy
        computed on all devices; None if it was not trained."""
        flops, tokens = None, sum(length for of_trajectory in lengths for length in of_trajectory)
        if self.architecture is not None and work is not None:
            flops = self.architecture.training_flops(work, recompute=self.recompute, chunked=self.chunked)
        timing = timing_metrics(times)
        rates = performance_metrics(
            timing,
            len(lengths),
            tokens,
            training_devices=training_devices,
            generating_devices=generating_devices,
            flops=flops,
            peak_tflops=self.peak.tflops,
        )
        return timing | efficiency_metrics(times) | rates


def _rate(amount: float, seconds: float) -> float:
    """Return `amount` per second; 0 if no time passed, as in NeMo RL."""
    return amount / seconds if seconds > 0 else 0.0


# -- FLOPs and peaks ---------------------------------------------------------------------------------------------------

# Types of Hugging Face configurations, by the kind of their MLPs.
GATED = {"gemma", "gemma2", "glm", "glm4", "granite", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}  # fmt: skip
PLAIN = {"gpt2", "gpt_neox", "phi", "starcoder2"}
SPARSE = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
# Layers of these types end with a norm, whose backward pass needs the product before it. Dense layers of the others end with an addition.
NORMED = {"gemma2", "glm4", "olmo2"}

# Dense tensor-core rates from NVIDIA's data sheets in TFLOP/s (rates with sparsity are twice that). float32 is without TF32, torch's
# default. Keys are prefixes of torch's name for the device; the longest match counts.
DATA_SHEETS = {
    "NVIDIA B200": {"bfloat16": 2250.0, "float32": 75.0},
    "NVIDIA GB200": {"bfloat16": 2500.0, "float32": 80.0},
    "NVIDIA H200": {"bfloat16": 989.4, "float32": 66.9},
    "NVIDIA GH200": {"bfloat16": 989.4, "float32": 66.9},
    "NVIDIA H100": {"bfloat16": 989.4, "float32": 66.9},
    "NVIDIA H100 PCIe": {"bfloat16": 756.0, "float32": 51.2},
    "NVIDIA H100 NVL": {"bfloat16": 835.0, "float32": 60.0},
    "NVIDIA A100": {"bfloat16": 312.0, "float32": 19.5},
    "NVIDIA L40S": {"bfloat16": 362.05, "float32": 91.6},
    "NVIDIA L4": {"bfloat16": 121.0, "float32": 30.3},
    "NVIDIA A10": {"bfloat16": 125.0, "float32": 31.2},
    "NVIDIA A10G": {"bfloat16": 70.0, "float32": 31.5},
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model's quantities in the formula above.

    `layer_weights` and `vocabulary_weights` are the matrix parameters that a token is multiplied with, in all layers and in the vocabulary
    projection. `query_width` is the total width of all heads. `last_weights` is the part of `layer_weights` that layers leave out when they
    are computed again for their backward pass. `frozen` weights take no gradients.
    """

    layer_weights: int
    vocabulary_weights: int
    layers: int
    query_width: int
    last_weights: int = 0
    frozen: bool = False

    @classmethod
    def of(cls, config: Any, *, frozen: bool = False) -> Architecture | None:
        """Read a Hugging Face model configuration. Return None for a type that has no known formula."""
        config = config.get_text_config()
        if config.model_type not in GATED | PLAIN | SPARSE:
            return None
        hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        head = getattr(config, "head_dim", None) or hidden // heads
        groups = getattr(config, "num_key_value_heads", None) or heads
        attention = 2 * hidden * head * heads + 2 * hidden * head * groups
        return cls(
            layer_weights=layers * attention + sum(_mlp(config, layer) for layer in range(layers)),
            vocabulary_weights=hidden * config.vocab_size,
            layers=layers,
            query_width=head * heads,
            last_weights=layers * _last(config),
            frozen=frozen,
        )

    def training_flops(self, work: Work, *, recompute: bool = False, chunked: bool = False) -> float:
        """Return the FLOPs of a forward and a backward pass. `recompute` computes the layers again, `chunked` the projection."""
        weights, attention = 2 * work.places * self.layer_weights, 4 * self.layers * self.query_width * work.pairs
        again = weights + attention - 2 * work.places * self.last_weights if recompute else 0
        projection = 2 * work.targets * self.vocabulary_weights
        passes = 2 if self.frozen else 3
        return passes * weights + 3 * attention + again + (passes + chunked) * projection


def _width(config: Any) -> int:
    """Return the width of a dense MLP."""
    return getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size


def _last(config: Any) -> int:
    """Return the weights of a layer's last product if nothing in its backward pass needs the result, else 0."""
    return 0 if config.model_type in NORMED | SPARSE else config.hidden_size * _width(config)


def _mlp(config: Any, layer: int) -> int:
    """Return the number of weights in one layer's MLP that a token is multiplied with."""
    hidden, width = config.hidden_size, _width(config)
    if config.model_type in PLAIN:
        return 2 * hidden * width
    if config.model_type in GATED:
        return 3 * hidden * width
    every = getattr(config, "decoder_sparse_step", 1)
    if layer in (getattr(config, "mlp_only_layers", None) or ()) or (layer + 1) % every:
        return 3 * hidden * width
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    expert = getattr(config, "moe_intermediate_size", None) or width
    shared = getattr(config, "shared_expert_intermediate_size", 0) or 0
    routing = experts * hidden + (hidden if shared else 0)
    return 3 * hidden * (expert * config.num_experts_per_tok + shared) + routing


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of one device in TFLOP/s, and the source of the figure."""

    tflops: float
    source: str


def find_peak(device: torch.device, precision: str) -> Peak:
    """Return the peak from the GPU's data sheet if it is known here, else measure a matrix product now (slower on a busy machine).

    `precision` is `policy.precision`.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        fitting = [known for known in DATA_SHEETS if name.startswith(known)]
        if fitting:
            sheet = max(fitting, key=len)
            return Peak(DATA_SHEETS[sheet][precision], f"data sheet of {sheet}, {precision}")
        return Peak(_measure(device, precision, 8192), f"matrix product measured on {name}, {precision}")
    return Peak(
        _measure(device, precision, 512),
        f"matrix product measured on the CPU, {precision}, threads: {torch.get_num_threads()}",
    )


def _measure(device: torch.device, precision: str, size: int) -> float:
    """Return the best rate of ten square matrix products, in TFLOP/s."""
    factor = torch.ones(size, size, device=device, dtype=getattr(torch, precision))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        product = factor @ factor
        float(product[0, 0])  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e12
