"""`policy`: the model, its optimizer, and how it generates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

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
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(
        1.0, gt=0, description="also divides the training logits, so that ratios compare like with like"
    )
    val_temperature: float | None = Field(None, ge=0, description="for validation; 0 is greedy, null takes temperature")
    stop_token_ids: list[int] = Field([], description="besides the tokenizer's end token")
    stop_strings: list[str] = Field([])
    vllm_cfg: VllmConfig = VllmConfig()


class Policy(Section):
    model_name: str = Field("Qwen/Qwen2.5-1.5B", description="a Hugging Face causal language model: directory or name")
    tokenizer: Tokenizer = Tokenizer()
    max_total_sequence_length: int = Field(512, ge=2, description="prompt and completion together, in tokens")
    train_global_batch_size: int | None = Field(
        None, ge=1, description="trajectories in an optimizer step; must divide a batch, and null takes all of it"
    )
    train_micro_batch_size: int = Field(4, ge=1, description="sequences in a forward and backward pass")
    logprob_batch_size: int | None = Field(
        None, ge=1, description="sequences in a forward-only pass; null takes train_micro_batch_size"
    )
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: Optimizer = Optimizer()
    scheduler: Scheduler = Field([])
    generation: Generation = Generation()

    @model_validator(mode="after")
    def _room_for_a_prompt(self) -> Policy:
        if self.generation.max_new_tokens >= self.max_total_sequence_length:
            raise ValueError(
                f"generation.max_new_tokens {self.generation.max_new_tokens} leaves no room for a prompt in "
                f"max_total_sequence_length {self.max_total_sequence_length}"
            )
        return self
