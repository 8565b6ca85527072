"""Attention over rows of several trajectories, for transformers models; and which models can't do it.

Rows with one trajectory each are causal and need nothing. On a CPU, other rows go through `tree_attention`, which computes each prompt and
each completion separately and nothing that is masked (with a prompt of S tokens and completions of T_i, a mask over the row costs
(S + ΣT_i)² per head; the pieces cost S²/2 and T_i·(S + T_i) each). On a GPU, the `position_ids` of packed rows show where a trajectory
begins, and transformers makes the block-diagonal mask from that. A prompt with several completions needs its own mask: a block mask for
flex attention, which skips what is masked, or [R, 1, W, W] for SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from headrace.config.policy import PolicyConfig
from headrace.errors import ServiceError
from headrace_services.trainer.network.packing import PackedRows, TreeSpan

# the name of `tree_attention` in transformers
TREE_ATTENTION = "headrace_trees"

# the kinds of layers for which a mask over the row, or `position_ids`, is enough
_PACKED = {"full_attention", "sliding_attention"}
_SHARED = {"full_attention"}


def prepare_attention(model: Any, policy: PolicyConfig, device: torch.device) -> None:
    """Choose the attention for rows of several trajectories: `tree_attention` on a CPU, flex attention on a GPU if the model has it.

    Raises `ServiceError` for a model that would let the trajectories of a row see each other.
    """
    key = "policy.share_prompts" if policy.share_prompts else "policy.sequence_packing.enabled"
    if not (policy.share_prompts or policy.sequence_packing.enabled):
        return
    problem = _problem(model, _SHARED if policy.share_prompts else _PACKED)
    if problem:
        raise ServiceError(
            f"{key} true: {type(model).__name__} {problem}, so that several sequences in one row would see each other; "
            "set it to false (policy.dynamic_batching saves padding without it)"
        )
    if device.type == "cpu":
        AttentionInterface.register(TREE_ATTENTION, tree_attention)
        model.set_attn_implementation(TREE_ATTENTION)
    elif model._supports_flex_attn:
        model.set_attn_implementation("flex_attention")


def _problem(model: Any, allowed: set[str]) -> str | None:
    config = model.config.get_text_config()
    if model._is_stateful:
        return "carries a state from token to token"
    if not model._supports_attention_backend:
        return "has an attention implementation of its own that takes no mask"
    if config._attn_implementation not in ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"):
        return f"runs {config._attn_implementation} attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds - allowed:
        return f"has layers of {', '.join(sorted(kinds - allowed))}"
    return None


def attention_arguments(backbone: nn.Module, rows: PackedRows) -> dict[str, Any]:
    """The arguments of the backbone's forward besides `input_ids`, on the device of the rows."""
    attention: str = backbone.config.get_text_config()._attn_implementation  # type: ignore[union-attr, operator]
    if attention == TREE_ATTENTION:
        return {"position_ids": rows.position_ids, "trees": rows.spans}
    if not (rows.packed or rows.shared):
        return {}
    if not rows.shared:
        return {"position_ids": rows.position_ids}
    mask = block_mask(rows) if attention == "flex_attention" else rows.visible()
    return {"position_ids": rows.position_ids, "attention_mask": mask}


def block_mask(rows: PackedRows) -> BlockMask:
    """`rows.visible()` for flex attention."""
    tree, branch = rows.tree, rows.branch

    def visible(row: Tensor, head: Tensor, place: Tensor, other: Tensor) -> Tensor:
        own = (branch[row, other] == 0) | (branch[row, other] == branch[row, place])
        return (place >= other) & (tree[row, place] == tree[row, other]) & own

    count, width = rows.input_ids.shape
    return create_block_mask(visible, count, None, width, width, device=str(rows.input_ids.device))


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
    """Attention over rows of trees, with the signature that transformers models call (`AttentionInterface`).

    `query` [R, H, W, D], `key` and `value` [R, H / groups, W, D]; returns [R, W, H, D], 0 on padding. `trees` are those of each row.
    They come through the model's keyword arguments, so a model that does not pass them on raises an error rather than attending across
    trajectories. Raises `ServiceError` for a case that it can't compute.
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
    """The pieces of a tree, in order: queries [start, end), the keys and values that they see, and a mask where causality is not enough."""
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
    """The mask [queries, keys] bool with which the last `queries` of `keys` positions see themselves and those before, at most `window`
    in all. None means causal."""
    if queries == keys and (window is None or keys <= window):
        return None
    place = torch.arange(keys, device=like.device)
    distance = place[keys - queries :, None] - place[None, :]
    return (distance >= 0) & (distance < (keys if window is None else window))
