"""FLOPs that training passes compute, and the peak FLOP/s of a device.

A matrix product of [m, k] with [k, n] is 2mkn, the backward pass is twice the forward one (PaLM, appendix B; NeMo RL counts the same),
and of the attention matrix a causal model needs half. With hidden size h, L layers, a query projection of width q, keys and values of
width k each, an MLP of width f with g matrices (3 gated, 2 plain) and a vocabulary of V, a pass over p places, of which t are followed
by a policy token, with a pairs of a token and one that it attends to, takes

    forward    2 p L (2 h q + 2 h k + g h f) + 2 t h V + 4 L q a

and three times that with its backward pass. What is counted is what is computed, which is where this differs from NeMo RL's "model FLOPs"
(whole sequences, each projected to the vocabulary, and nothing twice): padding goes through the layers; a prompt that a group shares is
there once; only the places before policy tokens are projected; layers of which activation checkpointing keeps the input alone are computed
again, but for the product that a layer ends with, if nothing needs it; so is a projection whose logits are computed in chunks. A mixture
of experts counts the experts that a token passes through, and the router. Softmax, norms and what attention kernels compute again within
themselves are not counted.
With an adapter the weights are frozen and take no gradients: their backward pass costs as much as the forward one. The adapter itself, a
hundredth of the model or less, is not counted.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from headrace_services.trainer.network.packing import Work

# Types of Hugging Face configurations, by what their MLPs are made of.
GATED = {"gemma", "gemma2", "glm", "glm4", "granite", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}  # fmt: skip
PLAIN = {"gpt2", "gpt_neox", "phi", "starcoder2"}
SPARSE = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
# Those whose layers end with a norm, which needs the product before it; dense layers of the others end with an addition, which does not.
NORMED = {"gemma2", "glm4", "olmo2"}

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
    projection; the number of layers; the total width of all heads. `last_weights` of the layers' are those that a layer which is computed
    again for its backward pass leaves out; `frozen` weights take no gradients."""

    layer_weights: int
    vocabulary_weights: int
    layers: int
    query_width: int
    last_weights: int = 0
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
            last_weights=layers * _last(config),
            frozen=frozen,
        )

    def training_flops(self, work: Work, *, recompute: bool = False, chunked: bool = False) -> float:
        """Forward and backward pass; with `recompute` of the layers, and of the projection where it is `chunked`."""
        weights, attention = 2 * work.places * self.layer_weights, 4 * self.layers * self.query_width * work.pairs
        again = weights + attention - 2 * work.places * self.last_weights if recompute else 0
        projection = 2 * work.targets * self.vocabulary_weights
        passes = 2 if self.frozen else 3
        return passes * weights + 3 * attention + again + (passes + chunked) * projection


def _width(config: Any) -> int:
    """The width of a dense MLP."""
    return getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size


def _last(config: Any) -> int:
    """Weights of the product that a layer ends with, if nothing in its backward pass needs the result."""
    return 0 if config.model_type in NORMED | SPARSE else config.hidden_size * _width(config)


def _mlp(config: Any, layer: int) -> int:
    """Weights of one layer's MLP that a token is multiplied with."""
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
