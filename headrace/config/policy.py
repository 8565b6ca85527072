"""`policy` and `value`: the models that are trained, their optimizers and schedules, and how the policy generates.

Keys are those of NeMo RL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from headrace.config.in_yaml import in_yaml
from headrace.config.jinja_file import read_template
from headrace.config.marks import Fixed, MayChange, ReadPath
from headrace.config.section import Section

# torch's schedulers whose arguments are all numbers, with these arguments
KEYS: dict[str, frozenset[str]] = {
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "ExponentialLR": frozenset({"gamma"}),
    "StepLR": frozenset({"step_size", "gamma"}),
    "MultiStepLR": frozenset({"milestones", "gamma"}),
    "PolynomialLR": frozenset({"total_iters", "power"}),
    "CosineAnnealingLR": frozenset({"T_max", "eta_min"}),
    "CosineAnnealingWarmRestarts": frozenset({"T_0", "T_mult", "eta_min"}),
}
NAMESPACE = "torch.optim.lr_scheduler."
# The temperatures that vLLM samples at: it refuses each request above, and raises lower ones to the coldest without a word to the caller.
COLDEST, HOTTEST = 0.01, 2.0


class OptimizerKwargs(Section):
    lr: float = Field(5e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    foreach: bool | None = Field(None, description="torch's multi-tensor kernels; null: as fused decides")
    fused: bool | None = Field(None, description="one kernel for the whole step; null: true unless foreach is")


class OptimizerConfig(Section):
    name: Fixed[Literal["torch.optim.AdamW", "torch.optim.Adam"]] = "torch.optim.AdamW"
    kwargs: MayChange[OptimizerKwargs] = OptimizerKwargs()


class SchedulerConfig(Section):
    """One of torch's schedulers, or the trainer steps at which the next one takes over."""

    name: str | None = Field(None, description=f"{NAMESPACE} and {', '.join(KEYS)}")
    kwargs: dict[str, int | float | list[int]] = Field({}, description="its arguments, by torch's names")
    milestones: list[int] | None = Field(
        None, description="only in the last item: steps at which the next scheduler takes over"
    )

    @model_validator(mode="after")
    def _one_of_torch_s(self) -> SchedulerConfig:
        if (self.name is None) == (self.milestones is None):
            raise ValueError("name and milestones; give name and kwargs, or, in the last item, only milestones")
        if self.name is None:
            if self.kwargs:
                raise ValueError(f"kwargs {self.kwargs} without a name; give name")
            return self
        short = self.name.removeprefix(NAMESPACE)
        if short == self.name or short not in KEYS:
            raise ValueError(f"unknown scheduler {in_yaml(self.name)}; write {NAMESPACE} and one of {', '.join(KEYS)}")
        if unknown := sorted(self.kwargs.keys() - KEYS[short]):
            raise ValueError(f"{short} takes no {', '.join(unknown)}; it takes {', '.join(sorted(KEYS[short]))}")
        return self


def _several(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, dict) else value


def _in_sequence(items: list[SchedulerConfig]) -> list[SchedulerConfig]:
    named = [item for item in items if item.name]
    if any(item.milestones is not None for item in items[:-1]) or (items and not named):
        raise ValueError(
            "milestones are not in the last item after schedulers; give the schedulers first, then milestones"
        )
    steps = (items[-1].milestones or []) if items else []
    if len(steps) != max(len(named) - 1, 0):
        raise ValueError(f"{len(named)} schedulers need {max(len(named) - 1, 0)} milestones, not {len(steps)}")
    if steps != sorted(set(steps)) or any(step < 1 for step in steps):
        raise ValueError(f"milestones {steps} are not ascending steps of 1 or more")
    return items


SchedulerConfigs = Annotated[
    list[SchedulerConfig],
    BeforeValidator(_several),
    AfterValidator(_in_sequence),
    Field(
        description="learning rate by trainer step: torch's schedulers, each for its part, then {milestones: [steps]}. A single scheduler "
        "needs no list; without any the rate is constant"
    ),
]


class TokenizerConfig(Section):
    name: ReadPath[str | None] = Field(None, description="directory or name; null: policy.model_name")
    chat_template: ReadPath[str | None] = Field(
        None,
        description="a Jinja template, or a file that ends in .jinja, which is read when the run starts; null: the tokenizer's own. "
        "Prompts, episodes and the replicas' OpenAI API use it, and checkpoints contain it",
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="passed to apply_chat_template")

    @field_validator("chat_template")
    @classmethod
    def _is_text(cls, template: str | None) -> str | None:
        return None if template is None else read_template(template)


class VLLMConfig(Section):
    """Passed to the vLLM engine."""

    precision: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="null: policy.precision")
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = Field(
        "auto", description="auto: the type of the weights; fp8 makes trainer and replicas differ, which is warned of"
    )
    attention_backend: str | None = Field(
        None, description="by vLLM's names (FLASH_ATTN, FLASHINFER, TRITON_ATTN, …); null: vLLM's choice"
    )
    tensor_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the device's memory for weights and KV cache; null: 0.9 on a GPU, or 0.45 where `headrace up` shares it "
        "with the trainer, or what the trainer leaves",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1024**2,
        description="size of the KV cache; null: what gpu_memory_utilization leaves, or 256 MiB on a CPU unless that key is set",
    )
    enforce_eager: bool | None = Field(
        None, description="no CUDA graphs, no compilation; null: true on a CPU, false on a GPU"
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="sequences that the engine computes at once, besides a refit's probe; null: 1024 on a GPU of 70 GiB or more, else 256",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens in a batch of the engine, more than max_num_seqs; null: 8192 on a GPU (max_num_seqs + 1, if that is more), "
        "vLLM's own choice on a CPU",
    )
    async_scheduling: bool | None = Field(
        None,
        description="vLLM prepares a step while the GPU computes the previous one; null: vLLM's choice, on for a GPU; always off on a CPU",
    )
    tool_parser: str | None = Field(
        None,
        description="vLLM's parser for this model's tool calls (hermes, qwen3_xml, llama3_json, …), in episodes and in the replicas' "
        "OpenAI API; null: none are parsed",
    )
    reasoning_parser: str | None = Field(
        None,
        description="vLLM's parser for this model's reasoning (qwen3, deepseek_r1, …); null leaves it in the content",
    )
    tool_parser_plugin: ReadPath[str | None] = Field(
        None, description="a file of Python that registers further parsers for tool calls with vLLM"
    )
    reasoning_parser_plugin: ReadPath[str | None] = Field(
        None, description="a file of Python that registers further parsers for reasoning with vLLM"
    )

    @model_validator(mode="after")
    def _a_token_for_each_sequence(self) -> VLLMConfig:
        sequences, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if sequences is not None and tokens is not None and tokens <= sequences:
            raise ValueError(
                f"max_num_batched_tokens {tokens} is not more than max_num_seqs {sequences}: a batch has a token of each sequence, "
                "and one of a refit's probe; raise the first or lower the second"
            )
        return self

    def resolve(self, *, on_cpu: bool, device_memory: int = 0) -> VLLMConfig:
        """Return a copy with null replaced by Headrace's own defaults on this device. `device_memory`: the bytes of a GPU, if known."""
        # vLLM's own defaults, except that it has 256 for an A100 of 80 GB
        sequences = self.max_num_seqs or (1024 if device_memory >= 70 * 1024**3 else 256)
        if self.max_num_seqs is None and self.max_num_batched_tokens is not None:
            sequences = min(sequences, self.max_num_batched_tokens - 1)
        ours: dict[str, Any] = {"max_num_seqs": sequences}
        if on_cpu:
            cache = 256 * 1024**2 if self.gpu_memory_utilization is None else None
            ours |= {"kv_cache_memory_bytes": cache, "enforce_eager": True}
        else:
            ours |= {
                "gpu_memory_utilization": 0.9,
                "enforce_eager": False,
                "max_num_batched_tokens": max(8192, sequences + 1),
            }
        return self.model_copy(update={key: value for key, value in ours.items() if getattr(self, key) is None})

    @property
    def sizes(self) -> str:
        """The keys that decide the engine's memory and batches, in a line."""
        keys = (
            "tensor_parallel_size",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "enforce_eager",
            "max_num_seqs",
            "max_num_batched_tokens",
        )
        return ", ".join(f"{key} {getattr(self, key)}" for key in keys if getattr(self, key) is not None)


class GenerationConfig(Section):
    max_new_tokens: Fixed[int] = Field(
        256,
        ge=1,
        description="a completion also ends once it and its prompt have policy.max_total_sequence_length tokens",
    )
    temperature: Fixed[float] = Field(
        1.0,
        ge=COLDEST,
        le=HOTTEST,
        description="also divides the training logits, so that ratios compare equal distributions",
    )
    top_p: Fixed[float] = Field(
        1.0,
        gt=0,
        le=1,
        description="keep the smallest set of tokens with this probability, after top_k; in training logits too",
    )
    top_k: Fixed[int | None] = Field(
        None,
        ge=-1,
        description="keep this many of the most probable tokens, in training logits too; null, 0 and -1: all",
    )
    val_temperature: MayChange[float | None] = Field(
        None, ge=0, le=HOTTEST, description=f"for validation; 0 is greedy, else at least {COLDEST}; null: temperature"
    )
    val_top_p: MayChange[float | None] = Field(None, gt=0, le=1, description="for validation; null: top_p")
    val_top_k: MayChange[int | None] = Field(None, ge=-1, description="for validation; 0 and -1: all; null: top_k")
    stop_token_ids: Fixed[list[Annotated[int, Field(ge=0)]]] = Field(
        [], description="in addition to the end tokens of the tokenizer and of the model's generation_config.json"
    )
    stop_strings: Fixed[list[Annotated[str, Field(min_length=1)]]] = Field([])
    bad_words: Fixed[list[Annotated[str, Field(min_length=1)]]] = Field(
        [],
        description="text that is never sampled, each word one token of the tokenizer (`<|image|>`); training logits exclude it too",
    )
    vllm_cfg: MayChange[VLLMConfig] = VLLMConfig()

    @property
    def filters(self) -> bool:
        """Whether tokens are sampled from a part of the distribution."""
        return self.top_k is not None or self.top_p < 1 or bool(self.bad_words)

    @field_validator("val_temperature")
    @classmethod
    def _greedy_or_warm_enough(cls, temperature: float | None) -> float | None:
        if temperature and temperature < COLDEST:
            raise ValueError(f"vLLM samples at {COLDEST} or more; give 0 for greedy validation, or {COLDEST}")
        return temperature

    @field_validator("top_k")
    @classmethod
    def _all_or_so_many(cls, top_k: int | None) -> int | None:
        return top_k or None if top_k != -1 else None


class DynamicBatchingConfig(Section):
    """Padded micro-batches of a given number of places (rows times width) instead of sequences."""

    enabled: bool = False
    train_mb_tokens: int | None = Field(
        None, ge=1, description="null: max_total_sequence_length times train_micro_batch_size"
    )
    logprob_mb_tokens: int | None = Field(
        None, ge=1, description="in forward-only passes; null: max_total_sequence_length times logprob_batch_size"
    )
    sequence_length_round: int = Field(64, ge=1, description="widths are multiples of this")


class SequencePackingConfig(DynamicBatchingConfig):
    """Several sequences in one row of a given number of tokens; each sequence attends only to itself."""

    algorithm: Literal["first_fit_decreasing", "modified_first_fit_decreasing"] = "modified_first_fit_decreasing"


# the ranks that vLLM supports
ENGINE_DIMS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoRAConfig(Section):
    """An adapter (LoRA): small matrices beside the policy's linear layers, which are trained in their place. The model itself is frozen.
    Its head and its embedding have no adapter. Neither has the value model, all of whose weights are trained."""

    enabled: Fixed[bool] = False
    dim: Fixed[int] = Field(8, ge=1, description="rank of the adapter's matrices")
    alpha: Fixed[int] = Field(32, ge=1, description="the adapter's output is multiplied by alpha / dim")
    dropout: Fixed[float] = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout of the adapter's inputs, in the passes in which it is trained; costs one more pass per step",
    )
    target_modules: Fixed[list[str]] = Field(
        [],
        description="linear layers by the last part of their names, or by patterns of whole names; empty: all of them; experts "
        "that one tensor holds are none",
    )
    exclude_modules: Fixed[list[str]] = Field([], description="layers without an adapter, named the same way")
    init: Fixed[Literal["xavier", "uniform"]] = Field(
        "xavier", description="how A is drawn, with grpo.seed: xavier_normal_ or kaiming_uniform_; B is 0"
    )
    refit: MayChange[Literal["merged", "adapter"]] = Field(
        "merged",
        description="what replicas get. merged: the model merged with the adapter; adapter: the model once, then only the adapter, for "
        f"vLLM's LoRA (dim at most {ENGINE_DIMS[-1]}, no experts, one GPU per replica)",
    )

    @model_validator(mode="after")
    def _fits_the_engine(self) -> LoRAConfig:
        if self.adapter_alone and self.dim > ENGINE_DIMS[-1]:
            raise ValueError(
                f"dim {self.dim} with refit adapter: vLLM's LoRA supports at most {ENGINE_DIMS[-1]}; set refit to merged"
            )
        return self

    @property
    def adapter_alone(self) -> bool:
        """Whether replicas get only the adapter."""
        return self.enabled and self.refit == "adapter"

    @property
    def drops(self) -> bool:
        """Whether there is an adapter with dropout."""
        return self.enabled and self.dropout > 0


class PolicyConfig(Section):
    model_name: Fixed[ReadPath[str]] = Field(
        "Qwen/Qwen2.5-1.5B", description="a Hugging Face causal language model: directory or name"
    )
    hf_config_overrides: Fixed[dict[str, Any]] = Field(
        {}, description="keys of the model's own configuration with their values, for trainer and rollouts"
    )
    tokenizer: Fixed[TokenizerConfig] = TokenizerConfig()
    max_total_sequence_length: Fixed[int] = Field(512, ge=2, description="prompt and completion together, in tokens")
    train_global_batch_size: MayChange[int | None] = Field(
        None, ge=1, description="trajectories in an optimizer step; must divide a batch; null: all of it"
    )
    train_micro_batch_size: MayChange[int] = Field(4, ge=1, description="sequences in a forward and backward pass")
    logprob_batch_size: MayChange[int | None] = Field(
        None, ge=1, description="sequences in a forward-only pass; null: train_micro_batch_size"
    )
    dynamic_batching: MayChange[DynamicBatchingConfig] = DynamicBatchingConfig()
    sequence_packing: MayChange[SequencePackingConfig] = SequencePackingConfig()
    share_prompts: MayChange[bool] = Field(
        False,
        description="put trajectories of one prompt in one row: the prompt once, and each completion attends to it and to itself",
    )
    logprob_chunk_size: MayChange[int | None] = Field(
        None,
        ge=1,
        description="tokens whose logits are held at a time, in the backward pass too; null: 2048 on a GPU, else all of a micro-batch",
    )
    activation_checkpointing: MayChange[bool | None] = Field(
        None,
        description="keep only each layer's input, and recompute the layer in the backward pass; null: true on a GPU",
    )
    torch_compile: MayChange[bool] = Field(
        False,
        description="compile the models' layers with torch, which takes a minute or more in the first step; needs a C++ compiler",
    )
    freeze_moe_router: MayChange[bool] = Field(False, description="in a mixture of experts, don't train the routers")
    lora_cfg: LoRAConfig = LoRAConfig()
    precision: Fixed[Literal["float32", "bfloat16"]] = "bfloat16"
    max_grad_norm: MayChange[float] = Field(
        1.0, gt=0, allow_inf_nan=True, description="gradients are scaled down to this norm; .inf: never"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: MayChange[SchedulerConfigs] = Field([])
    generation: GenerationConfig = GenerationConfig()

    def chunk_size(self, device: str) -> int | None:
        """Return `logprob_chunk_size` on a device of this type; None means all of a micro-batch."""
        return 2048 if self.logprob_chunk_size is None and device == "cuda" else self.logprob_chunk_size

    def recomputes(self, device: str) -> bool:
        """Return `activation_checkpointing` on a device of this type."""
        return device == "cuda" if self.activation_checkpointing is None else self.activation_checkpointing

    @property
    def rollout_precision(self) -> tuple[str, str]:
        """The precision of the replicas' weights, after the key that sets it."""
        own = self.generation.vllm_cfg.precision
        return ("policy.generation.vllm_cfg.precision", own) if own else ("policy.precision", self.precision)

    @model_validator(mode="after")
    def _rows(self) -> PolicyConfig:
        if self.dynamic_batching.enabled and self.sequence_packing.enabled:
            raise ValueError(
                "dynamic_batching.enabled and sequence_packing.enabled are both true: rows are either padded or packed; "
                "set one of them to false"
            )
        for name in ("dynamic_batching", "sequence_packing"):
            section: DynamicBatchingConfig = getattr(self, name)
            for key in ("train_mb_tokens", "logprob_mb_tokens"):
                tokens = getattr(section, key)
                if section.enabled and tokens is not None and tokens < self.max_total_sequence_length:
                    raise ValueError(
                        f"{name}.{key} {tokens} is less than max_total_sequence_length {self.max_total_sequence_length}: "
                        "a sequence is never divided; raise the former or lower the latter"
                    )
        return self


class ValueConfig(Section):
    """A transformers backbone with a linear head, used by `ppo` with the estimator `gae`; otherwise none of it is loaded."""

    model_name: Fixed[ReadPath[str | None]] = Field(
        None,
        description="directory or name of a model whose backbone it starts from, or `value/` of a checkpoint, including its head; null: "
        "policy.model_name",
    )
    hf_config_overrides: Fixed[dict[str, Any]] = Field(
        {}, description="like policy.hf_config_overrides, for the value model"
    )
    train_global_batch_size: MayChange[int | None] = Field(
        None, ge=1, description="trajectories in an optimizer step; null: policy.train_global_batch_size"
    )
    train_micro_batch_size: MayChange[int | None] = Field(
        None, ge=1, description="sequences in a pass; null: policy.train_micro_batch_size"
    )
    freeze_moe_router: MayChange[bool] = Field(False, description="in a mixture of experts, don't train the routers")
    precision: Fixed[Literal["float32", "bfloat16"] | None] = Field(None, description="null: policy.precision")
    max_grad_norm: MayChange[float] = Field(
        1.0, gt=0, allow_inf_nan=True, description="gradients are scaled down to this norm; .inf: never"
    )
    optimizer: OptimizerConfig = OptimizerConfig(kwargs=OptimizerKwargs(lr=1e-5))
    scheduler: MayChange[SchedulerConfigs] = Field([])
