"""Who sees whom in a row, as transformers models take it, and which models can't take it.

Rows of one sequence each are causal and need nothing. On a CPU rows of several go through an attention of ours, tree by tree. On a GPU
packed rows say by `position_ids` where a sequence begins, and transformers makes the block-diagonal mask from that; a prompt with
several completions needs a mask of its own: a block mask for flex attention, which skips what is masked, or [R, 1, W, W] for SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from headrace.config.policy import Policy as PolicySection
from headrace.errors import ServiceError
from services.trainer.network.rows import tree_attention
from services.trainer.network.rows.build import Rows

# what an index in a row means to a layer: only these layers are masked by position alone
_PACKED = {"full_attention", "sliding_attention"}
_SHARED = {"full_attention"}


def prepare_attention(model: Any, policy: PolicySection, device: torch.device) -> None:
    """Choose an attention for rows of several sequences: on a CPU ours, on a GPU flex attention, where the model has it.

    Raises `ServiceError` for a model that would let the sequences of a row see each other.
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
        tree_attention.register()
        model.set_attn_implementation(tree_attention.NAME)
    elif model._supports_flex_attn:
        model.set_attn_implementation("flex_attention")


def _problem(model: Any, allowed: set[str]) -> str | None:
    config = model.config.get_text_config()
    if model._is_stateful:
        return "carries a state from token to token"
    if not model._supports_attention_backend:
        return "has an attention of its own that takes no mask of ours"
    if config._attn_implementation not in ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"):
        return f"runs {config._attn_implementation} attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds - allowed:
        return f"has layers of {', '.join(sorted(kinds - allowed))}"
    return None


def attention_arguments(backbone: nn.Module, rows: Rows) -> dict[str, Any]:
    """What the backbone's forward gets besides `input_ids`, on the device of the rows."""
    attention: str = backbone.config.get_text_config()._attn_implementation  # type: ignore[union-attr, operator]
    if attention == tree_attention.NAME:
        return {"position_ids": rows.position_ids, "trees": rows.spans}
    if not (rows.packed or rows.shared):
        return {}
    if not rows.shared:
        return {"position_ids": rows.position_ids}
    mask = block_mask(rows) if attention == "flex_attention" else rows.visible()
    return {"position_ids": rows.position_ids, "attention_mask": mask}


def block_mask(rows: Rows) -> BlockMask:
    """`rows.visible()` for flex attention."""
    tree, branch = rows.tree, rows.branch

    def visible(row: Tensor, head: Tensor, place: Tensor, other: Tensor) -> Tensor:
        own = (branch[row, other] == 0) | (branch[row, other] == branch[row, place])
        return (place >= other) & (tree[row, place] == tree[row, other]) & own

    count, width = rows.input_ids.shape
    return create_block_mask(visible, count, None, width, width, device=str(rows.input_ids.device))
