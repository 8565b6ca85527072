"""The policy: a Hugging Face causal language model that computes the log-probability of each policy token.

Hidden states become log-probabilities one chunk of tokens at a time. Let x be the logits of one token, divided by the temperature, and K
the ids that top-k and then top-p keep:

    unfiltered = x[target] - log Σ exp x            logprobs = x[target] - log Σ_{K} exp x
    entropy    = -Σ_{K} p log p                     p = softmax of x over K

A chunk's logits exist only until these three numbers are computed. With gradients they are computed again in the backward pass
(`torch.utils.checkpoint`), so [N, vocabulary] never exists, forward or backward.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import MoeModelOutputWithPast

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace.config.policy import GenerationConfig
from headrace.config.root import TEACHER_KEY

from ..distributed.host_copies import saved_tensors
from . import adapter as adapters
from . import backbone
from .attention import prepare_attention
from .packing import PackedRows

# Keys of a model's configuration that programs are known to ignore or to read in different ways. Those of the first kind change every
# token. Those of the second don't change the second token of a text: it depends on the first one alone, whose attention has a single key.
EVERYWHERE = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "tie_word_embeddings",
    "attention_bias",
)
BETWEEN_TOKENS = ("attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier", "rope_parameters")
# the kind of model, for errors
CAUSAL = "a causal language model"


@dataclasses.dataclass(frozen=True)
class LogitsWarper:
    """The changes that sampling makes to logits: divide by `temperature`, leave out the token ids `excluded`, keep the `top_k` largest of
    the others (None: all), and of those the fewest whose probabilities sum to at least `top_p`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    excluded: tuple[int, ...] = ()

    @classmethod
    def of(cls, generation: GenerationConfig, excluded: tuple[int, ...] = ()) -> LogitsWarper:
        """Make the warper with which tokens are sampled for training. `excluded` are those of `ModelTokens`."""
        return cls(generation.temperature, generation.top_k, generation.top_p, excluded)

    @property
    def ranks(self) -> bool:
        """Whether it compares logits."""
        return self.top_k is not None or self.top_p < 1

    @property
    def filters(self) -> bool:
        return self.ranks or bool(self.excluded)

    @property
    def unfiltered(self) -> LogitsWarper:
        return LogitsWarper(self.temperature)


@dataclasses.dataclass(frozen=True)
class PolicyOutput:
    """The policy's output for the N policy tokens of a micro-batch, in its order, each [N] float32.

    `logprobs`: log-probabilities in the sampling distribution; -inf where the filter now excludes the token. (It was included when the
    token was sampled, under slightly different weights or rounding.) `unfiltered`: the same before top-k and top-p; None without a filter,
    when they equal `logprobs`. `entropy`: that of the distribution, in nats, without gradient; None unless requested.
    """

    logprobs: Tensor
    unfiltered: Tensor | None = None
    entropy: Tensor | None = None


class PolicyModel:
    """A model on this rank's device, sharded by FSDP2 where `torch.distributed` has more than one rank.

    `model` is the transformers model that it trains and saves. With several ranks every method is a collective, and each rank passes its
    own rows.
    """

    def __init__(
        self,
        config: Config,
        folder: Path | None = None,
        *,
        trainable: bool = True,
        other: tuple[str, str] | None = None,
    ) -> None:
        """Load the weights in `folder`, or those of `policy.model_name`, or an `other` model, given as configuration key and name. With
        `policy.lora_cfg`, a trainable model is that of `policy.model_name` with the adapter in `folder`.

        Raises `ServiceError` if they can't be loaded, or if the model can't process the rows that `policy` configures.
        """
        self.device = backbone.choose_device(config.trainer.device)
        has_adapter = trainable and config.policy.lora_cfg.enabled
        key, name = other or (
            "policy.model_name",
            str(folder) if folder and not has_adapter else config.policy.model_name,
        )
        self.model = backbone.load_model(
            AutoModelForCausalLM,
            config,
            key,
            name,
            CAUSAL,
            {} if other else config.policy.hf_config_overrides,
        )
        self.model.requires_grad_(trainable)
        if config.policy.freeze_moe_router:
            backbone.freeze_routers(self.model)
        if self.model.get_output_embeddings() is None or self.model.base_model is self.model:
            raise ServiceError(
                f"{key} {name!r}: {type(self.model).__name__} has no separate vocabulary projection; "
                "give a causal language model that has one"
            )
        self.adapter: adapters.Adapter | None = None
        if has_adapter:
            self.adapter = adapters.Adapter(self.model, config, folder and folder / adapters.FOLDER)
        self._adapter_alone = self.adapter if config.policy.lora_cfg.adapter_alone else None
        prepare_attention(self.model, config.policy)
        root = CausalRoot(self.model, config.policy.chunk_size(self.device.type))
        self.placed = backbone.PlacedModel(
            root, self.model, config, self.device, config.policy.precision, adapter=self.adapter
        )

    @property
    def vocab_size(self) -> int:
        """The number of rows of its embedding. Token ids are in [0, vocab_size)."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def window(self) -> int | None:
        """The number of tokens that its layers with a sliding window attend to; None if it has none."""
        window: int | None = getattr(self.model.config.get_text_config(), "sliding_window", None)
        return window

    @property
    def attention(self) -> str:
        """The implementation of its attention, by transformers' name."""
        return str(self.model.config.get_text_config()._attn_implementation)

    @property
    def suspects(self) -> list[str]:
        """What the model has, beside its weights, that another program may compute differently, by the token of a text whose
        log-probability is the first that it can change."""
        config = self.model.config.get_text_config()

        def found(keys: tuple[str, ...]) -> str:
            values = {key: getattr(config, key, None) for key in keys}
            return ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, False))

        by_token = {2: found(EVERYWHERE), 3: found(BETWEEN_TOKENS)}
        if self.window is not None:
            by_token[self.window + 2] = f"sliding_window {self.window}"
        return [f"from token {token} on {keys}" for token, keys in by_token.items() if keys]

    def forward(self, packed: PackedRows, warper: LogitsWarper, *, entropy: bool = False) -> PolicyOutput:
        """Compute the model's output for the N policy tokens of `packed` (on `device`) under `warper`.

        Only the positions before a policy token go through the vocabulary projection, `policy.logprob_chunk_size` of them at a time.
        """
        if self.adapter is not None:
            self.adapter.set_dropout(torch.is_grad_enabled())
        logprobs, unfiltered, *rest = self.placed(packed, warper, entropy)
        return PolicyOutput(logprobs, unfiltered if warper.filters else None, rest[0] if rest else None)

    def without_adapter(self) -> AbstractContextManager[None]:
        """In the context, the model computes without its adapter, if it has one: as the initial model."""
        return contextlib.nullcontext() if self.adapter is None else self.adapter.switched_off()

    def weights(
        self, gathered_in: torch.dtype = torch.float32, *, adapter_alone: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight that replicas hold once, unsharded, with its name in a Hugging Face checkpoint. A tied head is left out.

        By `policy.lora_cfg.refit`, the weights are merged with the adapter, or the adapter follows them, or (`adapter_alone`) it comes
        alone. The weights are float32. But without an adapter, sharded weights are gathered in the dtype `gathered_in`, which takes fewer
        bytes.
        """
        alone = self._adapter_alone
        if alone is None or not adapter_alone:
            whole = backbone.full_parameters(self.model, self.adapter, gathered_in, merged=alone is None)
            for name, tensor in whole:
                yield from self._as_saved(name, tensor)
        if alone is not None:
            yield from alone.scale()

    def weight_shapes(self, *, adapter_alone: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and full shapes in the order of `weights`. Gathers nothing."""
        if self._adapter_alone is None or not adapter_alone:
            for name, own in saved_tensors(self.model) if self.adapter is None else self.adapter.parameters():
                for saved, tensor in self._as_saved(name, torch.empty(own.shape, device="meta")):
                    yield saved, tuple(tensor.shape)
        if self._adapter_alone is not None:
            yield from self._adapter_alone.shapes()

    def _as_saved(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a parameter with its name in a checkpoint. Where several saved tensors are fused into one, yield each of those."""
        if not self.model._weight_conversions:
            yield name, tensor
            return
        yield from revert_weight_conversion(self.model, {name: tensor}).items()

    def snapshot(self) -> backbone.Write:
        """Copy the weights to rank 0's host memory. The result writes the copy, merged with the adapter, in the format of
        `from_pretrained`; and the adapter into a folder beside it."""
        write_model = backbone.snapshot_model(self.model, self.adapter)
        write_adapter = None if self.adapter is None else self.adapter.snapshot()

        def write(folder: Path) -> None:
            write_model(folder)
            if write_adapter is not None:
                write_adapter(folder / adapters.FOLDER)

        return write


class CausalRoot(nn.Module):
    """A causal language model that returns log-probabilities and entropies of policy tokens instead of logits."""

    def __init__(self, model: Any, chunk_size: int | None) -> None:
        super().__init__()
        self.model = model
        self._chunk_size = chunk_size

    def forward(self, packed: PackedRows, warper: LogitsWarper, entropy: bool) -> tuple[Tensor, ...]:
        """Return `logprobs`, `unfiltered` and, if requested, `entropy`, each [N]. It is a plain tuple, because FSDP2 looks for outputs in
        one."""
        hidden = backbone.hidden_states_before(self.model.base_model, packed)
        tail = _logits_head(self.model)
        size = self._chunk_size or max(len(hidden), 1)
        parts = []
        for states, targets in zip(hidden.split(size), packed.targets.split(size), strict=True):
            if self._chunk_size and torch.is_grad_enabled():
                part = checkpoint(
                    _token_values, tail, states, targets, warper, entropy, use_reentrant=False, preserve_rng_state=False
                )
            else:
                part = _token_values(tail, states, targets, warper, entropy)
            parts.append(part)
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))


@dataclasses.dataclass
class _Output(MoeModelOutputWithPast):
    """A backbone's output with all the fields that the heads of any architecture read."""

    cross_attentions: None = None


class _IdentityBackbone(nn.Module):
    """A stand-in for the backbone that returns its input. Some architectures pass arguments by position (GPT-2)."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _logits_head(model: Any) -> Any:
    """Return a copy of `model` that turns hidden states into logits and shares its head. Soft caps and scales differ by architecture, so
    its own class computes them."""
    tail = copy.copy(model)
    tail._modules = {**model._modules, model.base_model_prefix: _IdentityBackbone()}
    return tail


def _token_values(
    tail: Any, hidden: Tensor, targets: Tensor, warper: LogitsWarper, entropy: bool
) -> tuple[Tensor, ...]:
    logits = tail(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
    if warper.temperature != 1:
        logits = logits / warper.temperature
    logp = logits.log_softmax(-1)
    unfiltered = _pick(logp, targets)
    logprobs = unfiltered
    if warper.filters:
        logp = logits.masked_fill(~mask_kept(logits.detach(), warper), -torch.inf).log_softmax(-1)
        logprobs = _pick(logp, targets)
    return (logprobs, unfiltered, compute_entropy(logp.detach())) if entropy else (logprobs, unfiltered)


def _pick(logp: Tensor, targets: Tensor) -> Tensor:
    return -nn.functional.nll_loss(logp, targets, reduction="none")


def compute_entropy(logp: Tensor) -> Tensor:
    """Return the entropies [N], in nats, of distributions over V ids, from their log-probabilities [N, V], which may contain -inf.

    They are computed a few rows at a time. On a CPU intermediate results then stay in the cache, which saves a third of the time. On a GPU
    it takes a sixteenth of the memory with few kernel launches.
    """
    count, vocabulary = logp.shape
    rows = max(1, -(-count // 16) if logp.is_cuda else 2**16 // vocabulary)
    lowest = torch.finfo(logp.dtype).min  # 0 log 0 is 0
    return -torch.cat([part.exp().mul_(part.clamp(min=lowest)).sum(-1) for part in logp.split(rows)])


def mask_kept(logits: Tensor, warper: LogitsWarper) -> Tensor:
    """Return a mask [N, V] bool of the `logits` [N, V], already divided by the temperature, that may be sampled, by vLLM's rules.

    All logits that tie with the k-th largest are kept. top-p excludes the least probable ones as long as their sum is at most 1 - p. The
    most probable one always stays.
    """
    if warper.excluded:
        excluded = torch.tensor(warper.excluded, device=logits.device)
        logits = logits.index_fill(-1, excluded, -torch.inf)
        if not warper.ranks:
            return logits > -torch.inf
    ascending, ids = logits.sort(dim=-1)
    if warper.top_k is not None and warper.top_k < logits.shape[-1]:
        ascending = ascending.masked_fill(ascending < ascending[:, -warper.top_k, None], -torch.inf)
    out = ascending == -torch.inf
    if warper.top_p < 1:
        out = out | (ascending.softmax(-1).cumsum(-1) <= 1 - torch.tensor(warper.top_p, dtype=logits.dtype))
        out[:, -1] = False
    return torch.empty_like(out).scatter_(-1, ids, ~out)


# -- what the engine can be given

# What vLLM's reload of weights leaves out, by the end of the tensor's name in the model, and in words.
NOT_REFITTED = {
    "lm_head.bias": "a bias of its head",
    ".sinks": "attention sinks",
    ".e_score_correction_bias": "biases of routers",
}
# What it does reload after all, by family and end: vLLM's own class for GPT-J has the bias from the start. For phi it uses transformers'
# class, of which each load makes a new one, and a reload loses it.
REFITTED = {("gptj", "lm_head.bias")}
# Families whose class in vLLM takes no refit that would be verified, with the reason.
NOT_REFITTED_FAMILIES = {
    "phimoe": "vLLM's class for phimoe has a bias of the head (lm_head.bias), which it leaves out of its logits, and takes no weights "
    "without one"
}


def refit_problem(names: Iterable[str], family: str) -> str | None:
    """Return why the engine can't be given a model of this `family` (transformers' `model_type`) with tensors of these `names`, with the
    remedy; None if no reason is known."""
    if family in NOT_REFITTED_FAMILIES:
        return f"{NOT_REFITTED_FAMILIES[family]}; use a model of another family"
    for name in names:
        for end, what in NOT_REFITTED.items():
            if name.endswith(end) and (family, end) not in REFITTED:
                return f"it has {what} ({name}), which vLLM doesn't reload, so no replica could get its weights; use a model without"
    return None


def check_refit(config: Config) -> None:
    """Raise `ServiceError` if the engine can't be given the weights of `policy.model_name`. Its config.json says so; no weights are
    read."""
    name = config.policy.model_name
    model = backbone.load_on_meta(
        AutoModelForCausalLM, "policy.model_name", name, CAUSAL, config.policy.hf_config_overrides
    )
    if problem := refit_problem((tensor for tensor, _ in saved_tensors(model)), model.config.model_type):
        raise ServiceError(f"policy.model_name {name!r}: {problem}")
    _check_scale(model, name, config.policy.max_total_sequence_length)
    check_head(model, "policy.model_name", name)


def _check_scale(model: Any, name: str, longest: int) -> None:
    """Raise `ServiceError` if trajectories may be longer than the model's original length, and it scales the queries beyond that (Ministral
    3): vLLM's class doesn't read this key. The probe is shorter than that."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    # the query of the last token predicts none
    if rope.get("llama_4_scaling_beta") and original is not None and longest - 1 > original:
        raise ServiceError(
            f"policy.model_name {name!r}: it scales its queries beyond {original} tokens (rope_parameters.llama_4_scaling_beta), and vLLM "
            f"doesn't; set policy.max_total_sequence_length (now {longest}) to at most {original}"
        )


def check_head(model: Any, key: str, name: str) -> None:
    """Raise `ServiceError` if the head of the model, on the meta device, can't be computed apart from its layers (OPT reaches past its
    backbone)."""
    if model.get_output_embeddings() is None or model.base_model is model:
        return  # `PolicyModel` says so
    width = model.get_output_embeddings().weight.shape[1]
    try:
        _logits_head(model)(inputs_embeds=torch.zeros(1, 1, width, device="meta"), use_cache=False)
    except AttributeError as error:
        raise ServiceError(
            f"{key} {name!r}: the head of {type(model).__name__} can't be computed apart from its layers ({error}); use a model of another "
            "family"
        ) from error


# -- tokenizers and the teacher of on-policy distillation


def load_tokenizer(config: Config) -> Any:
    """Load the run's tokenizer, with the run's chat template. Raises `ServiceError` if it can't be loaded."""
    tokenizer = load_named_tokenizer(*config.tokenizer)
    if config.policy.tokenizer.chat_template is not None:
        tokenizer.chat_template = config.policy.tokenizer.chat_template
    return tokenizer


def load_named_tokenizer(key: str, name: str) -> Any:
    """Load the tokenizer of model or directory `name`, which `key` gave. Raises `ServiceError` if it can't be loaded."""
    try:
        # by the files that vLLM's renderer reads too, also where Mistral's own stand beside them: their tokenizer has no chat template
        return AutoTokenizer.from_pretrained(name, mistral_format=False)
    except Exception as error:  # tokenizers raises a plain `Exception`
        raise backbone.cannot_load(key, name, "a tokenizer", error) from error


def load_teacher(config: Config, vocabulary: int, tokenizer: Any) -> PolicyModel:
    """Load the run's teacher, for a policy of `vocabulary` token ids and this `tokenizer`. It is sharded as the policy is.

    Raises `ServiceError` if it can't be loaded, or if its token ids differ in meaning from the policy's. Its embedding may be longer than
    the policy's: models of one family are often padded differently.
    """
    name = config.models[TEACHER_KEY]
    teacher = PolicyModel(config, trainable=False, other=(TEACHER_KEY, name))
    policy = config.policy.tokenizer.name or config.policy.model_name
    check_vocabulary(config, TEACHER_KEY, teacher.vocab_size, vocabulary)
    if difference := _difference(load_named_tokenizer(TEACHER_KEY, name).get_vocab(), tokenizer.get_vocab()):
        raise ServiceError(
            f"the tokenizers of {TEACHER_KEY} {name!r} and of the policy, {policy!r}, differ: {difference}; "
            "choose a teacher of the policy's family"
        )
    return teacher


def check_vocabulary(config: Config, key: str, theirs: int, ours: int) -> None:
    """Raise `ServiceError` if the model of `key`, with `theirs` token ids, can't read all that the policy may write, with `ours`."""
    if theirs < ours:
        raise ServiceError(
            f"{key} {config.models[key]!r} has a vocabulary of {theirs}, and the policy {config.policy.model_name!r} one of {ours}, so it "
            "can't read all that the policy may write; choose a model of the policy's family"
        )


def _difference(theirs: dict[str, int], ours: dict[str, int]) -> str | None:
    """Describe the first token that has different ids in the two vocabularies; None if they agree."""
    token = min(
        (token for token in {**theirs, **ours} if theirs.get(token) != ours.get(token)),
        key=lambda token: (ours.get(token, len(ours)), theirs.get(token, len(theirs))),
        default=None,
    )
    if token is None:
        return None
    return f"{token!r} is {theirs.get(token, 'no token')} there and {ours.get(token, 'no token')} here"
