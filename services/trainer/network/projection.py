"""From hidden states to log-probabilities: the vocabulary projection, a chunk of tokens at a time, and what sampling does to it.

With x the logits of one token, over the temperature, and K the set of ids that top-k and then top-p leave of them:

    unfiltered = x[target] - log Σ exp x            curr = x[target] - log Σ_{K} exp x
    entropy    = -Σ_{K} p log p                     p = softmax of x over K

A chunk's logits live from their projection to these three numbers. With gradients they are computed a second time in the
backward pass (`torch.utils.checkpoint`), so that [N, vocabulary] never exists, forward or backward.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from headrace.config.policy import Generation
from services.trainer.network.backbone import hidden_before
from services.trainer.network.rows.build import Rows


@dataclasses.dataclass(frozen=True)
class Warp:
    """What sampling does to logits, in this order: division by `temperature`, the `top_k` largest (None: all), and of those
    the fewest whose probability is at least `top_p`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, generation: Generation) -> Warp:
        """As tokens are sampled for training."""
        return cls(generation.temperature, generation.top_k, generation.top_p)

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p < 1

    @property
    def unfiltered(self) -> Warp:
        return Warp(self.temperature)


@dataclasses.dataclass(frozen=True)
class TokenValues:
    """Of N policy tokens in the order of the micro-batch, each [N] float32.

    `curr`: log-probability in the distribution that is sampled from; -inf where the filter leaves the token out (it was in when it
    was sampled, under weights or rounding a little different). `unfiltered`: the same before top-k and top-p; None where
    nothing is filtered and it is `curr`. `entropy` of the distribution, in nats, without gradient; None unless asked for.
    """

    curr: Tensor
    unfiltered: Tensor | None = None
    entropy: Tensor | None = None


class CausalRoot(nn.Module):
    """A causal language model that gives what is known of each policy token instead of logits."""

    def __init__(self, model: Any, chunk_size: int | None) -> None:
        super().__init__()
        self.model = model
        self._chunk_size = chunk_size

    def forward(self, rows: Rows, warp: Warp, entropy: bool) -> tuple[Tensor, ...]:
        """`curr`, `unfiltered` and, where asked for, `entropy`, each [N]; a plain tuple, in which FSDP2 finds its outputs."""
        hidden = hidden_before(self.model.base_model, rows)
        tail = _tail(self.model)
        size = self._chunk_size or max(len(hidden), 1)
        parts = []
        for states, targets in zip(hidden.split(size), rows.targets.split(size), strict=True):
            if self._chunk_size and torch.is_grad_enabled():
                part = checkpoint(
                    _token_values, tail, states, targets, warp, entropy, use_reentrant=False, preserve_rng_state=False
                )
            else:
                part = _token_values(tail, states, targets, warp, entropy)
            parts.append(part)
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))


class _Given(nn.Module):
    """Stands where the backbone is and gives back what it gets."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _tail(model: Any) -> Any:
    """What `model`'s own class does with hidden states, sharing its head: soft caps and scales differ between architectures."""
    tail = copy.copy(model)
    tail._modules = {**model._modules, model.base_model_prefix: _Given()}
    return tail


def _token_values(tail: Any, hidden: Tensor, targets: Tensor, warp: Warp, entropy: bool) -> tuple[Tensor, ...]:
    logits = tail(inputs_embeds=hidden[None], use_cache=False).logits[0].float()
    if warp.temperature != 1:
        logits = logits / warp.temperature
    logp = logits.log_softmax(-1)
    unfiltered = _pick(logp, targets)
    curr = unfiltered
    if warp.filters:
        logp = logits.masked_fill(~kept(logits.detach(), warp), -torch.inf).log_softmax(-1)
        curr = _pick(logp, targets)
    return (curr, unfiltered, entropy_of(logp.detach())) if entropy else (curr, unfiltered)


def _pick(logp: Tensor, targets: Tensor) -> Tensor:
    return -nn.functional.nll_loss(logp, targets, reduction="none")


def entropy_of(logp: Tensor) -> Tensor:
    """[N], in nats, of distributions over V ids from their log-probabilities [N, V], -inf among them.

    A few rows at a time: on a CPU what is made of them stays in its cache, which costs a third less; on a GPU it takes a sixteenth of the
    memory, and few enough kernels are started.
    """
    count, vocabulary = logp.shape
    rows = max(1, -(-count // 16) if logp.is_cuda else 2**16 // vocabulary)
    lowest = torch.finfo(logp.dtype).min  # 0 log 0 is 0
    return -torch.cat([part.exp().mul_(part.clamp(min=lowest)).sum(-1) for part in logp.split(rows)])


def kept(logits: Tensor, warp: Warp) -> Tensor:
    """Which of `logits` [N, V], already over the temperature, may be sampled: bool [N, V], by vLLM's rules.

    All that tie with the k-th largest are kept. top-p leaves out, from the least probable on, as long as what is left out sums to
    at most 1 - p; the most probable one always stays.
    """
    ascending, ids = logits.sort(dim=-1)
    if warp.top_k is not None and warp.top_k < logits.shape[-1]:
        ascending = ascending.masked_fill(ascending < ascending[:, -warp.top_k, None], -torch.inf)
    out = ascending == -torch.inf
    if warp.top_p < 1:
        out = out | (ascending.softmax(-1).cumsum(-1) <= 1 - torch.tensor(warp.top_p, dtype=logits.dtype))
        out[:, -1] = False
    return torch.empty_like(out).scatter_(-1, ids, ~out)
