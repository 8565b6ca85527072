"""The memory that a run takes on each of its GPUs, part by part, computed from its configuration: `headrace plan memory`.

Parameters, gradients and the optimizer's state follow from the shapes of the parameters and are exact. (The model is made on the meta
device, where it takes no memory.) Activations are what autograd keeps for a layer of the Llama type, in the widest micro-batch that the
configuration allows. Other types differ little, unless they have layers of another kind. With b bytes per number (2 in bfloat16; a norm
keeps its input in float32), a hidden size h, queries, keys and MLP of widths q, k and f, and H heads, a token keeps

    2 (4 h + 2 b h) + b (2 q + 2 k) + 4 b f + 4 H      bytes per layer

With checkpointing it keeps b h per layer, and the sum above for the layer that is computed again. In a mixture of experts, f is that of all
experts that the token passes through, and each of them keeps 4 b h more. None of these numbers includes what torch, CUDA and NCCL take for
themselves (a gigabyte or two).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from headrace.base.errors import ServiceError
from headrace.base.model_name import model_is_here
from headrace.config import Config
from headrace.config.policy import LoRAConfig
from headrace.config.root import TEACHER_KEY
from headrace_services.trainer.learning.algorithms import required_passes
from headrace_services.trainer.network.adapter import linear_layers, targets
from headrace_services.trainer.network.backbone import freeze_routers, reduces_once
from headrace_services.trainer.network.packing import Packing

Shape = tuple[int, ...]

_LLAMA = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
_QWEN_1_5B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# Configurations of models, for planning without access to the Hugging Face Hub.
KNOWN: dict[str, Any] = {
    "Qwen/Qwen2.5-1.5B": _QWEN_1_5B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_1_5B,
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32, **_QWEN3
    ),
    "Qwen/Qwen3-32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64, num_attention_heads=64, **_QWEN3
    ),
    "meta-llama/Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32, **_LLAMA
    ),
    "Qwen/Qwen2.5-32B": Qwen2Config(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=27_648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, **_LLAMA
    ),
}  # fmt: skip
GIB = 2**30
_REFIT = "a refit: two buckets and the largest weight"


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A model's parameters, and the widths of its layers.

    `layers` are the shapes of each layer's parameters, `rest` those of embedding, head and last norm, `frozen` those of all parameters that
    are not trained, and `adapter` those of an adapter. A token passes through `experts` experts, and through MLPs of width `mlp` in total.
    """

    layers: tuple[tuple[Shape, ...], ...]
    rest: tuple[Shape, ...]
    frozen: tuple[Shape, ...]
    adapter: tuple[Shape, ...]
    hidden: int
    query: int
    key: int
    mlp: int
    experts: int
    heads: int
    vocabulary: int

    @classmethod
    def of(
        cls,
        config: Any,
        auto: Any = AutoModelForCausalLM,
        *,
        trained: bool = True,
        routers: bool = True,
        lora: LoRAConfig | None = None,
    ) -> ModelSize:
        """Measure the model that `auto` makes of a Hugging Face configuration. All of it is `trained` or none; or all but its `routers`;
        or, in its place, the adapter that `lora` describes. Raises `ServiceError` if `lora` names layers that the model lacks."""
        with torch.device("meta"):
            model = auto.from_config(copy.deepcopy(config), dtype=torch.float32)
        model.requires_grad_(trained)
        if not routers:
            freeze_routers(model)
        adapter: list[Shape] = []
        if lora is not None and lora.enabled:
            for layer in map(model.get_submodule, targets(linear_layers(model), lora)):
                adapter += [(lora.dim, layer.in_features), (layer.out_features, lora.dim)]
            model.requires_grad_(False)
        names = set(model._no_split_modules or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        within = {id(parameter) for layer in layers for parameter in layer.parameters()}
        text = config.get_text_config()
        heads = text.num_attention_heads
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        return cls(
            layers=tuple(tuple(tuple(p.shape) for p in layer.parameters()) for layer in layers),
            rest=tuple(tuple(p.shape) for p in model.parameters() if id(p) not in within),
            frozen=tuple(tuple(p.shape) for p in model.parameters() if not p.requires_grad),
            adapter=tuple(adapter),
            hidden=text.hidden_size,
            query=head * heads,
            key=head * (getattr(text, "num_key_value_heads", None) or heads),
            mlp=_mlp_width(text),
            experts=getattr(text, "num_experts_per_tok", None) or 0,
            heads=heads,
            vocabulary=text.vocab_size,
        )

    @property
    def shapes(self) -> list[Shape]:
        return [*(shape for layer in self.layers for shape in layer), *self.rest]

    @property
    def trained(self) -> list[Shape]:
        left = self.shapes
        for shape in self.frozen:
            left.remove(shape)
        return [*left, *self.adapter]

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def largest(self) -> int:
        """The number of elements of the largest weight."""
        return max(map(math.prod, self.shapes))


def _mlp_width(text: Any) -> int:
    """Return the width of the MLP that a token passes through, summed over its experts."""
    width: int = getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size
    experts = getattr(text, "num_experts_per_tok", None)
    if not experts:
        return width
    expert = getattr(text, "moe_intermediate_size", None) or width
    return int(experts * expert + (getattr(text, "shared_expert_intermediate_size", 0) or 0))


@dataclasses.dataclass(frozen=True)
class ModelUse:
    """How a step uses a model. `bytes` are those of a number in its passes. `trained` is false for a reference or a teacher."""

    size: ModelSize
    bytes: int
    trained: bool
    chunk: int | None
    recompute: bool


def count_held(shapes: list[Shape], shards: int) -> int:
    """Return how many numbers the first of `shards` ranks holds of parameters with these shapes, each sharded by rows."""
    return sum(-(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1 for shape in shapes)


def layer_activations(size: ModelSize, width: int) -> int:
    """Return the bytes that a layer keeps per token for the backward pass, at `width` bytes per number."""
    attention = width * (2 * size.query + 2 * size.key) + 4 * size.heads
    experts = 4 * width * size.experts * size.hidden
    return 2 * _norm(size, width) + attention + 4 * width * size.mlp + experts


def _norm(size: ModelSize, width: int) -> int:
    return (4 + 2 * width) * size.hidden


def activations(size: ModelSize, width: int, tokens: int, *, recompute: bool) -> int:
    """Return the bytes that the layers, and the norm after them, keep for a micro-batch of so many tokens."""
    layer, count = layer_activations(size, width), len(size.layers)
    kept = count * width * size.hidden + layer if recompute else count * layer
    return tokens * (kept + _norm(size, width))


def logits(model: ModelUse, tokens: int) -> int:
    """Return the bytes of a chunk's logits while its gradients are computed: logits, log-probabilities and their gradients in float32, and
    the projection and its gradient in the model's dtype."""
    return min(tokens, model.chunk or tokens) * model.size.vocabulary * (3 * 4 + 2 * model.bytes)


def trainer_memory(
    models: Mapping[str, ModelUse],
    tokens: int,
    *,
    shards: int,
    copies: int,
    reduce_gradients: str,
    device: int,
    bucket: int,
    sent: int,
) -> dict[str, int]:
    """Return the bytes on the first GPU of a trainer, by part.

    `models` are those that it holds, by name. Each is sharded over `shards` GPUs, and there are `copies` such sets of GPUs. `tokens` are
    those of a micro-batch, `device` is a GPU's memory, `bucket` the size of the weight channel's buckets, and `sent` the bytes of a number
    there.
    """
    parts: dict[str, int] = {}
    ranks = shards * copies
    peaks = []
    for name, model in models.items():
        shapes, trained = model.size.shapes, model.size.trained if model.trained else []
        parts[f"{name}: parameters, float32"] = 4 * count_held([*shapes, *model.size.adapter], shards)
        gathered = 0
        if ranks > 1 or model.bytes == 2:  # one rank shards over itself in bfloat16 (`distributed.shards_alone`)
            units = sorted((sum(map(math.prod, layer)) for layer in model.size.layers), reverse=True)
            gathered = model.bytes * (sum(map(math.prod, model.size.rest)) + sum(units[:2]))
        if not model.trained:
            peaks.append(gathered)
            continue
        whole = ranks > 1 and reduces_once(reduce_gradients, sum(map(math.prod, trained)), device)
        parts[f"{name}: gradients, float32"] = 4 * count_held(trained, shards)
        parts[f"{name}: optimizer's moments, float32"] = 2 * 4 * count_held(trained, shards) + 4 * len(trained)
        parts[f"{name}: gradients of a step, unreduced"] = 4 * sum(map(math.prod, trained)) if whole else 0
        parts[f"{name}: layers gathered or cast"] = gathered
        parts[f"{name}: activations"] = activations(model.size, model.bytes, tokens, recompute=model.recompute)
        parts[f"{name}: logits of a chunk"] = logits(model, tokens)
    if peaks:
        parts["frozen models: layers gathered or cast"] = max(peaks)
    policy = next(iter(models.values())).size
    merged = 4 if policy.adapter else 0
    gathered = (merged or sent) if ranks > 1 else 0
    parts[_REFIT] = buckets(policy, sent, bucket) + (gathered + merged) * policy.largest
    return parts


def buckets(size: ModelSize, width: int, bucket: int) -> int:
    """Return the most bytes that the weight channel's two buffers take. A weight of more than `bucket` bytes travels in its own bucket, and
    buckets use the buffers in turn."""
    largest = sorted((width * math.prod(shape) for shape in size.shapes), reverse=True)[:2]
    return sum(max(bucket, nbytes) for nbytes in largest)


def replica_memory(
    size: ModelSize, width: int, parallel: int, cache: int | None, share: float, device: int, bucket: int
) -> dict[str, int]:
    """Return the bytes on a GPU of a replica of `parallel` GPUs with `width` bytes per number, by part.

    Its KV cache takes `cache` bytes (None: the rest of this `share` of the device). A refit takes more: buckets of `bucket` bytes, and one
    weight as the checkpoint has it.
    """
    weights = width * size.parameters // parallel
    found = max(0, int(share * device) - weights) if cache is None else cache
    return {"weights": weights, "KV cache": found, _REFIT: buckets(size, width, bucket) + width * size.largest}


def cached_tokens(size: ModelSize, width: int, parallel: int, cache: int) -> int:
    """Return how many tokens' keys and values fit into `cache` bytes on each of `parallel` GPUs."""
    return int(cache // (2 * len(size.layers) * size.key * width / parallel))


# -- a run's configuration


def plan(config: Config, gpus: int, hosts: int, device: int) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return the bytes that the run's trainer takes on each of `gpus` GPUs on `hosts` hosts, by part; those that a replica takes on each of
    its GPUs; and remarks. Raises `ServiceError` for a model whose configuration can't be read."""
    models = dict(_models(config))
    policy = models["policy"]
    packing = Packing.of(config.policy, training=True)
    longest = config.policy.max_total_sequence_length
    tokens = packing.tokens or (packing.paths or 1) * longest
    engine = config.policy.generation.vllm_cfg.resolve(on_cpu=False)
    assert engine.gpu_memory_utilization is not None  # it has a default on a GPU
    width = 4 if config.policy.rollout_precision[1] == "float32" else 2
    trainer = trainer_memory(
        models,
        tokens,
        shards=gpus // hosts if config.trainer.shard_within_host else gpus,
        copies=hosts if config.trainer.shard_within_host else 1,
        reduce_gradients=config.trainer.reduce_gradients,
        device=device,
        bucket=config.weight_channel.bucket_size("cuda"),
        sent=width,
    )
    parallel = engine.tensor_parallel_size
    replica = replica_memory(
        policy.size,
        width,
        parallel,
        engine.kv_cache_memory_bytes,
        engine.gpu_memory_utilization,
        device,
        config.weight_channel.bucket_size("cuda"),
    )
    cached = cached_tokens(policy.size, width, parallel, replica["KV cache"])
    otherwise = activations(policy.size, policy.bytes, tokens, recompute=not policy.recompute)
    remarks = [
        f"{policy.size.parameters:,} parameters; micro-batches of at most {tokens:,} tokens",
        f"activations {'without' if policy.recompute else 'with'} checkpointing: {otherwise / GIB:.1f} GiB",
        f"the KV cache of a replica (tensor_parallel_size {parallel}) holds {cached:,} tokens",
    ]
    return trainer, replica, remarks


def _models(config: Config) -> Iterator[tuple[str, ModelUse]]:
    """Yield the models that the run's trainer holds, by name."""
    passes = required_passes(config, optimizer_steps=1)
    settings, recompute = config.policy, config.policy.recomputes("cuda")
    chunk = settings.chunk_size("cuda")
    own = _configuration(config, "policy.model_name", settings.hf_config_overrides)
    size = ModelSize.of(own, routers=not settings.freeze_moe_router, lora=settings.lora_cfg)
    width = _bytes(settings.precision)
    yield "policy", ModelUse(size, width, trained=True, chunk=chunk, recompute=recompute)
    if "ref" in passes and not settings.lora_cfg.enabled:  # with LoRA it is the policy without its adapter
        yield "reference", ModelUse(size, width, trained=False, chunk=chunk, recompute=False)
    if "teacher" in passes:
        teacher = ModelSize.of(_configuration(config, TEACHER_KEY, {}), trained=False)
        yield "teacher", ModelUse(teacher, width, trained=False, chunk=chunk, recompute=False)
    if "values" in passes:
        key = "value.model_name" if config.value.model_name else "policy.model_name"
        critic = ModelSize.of(
            _configuration(config, key, config.value.hf_config_overrides),
            AutoModel,
            routers=not config.value.freeze_moe_router,
        )
        head = dataclasses.replace(critic, rest=(*critic.rest, (1, critic.hidden), (1,)), vocabulary=1)
        precision = config.value.precision or settings.precision
        yield "value", ModelUse(head, _bytes(precision), trained=True, chunk=None, recompute=recompute)


def _configuration(config: Config, key: str, overrides: Mapping[str, Any]) -> Any:
    name = config.models.get(key, config.policy.model_name)
    try:
        if name in KNOWN:
            known = copy.deepcopy(KNOWN[name])
            known.update(dict(overrides))
            return known
        model_is_here(key, name)
        return AutoConfig.from_pretrained(name, **copy.deepcopy(dict(overrides)))
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{key} {name!r}: its configuration can't be read ({str(error).strip().splitlines()[0]}); give a directory with config.json, "
            f"a name that is in HF_HOME or on the Hugging Face Hub, or one of {', '.join(KNOWN)}"
        ) from error


def _bytes(precision: str) -> int:
    return 2 if precision == "bfloat16" else 4
