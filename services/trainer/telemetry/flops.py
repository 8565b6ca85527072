"""Model FLOPs of a training step, and the peak FLOP/s of a device.

Model FLOPs are what the architecture needs for the tokens it is given (PaLM, appendix B; NeMo RL counts the same): a matrix
product of [m, k] with [k, n] is 2mkn, the backward pass is twice the forward one, and of the attention matrix a causal model
needs half. With hidden size h, L layers, a query projection of width q, keys and values of width k each, an MLP of width f with
g matrices (3 gated, 2 plain) and a vocabulary of V, a sequence of s tokens takes

    6 s (L (2 h q + 2 h k + g h f) + h V) + 6 L q s^2

With an adapter the model's weights are frozen and take no gradients: 4 in the place of the first 6 (the adapter itself, a hundredth of that
or less, isn't counted).

A mixture of experts counts the experts that a token passes through, and the router. Recomputed activations are not model FLOPs.
Computing a prompt once for its whole group, or projecting completion tokens only, shows as a higher utilization.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

# Types of Hugging Face configurations, by what their MLPs are made of.
GATED = {"gemma", "gemma2", "glm", "glm4", "granite", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}  # fmt: skip
PLAIN = {"gpt2", "gpt_neox", "phi", "starcoder2"}
SPARSE = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}

# Dense tensor-core rates of NVIDIA's data sheets in TFLOP/s (those with sparsity are twice that); float32 without TF32, as torch
# multiplies by default. Keyed by the beginning of torch's name for the device; the longest match counts.
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
    """The quantities of a model in the formula: the matrix parameters that a token is multiplied with, in all layers and in the vocabulary
    projection; the number of layers; the total width of all heads; whether the weights are `frozen`."""

    layer_weights: int
    vocabulary_weights: int
    layers: int
    query_width: int
    frozen: bool = False

    @classmethod
    def of(cls, config: Any, *, frozen: bool = False) -> Architecture | None:
        """From a Hugging Face model configuration; None for a type whose formula is not known here."""
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
            frozen=frozen,
        )

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Forward and backward pass over whole sequences of `lengths` tokens."""
        tokens = float(sum(lengths))
        squares = float(sum(length * length for length in lengths))
        weights = self.layer_weights + self.vocabulary_weights
        return (4 if self.frozen else 6) * weights * tokens + 6 * self.layers * self.query_width * squares


def _mlp(config: Any, layer: int) -> int:
    """Weights of one layer's MLP that a token is multiplied with."""
    hidden = config.hidden_size
    width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
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


def peak_of(device: torch.device, precision: str) -> Peak:
    """From the GPU's data sheet where it is known here, else from a matrix product measured now (which a busy machine slows).
    `precision` is `policy.precision`."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        fitting = [known for known in DATA_SHEETS if name.startswith(known)]
        if fitting:
            sheet = max(fitting, key=len)
            return Peak(DATA_SHEETS[sheet][precision], f"data sheet of {sheet}, {precision}")
        return Peak(_measured(device, precision, 8192), f"matrix product measured on {name}, {precision}")
    return Peak(
        _measured(device, precision, 512),
        f"matrix product measured on the CPU, {precision}, threads: {torch.get_num_threads()}",
    )


def _measured(device: torch.device, precision: str, size: int) -> float:
    """The best of ten square matrix products, in TFLOP/s."""
    factor = torch.ones(size, size, device=device, dtype=getattr(torch, precision))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        product = factor @ factor
        float(product[0, 0])  # a GPU is done when its result is here
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e12
