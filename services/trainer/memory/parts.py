"""The memory that a run takes on each of its GPUs, part by part and phase by phase, computed from its configuration.

A trainer holds parameters, moments and what CUDA takes for itself all the time. What it takes beside them changes with what it does, so its
peak is that of the largest **phase**:

    loss        the activations of all layers, and the logits of a chunk with their gradients
    layers      the same activations, the layer whose gradients are computed, and the buffers in which FSDP2 reduces those of the one before
    root        the gradients of embedding and head, and the buffer in which they are reduced; no activations
    inference   a layer, and then a chunk's logits, of passes without gradients
    refit       two buckets and the largest weight; no gradients

Parameters, gradients and the optimizer's state follow from the shapes of the parameters and are exact. Activations are what autograd keeps
for a layer of the Llama type, in the widest micro-batch that the configuration allows. Other types differ little, unless they have layers
of another kind. With b bytes per number (2 in bfloat16; a norm keeps its input in float32), a hidden size h, queries, keys and MLP of
widths q, k and f, and H heads, a token keeps

    2 (4 h + 2 b h) + b (2 q + 2 k) + 4 b f + 4 H      bytes per layer

With checkpointing it keeps b h per layer, and the sum above for the layer that is computed again. In a mixture of experts, f is that of all
experts that the token passes through, and each of them keeps 4 b h more (frozen ones 2 b h, and 3 b f).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from ..network.backbone import reduces_once
from .models import ModelSize, ModelUse, Shape

GIB = 2**30
Parts = dict[str, int]

# What each process takes beside its tensors: the CUDA context with its kernels and the workspaces of cuBLAS, and NCCL's channels. From
# NVIDIA's and PyTorch's figures for an H100; not measured here.
CONTEXT = GIB * 3 // 4
NCCL = GIB // 2
# The same of a replica's engine, with the CUDA graphs that it captures (`enforce_eager` false).
GRAPHS = GIB
CUDA_PART, NCCL_PART = "CUDA's context and kernels", "NCCL's channels"
BUCKETS = "refit: two buckets"
KV_CACHE, REPLICA_REFIT = "KV cache", "a refit: two buckets, the largest weight and a layer"
# Bytes for each logit of a chunk. With gradients: log-probabilities, their gradient and that of the logits, in float32. Without: logits
# and log-probabilities. While a filter sorts them: logits, log-probabilities, values, ids (int64), and CUDA's workspace for both of these.
_GRADIENTS, _FORWARD, _FILTER = 12, 8, 32


@functools.lru_cache(1024)
def count_held(shapes: tuple[Shape, ...], shards: int) -> int:
    """Return how many numbers the first of `shards` ranks holds of parameters with these shapes, each sharded by rows."""
    return sum(-(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1 for shape in shapes)


def layer_activations(size: ModelSize, width: int) -> int:
    """Return the bytes that a layer keeps per token for the backward pass, at `width` bytes per number."""
    attention = width * (2 * size.query + 2 * size.key) + 4 * size.heads
    mlp, experts = 4 * width * size.mlp, 4 * width * size.experts * size.hidden
    if size.experts and size.adapter:  # experts have no adapter, and what is frozen keeps no inputs
        mlp, experts = mlp * 3 // 4, experts // 2
    return 2 * _norm(size, width) + attention + mlp + experts


def _norm(size: ModelSize, width: int) -> int:
    return (4 + 2 * width) * size.hidden


def activations(size: ModelSize, width: int, tokens: int, *, recompute: bool) -> tuple[int, int]:
    """Return the bytes that the layers, and the norm after them, keep for a micro-batch of so many tokens; and those of the layer that is
    computed again."""
    layer, count = layer_activations(size, width), len(size.layers)
    kept = count * width * size.hidden if recompute else count * layer
    return tokens * (kept + _norm(size, width)), tokens * layer if recompute else 0


def logits(model: ModelUse, tokens: int, *, gradients: bool = True) -> int:
    """Return the most bytes that a chunk's logits take, in a pass with or without `gradients`."""
    each = _FILTER if model.filters else _GRADIENTS if gradients else _FORWARD
    return min(tokens, model.chunk or tokens) * model.size.vocabulary * each


def _gathers(model: ModelUse, ranks: int) -> bool:
    """Whether FSDP2 gathers the model's layers. One rank shards over itself in bfloat16 (`distributed.shards_alone`)."""
    return ranks > 1 or model.bytes == 2


def _step(model: ModelUse, tokens: int, *, shards: int, ranks: int, whole: bool) -> dict[str, Parts]:
    """Return the phases of an optimizer step on a trained model, each with what it takes beside parameters and moments."""
    size, width = model.size, model.bytes
    held = {"gradients, float32": 4 * count_held(size.trained, shards)}
    if whole:
        held["gradients of a step, unreduced"] = 4 * size.trained_parameters
    gathers = _gathers(model, ranks)
    root, layer = (width * size.root, width * size.layer) if gathers else (0, 0)
    kept, layer_kept = activations(size, width, tokens, recompute=model.recompute)
    head = width * min(size.vocabulary * size.hidden, size.trained_root)
    tied = head if size.root < 2 * size.vocabulary * size.hidden else 0
    return {
        "loss": held
        | {
            "embedding and head, gathered": root,
            "layers gathered or cast": layer,  # the buffer in which the last one came
            "activations": kept,
            "logits of a chunk": logits(model, tokens),
            "gradient of the head": head,
        },
        "layers": held
        | {
            "embedding and head, gathered": root,
            "layers gathered or cast": 2 * layer,
            "activations": kept + layer_kept,
            "gradients of activations": tokens * width * (2 * size.hidden + 3 * size.mlp),
            "gradient of the head": head,
            "gradients of a layer, reduced in float32": 4 * size.trained_layer,
        },
        # a unit's parameters are freed before its gradients are reduced; a tied embedding gets its gradient twice
        "root": held
        | {"gradients of embedding and head, reduced in float32": (gathers * width + 4) * size.trained_root + tied},
    }


def _inference(model: ModelUse, tokens: int, ranks: int) -> dict[str, Parts]:
    """Return the phases of a pass without gradients, each with what it takes beside parameters and moments."""
    size, width = model.size, model.bytes
    root, layer = (width * size.root, width * size.layer) if _gathers(model, ranks) else (0, 0)
    states = tokens * width * (4 * size.hidden + 2 * size.experts * size.hidden + 4 * size.mlp)
    return {
        # as the next layer is gathered, the one before and the buffer in which the next one comes are there too
        "inference, layers": {"layers gathered or cast": root + 3 * layer, "activations of a layer": states},
        "inference, logits": {
            "layers gathered or cast": root + layer,
            "states": tokens * width * size.hidden,
            "logits of a chunk": logits(model, tokens, gradients=False),
        },
    }


def trainer_phases(
    models: Mapping[str, ModelUse],
    tokens: int,
    *,
    shards: int,
    copies: int,
    reduce_gradients: str,
    device: int,
    bucket: int,
    sent: int,
    inference: int = 0,
) -> dict[str, Parts]:
    """Return the bytes on the first GPU of a trainer, by phase and part.

    `models` are those that it holds, by name. Each is sharded over `shards` GPUs, and there are `copies` such sets of GPUs. `tokens` are
    those of a micro-batch with gradients, `inference` of one without. `device` is a GPU's memory, `bucket` the size of the weight channel's
    buckets, and `sent` the bytes of a number there.
    """
    ranks = shards * copies
    held: Parts = {}
    phases: dict[str, Parts] = {}
    for name, model in models.items():
        size = model.size
        held[f"{name}: parameters, float32"] = 4 * count_held((*size.shapes, *size.adapter), shards)
        if model.trained:
            moments = 2 * 4 * count_held(size.trained, shards) + 4 * len(size.trained)
            held[f"{name}: optimizer's moments, float32"] = moments
            whole = ranks > 1 and reduces_once(reduce_gradients, size.trained_parameters, device)
            own = model.tokens or tokens
            for phase, parts in _step(model, own, shards=shards, ranks=ranks, whole=whole).items():
                phases[f"{name}: {phase}"] = {f"{name}: {part}": count for part, count in parts.items()}
        if inference:
            phases |= {f"{name}: {phase}": parts for phase, parts in _inference(model, inference, ranks).items()}
    policy = next(iter(models.values()))
    phases["refit"] = _refit(policy.size, sent, bucket, shards=shards, gathers=ranks > 1)
    held[CUDA_PART] = CONTEXT
    if ranks > 1:
        held[NCCL_PART] = NCCL
    return {phase: held | parts for phase, parts in phases.items()}


def total(parts: Parts) -> int:
    return sum(parts.values())


def buckets(size: ModelSize, width: int, bucket: int) -> int:
    """Return the most bytes that the weight channel's two buffers take. A weight of more than `bucket` bytes travels in its own bucket, and
    buckets use the buffers in turn."""
    return sum(max(bucket, width * count) for count in size.largest_two)


def _refit(size: ModelSize, sent: int, bucket: int, *, shards: int, gathers: bool) -> Parts:
    """Return what a refit takes of the trainer: the largest weight, cast to the replicas' dtype and gathered. With an adapter it is
    gathered in float32 and then cast, and where the two are merged there is also their sum. Experts that are one weight are copied to one
    for each."""
    width = 4 if size.adapter else sent
    weight = width * (size.largest + (0 if size.adapter else size.largest // shards)) if gathers else 0
    merged = 4 * size.largest_adapted * (2 if gathers else 1)
    fused = width * max((math.prod(shape) for shape in set(size.shapes) if len(shape) == 3), default=0)
    cast = 0 if sent == 4 or (gathers and not size.adapter) else sent * size.largest
    return {BUCKETS: buckets(size, sent, bucket), "refit: the largest weight": max(weight, merged) + fused + cast}


def replica_memory(
    size: ModelSize,
    width: int,
    parallel: int,
    cache: int | None,
    share: float,
    device: int,
    bucket: int,
    *,
    batch: int,
    sequences: int,
) -> Parts:
    """Return the bytes on a GPU of a replica of `parallel` GPUs with `width` bytes per number, by part.

    Its KV cache takes `cache` bytes (None: the rest of this `share` of the device). The engine computes `batch` tokens of `sequences`. A
    refit takes more, outside the share: buckets of `bucket` bytes, one weight as the checkpoint has it, and a layer that came in several
    buckets, until it is complete.
    """
    largest_layer = width * size.layer
    parts = {
        "weights": width * size.parameters // parallel,
        "activations of a batch": batch * width * (4 * size.hidden + 3 * size.mlp // parallel)
        + 2 * 4 * sequences * size.vocabulary,
        "CUDA's context, kernels and graphs": GRAPHS,
    }
    parts[KV_CACHE] = max(0, int(share * device) - total(parts)) if cache is None else cache
    waiting = largest_layer if largest_layer > bucket else 0
    parts[REPLICA_REFIT] = buckets(size, width, bucket) + width * size.largest + waiting
    return parts


def kv_bytes_per_token(size: ModelSize, width: int, parallel: int) -> float:
    """Return the bytes of a token's keys and values on each of `parallel` GPUs."""
    return 2 * len(size.layers) * size.key * width / parallel


def count_cached_tokens(size: ModelSize, width: int, parallel: int, cache: int) -> int:
    """Return how many tokens' keys and values fit into `cache` bytes on each of `parallel` GPUs."""
    return int(cache // kv_bytes_per_token(size, width, parallel))
