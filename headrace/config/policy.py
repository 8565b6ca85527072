"""`policy`: the model, its optimizer, and how it generates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.config.base import Section
from headrace.config.optimizer import Optimizer, Scheduler


class Tokenizer(Section):
    name: str | None = Field(None, description="directory or name; null takes policy.model_name")
    chat_template_kwargs: dict[str, Any] = Field({}, description="passed to apply_chat_template")


class VllmConfig(Section):
    """Passed to the vLLM engine."""

    precision: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="null takes policy.precision")
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(
        0.6, gt=0, le=1, description="on a GPU: share of its memory for weights and KV cache"
    )
    kv_cache_memory_bytes: int | None = Field(
        256 * 1024**2,
        ge=1024**2,
        description="size of the KV cache; null lets vLLM size it from gpu_memory_utilization",
    )
    enforce_eager: bool = Field(True, description="no CUDA graphs, no compilation")
    max_num_seqs: int = Field(256, ge=1, description="sequences in a batch of the engine")


class Generation(Section):
    max_new_tokens: int = Field(
        256,
        ge=1,
        description="a completion also ends where it and its prompt have policy.max_total_sequence_length tokens",
    )
    temperature: float = Field(
        1.0, gt=0, description="also divides the training logits, so that ratios compare like with like"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="smallest set of tokens with this probability; after top_k, in training logits too"
    )
    top_k: int | None = Field(
        None, ge=-1, description="most probable tokens alone, in training logits too; null, 0 and -1 are all"
    )
    val_temperature: float | None = Field(None, ge=0, description="for validation; 0 is greedy, null takes temperature")
    val_top_p: float | None = Field(None, gt=0, le=1, description="for validation; null takes top_p")
    val_top_k: int | None = Field(None, ge=-1, description="for validation; 0 and -1 are all, null takes top_k")
    stop_token_ids: list[int] = Field([], description="besides the tokenizer's end token")
    stop_strings: list[str] = Field([])
    vllm_cfg: VllmConfig = VllmConfig()

    @field_validator("top_k")
    @classmethod
    def _all_or_so_many(cls, top_k: int | None) -> int | None:
        return top_k or None if top_k != -1 else None


class DynamicBatching(Section):
    """Padded micro-batches of so many places (rows times width) instead of so many sequences."""

    enabled: bool = False
    train_mb_tokens: int | None = Field(
        None, ge=1, description="null takes max_total_sequence_length times train_micro_batch_size"
    )
    logprob_mb_tokens: int | None = Field(
        None, ge=1, description="in forward-only passes; null takes max_total_sequence_length times logprob_batch_size"
    )
    sequence_length_round: int = Field(64, ge=1, description="widths are multiples of this")


class SequencePacking(DynamicBatching):
    """Several sequences in one row of so many tokens, each seeing itself alone."""

    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing"] = "modified_first_fit_decreasing"


class Policy(Section):
    model_name: str = Field("Qwen/Qwen2.5-1.5B", description="a Hugging Face causal language model: directory or name")
    hf_config_overrides: dict[str, Any] = Field(
        {}, description="keys of the model's own configuration and their values, for trainer and rollouts alike"
    )
    tokenizer: Tokenizer = Tokenizer()
    max_total_sequence_length: int = Field(512, ge=2, description="prompt and completion together, in tokens")
    train_global_batch_size: int | None = Field(
        None, ge=1, description="trajectories in an optimizer step; must divide a batch, and null takes all of it"
    )
    train_micro_batch_size: int = Field(4, ge=1, description="sequences in a forward and backward pass")
    logprob_batch_size: int | None = Field(
        None, ge=1, description="sequences in a forward-only pass; null takes train_micro_batch_size"
    )
    dynamic_batching: DynamicBatching = DynamicBatching()
    sequence_packing: SequencePacking = SequencePacking()
    share_prompts: bool = Field(
        False,
        description="trajectories of one prompt in one row: the prompt once, each completion seeing it and itself",
    )
    logprob_chunk_size: int | None = Field(
        None,
        ge=1,
        description="tokens whose logits are held at once, in the backward pass too; null holds those of a micro-batch",
    )
    activation_checkpointing: bool = Field(
        False, description="keep each layer's input alone and compute the layer again in the backward pass"
    )
    freeze_moe_router: bool = Field(False, description="in a mixture of experts, keep the routers' weights as they are")
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Field([])
    generation: Generation = Generation()

    @model_validator(mode="after")
    def _rows(self) -> Policy:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled and sequence_packing.enabled are both true: rows are either padded or packed; "
                "set one of them to false"
            )
        for name in ("dynamic_batching", "sequence_packing"):
            section: DynamicBatching = getattr(self, name)
            for key in ("train_mb_tokens", "logprob_mb_tokens"):
                tokens = getattr(section, key)
                if section.enabled and tokens is not None and tokens < self.max_total_sequence_length:
                    raise ValueError(
                        f"{name}.{key} {tokens} is less than max_total_sequence_length {self.max_total_sequence_length}: "
                        "a sequence is never divided; raise the one or lower the other"
                    )
        return self
