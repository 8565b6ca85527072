"""Attention over rows of trees on a CPU: each prompt and each completion by itself, and nothing computed that is masked.

With a prompt of S tokens and completions of T_i, a mask over the row costs (S + ΣT_i)² a head; the pieces cost S²/2 and T_i·(S + T_i) each.
It is an attention function as transformers' models call them (`AttentionInterface`); the trees reach it through the model's
keyword arguments, so that a model that does not pass them on is an error, never a row in which all see all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from headrace.errors import ServiceError
from services.trainer.network.rows.build import TreeSpan

NAME = "headrace_trees"


def register() -> None:
    """Make it known to transformers under `NAME`."""
    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trees: tuple[tuple[TreeSpan, ...], ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`query` [R, H, W, D], `key` and `value` [R, H / groups, W, D]; gives [R, W, H, D], 0 on padding.

    `trees` are those of each row. Raises `ServiceError` for what it can't compute.
    """
    if trees is None or softcap is not None or s_aux is not None or dropout:
        raise ServiceError(
            f"{type(module).__name__}: its attention can't be computed tree by tree; set policy.share_prompts and "
            "policy.sequence_packing.enabled to false"
        )
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    rows = []
    for r, spans in enumerate(trees):
        parts = [
            scaled_dot_product_attention(
                query[r, None, :, start:end], k, v, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
            for span in spans
            for start, end, k, v, mask in _pieces(span, key[r, None], value[r, None], sliding_window)
        ]
        rest = query.shape[2] - sum(part.shape[2] for part in parts)
        parts.append(query.new_zeros(1, query.shape[1], rest, value.shape[3]))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def _pieces(
    span: TreeSpan, key: Tensor, value: Tensor, window: int | None
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor | None]]:
    """Queries [start, end) of a tree, in order, with the keys and values that they see, and the mask where causality is not all."""
    start, prompt = span.start, span.start + span.prompt
    if len(span.completions) == 1:
        end = prompt + span.completions[0]
        yield start, end, key[:, :, start:end], value[:, :, start:end], _mask(end - start, end - start, window, key)
        return
    yield (
        start,
        prompt,
        key[:, :, start:prompt],
        value[:, :, start:prompt],
        _mask(span.prompt, span.prompt, window, key),
    )
    at = prompt
    for length in span.completions:
        end = at + length
        k, v = (torch.cat([x[:, :, start:prompt], x[:, :, at:end]], dim=2) for x in (key, value))
        yield at, end, k, v, _mask(length, span.prompt + length, window, key)
        at = end


def _mask(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor | None:
    """[queries, keys] bool: the last `queries` of `keys` places see themselves and what is before, `window` in all; None: causal."""
    if queries == keys and (window is None or keys <= window):
        return None
    place = torch.arange(keys, device=like.device)
    distance = place[keys - queries :, None] - place[None, :]
    return (distance >= 0) & (distance < (keys if window is None else window))
