"""The models that a run's trainer holds, and their sizes, from their configurations alone: each is made on torch's meta device, where it
takes no memory, once for all plans of the same model."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headrace.base.errors import ServiceError
from headrace.base.model_name import MODEL
from headrace.config import Config
from headrace.config.policy import LoRAConfig, PolicyConfig
from headrace.config.root import TEACHER_KEY

from ..learning.algorithms import required_passes
from ..network.adapter import linear_layers, targets
from ..network.backbone import freeze_routers
from ..network.packing import Packing

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
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
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

    def can_be_sharded(self, parallel: int) -> bool:
        """Whether vLLM can divide the model among so many GPUs: each has whole heads, or a key's head whole."""
        keys = self.key * self.heads // self.query
        return self.heads % parallel == 0 and (keys % parallel == 0 or parallel % keys == 0)

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return (*(shape for layer in self.layers for shape in layer), *self.rest)

    @functools.cached_property
    def trained(self) -> tuple[Shape, ...]:
        left = Counter(self.shapes) - Counter(self.frozen)
        return (*left.elements(), *self.adapter)

    @functools.cached_property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    @functools.cached_property
    def trained_parameters(self) -> int:
        return sum(map(math.prod, self.trained))

    @functools.cached_property
    def largest_two(self) -> list[int]:
        """The numbers of elements of the two largest weights."""
        return sorted(map(math.prod, self.shapes), reverse=True)[:2]

    @property
    def largest(self) -> int:
        """The number of elements of the largest weight."""
        return self.largest_two[0]

    @functools.cached_property
    def largest_adapted(self) -> int:
        """The number of elements of the largest weight that has an adapter; 0 without one."""
        return max((a[1] * b[0] for a, b in zip(self.adapter[::2], self.adapter[1::2], strict=True)), default=0)

    @functools.cached_property
    def layer(self) -> int:
        """The number of parameters of the largest layer, with its part of the adapter: FSDP2's unit."""
        own = max((sum(map(math.prod, layer)) for layer in self.layers), default=0)
        return own + self._adapter_of_layer

    @functools.cached_property
    def root(self) -> int:
        """The number of parameters outside the layers: embedding, head and last norm."""
        return sum(map(math.prod, self.rest))

    @functools.cached_property
    def trained_layer(self) -> int:
        """How many parameters of `layer` are trained."""
        if self.adapter or not self.trained:
            return self._adapter_of_layer
        return self.layer

    @functools.cached_property
    def trained_root(self) -> int:
        return 0 if self.adapter or not self.trained else self.root

    @property
    def _adapter_of_layer(self) -> int:
        return -(-sum(map(math.prod, self.adapter)) // max(1, len(self.layers)))


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
    """How a step uses a model. `bytes` are those of a number in its passes. `trained` is false for a reference or a teacher. `filters`:
    top-k or top-p leave tokens out of its distribution. `tokens` are those of its own micro-batches; None: the policy's."""

    size: ModelSize
    bytes: int
    trained: bool
    chunk: int | None
    recompute: bool
    filters: bool = False
    tokens: int | None = None


def list_models(config: Config) -> dict[str, ModelUse]:
    """Return the models that the run's trainer holds, by name; the policy is the first."""
    passes = required_passes(config, optimizer_steps=1)
    settings, generation, recompute = config.policy, config.policy.generation, config.policy.recomputes("cuda")
    chunk, width = settings.chunk_size("cuda"), element_size(settings.precision)
    size = _size(
        config,
        "policy.model_name",
        settings.hf_config_overrides,
        routers=not settings.freeze_moe_router,
        lora=settings.lora_cfg,
    )
    found = {
        "policy": ModelUse(size, width, trained=True, chunk=chunk, recompute=recompute, filters=generation.filters)
    }
    if "ref" in passes and not settings.lora_cfg.enabled:  # with LoRA it is the policy without its adapter
        found["reference"] = ModelUse(size, width, trained=False, chunk=chunk, recompute=False)
    if "teacher" in passes:
        teacher = _size(config, TEACHER_KEY, {}, trained=False)
        found["teacher"] = ModelUse(teacher, width, trained=False, chunk=chunk, recompute=False)
    if "values" in passes:
        key = "value.model_name" if config.value.model_name else "policy.model_name"
        critic = _size(
            config, key, config.value.hf_config_overrides, AutoModel, routers=not config.value.freeze_moe_router
        )
        head = dataclasses.replace(critic, rest=(*critic.rest, (1, critic.hidden), (1,)), vocabulary=1)
        precision = config.value.precision or settings.precision
        rows = config.value.train_micro_batch_size
        tokens = None if rows is None or packs(settings) else rows * settings.max_total_sequence_length
        found["value"] = ModelUse(
            head, element_size(precision), trained=True, chunk=None, recompute=recompute, tokens=tokens
        )
    return found


def packs(policy: PolicyConfig) -> bool:
    """Whether micro-batches are limited by tokens, not by sequences."""
    return policy.sequence_packing.enabled or policy.dynamic_batching.enabled


def micro_batch(policy: PolicyConfig, *, training: bool) -> int:
    """Return the most tokens of a micro-batch, with (`training`) or without gradients."""
    packing = Packing.of(policy, training=training)
    return packing.tokens or (packing.paths or 1) * policy.max_total_sequence_length


class NotPlanned(ServiceError):
    """A model of this architecture has no plan: its layers are of another kind than those that are known."""


def to_download(config: Config) -> str | None:
    """Return which model's configuration must be downloaded before its memory can be planned; None if all are here."""
    missing = [
        f"{key} {name}" for key, name in config.models.items() if name not in KNOWN and not MODEL.is_here(key, name)
    ]
    return ", ".join(missing) or None


# by name, changes and settings: a search for what fits asks hundreds of times
_SIZES: dict[tuple[Any, ...], ModelSize] = {}


def _size(
    config: Config,
    key: str,
    overrides: Mapping[str, Any],
    auto: Any = AutoModelForCausalLM,
    *,
    trained: bool = True,
    routers: bool = True,
    lora: LoRAConfig | None = None,
) -> ModelSize:
    """Return `ModelSize.of` for the model that `key` of the configuration names, with `overrides` of its own configuration."""
    name = config.models.get(key, config.policy.model_name)
    adapter = lora.model_dump_json() if lora is not None and lora.enabled else None
    wanted = (name, repr(dict(overrides)), auto, trained, routers, adapter)
    if wanted not in _SIZES:
        own = _configuration(key, name, copy.deepcopy(dict(overrides)))
        try:
            _SIZES[wanted] = ModelSize.of(own, auto, trained=trained, routers=routers, lora=lora)
        except ServiceError:
            raise
        except Exception as error:  # any architecture may come, and the trainer may know it all the same
            raise NotPlanned(
                f"{key} {name!r}: the memory of a {type(own).__name__.removesuffix('Config')} model can't be planned "
                f"({type(error).__name__}: {error})"
            ) from error
    return _SIZES[wanted]


def _configuration(key: str, name: str, overrides: dict[str, Any]) -> Any:
    try:
        if name in KNOWN:
            known = copy.deepcopy(KNOWN[name])
            known.update(overrides)
            return known
        MODEL.is_here(key, name)
        return AutoConfig.from_pretrained(name, **overrides)
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"{key} {name!r}: its configuration can't be read ({str(error).strip().splitlines()[0]}); give a directory with config.json, "
            f"a name that is in HF_HOME or on the Hugging Face Hub, or one of {', '.join(KNOWN)}"
        ) from error


def element_size(precision: str) -> int:
    """Return the bytes of an element in this precision."""
    return 4 if precision == "float32" else 2
