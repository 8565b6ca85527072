"""Attention over rows of several paths, for transformers models; and which models can't do it.

Rows with one path each are causal and need nothing special. Other rows go through `tree_attention`. It computes nothing that is masked, and
makes no mask over a row. With a prompt of S tokens and completions of T_i, such a mask would cost (S + ΣT_i)² per head; here the prompt
costs S²/2 and each completion T_i·(S + T_i). In half precision on a GPU it is one call of flash attention for sequences of different
lengths, each with the keys that it sees. Otherwise it is one call of SDPA for each sequence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from headrace.base.errors import ServiceError
from headrace.config.policy import PolicyConfig

from ..distributed.host_copies import on_device
from .packing import PackedRows, TreeSpan

# The name of `tree_attention` in transformers.
TREE_ATTENTION = "headrace_trees"
# The number of queries in one masked call of SDPA.
QUERIES = 1024
# The largest head that flash attention computes. Its size must be a multiple of 8.
FLASH_HEAD = 256

Spans = tuple[tuple[TreeSpan, ...], ...]  # the trees of each row

# The kinds of layers that `tree_attention` computes, and those for which it computes shared prompts.
_PACKED = {"full_attention", "sliding_attention"}
_SHARED = {"full_attention"}


def prepare_attention(model: Any, policy: PolicyConfig) -> None:
    """Set `tree_attention` for rows of several paths.

    Raises `ServiceError` for a model that would let the paths of a row see each other.
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
    AttentionInterface.register(TREE_ATTENTION, tree_attention)
    model.set_attn_implementation(TREE_ATTENTION)


def caps_attention(config: Any) -> bool:
    """Whether the model caps the logits of its attention softly (Gemma 2)."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def _problem(model: Any, allowed: set[str]) -> str | None:
    config = model.config.get_text_config()
    if model._is_stateful:
        return "carries a state from token to token"
    if not model._supports_attention_backend:
        return "has its own attention implementation, which takes no mask"
    if caps_attention(config):
        return "caps the logits of its attention, which needs eager attention"
    if config._attn_implementation not in ("sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"):
        return f"runs {config._attn_implementation} attention"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if kinds - allowed:
        return f"has layers of {', '.join(sorted(kinds - allowed))}"
    return None


def attention_arguments(backbone: nn.Module, rows: PackedRows) -> dict[str, Any]:
    """Return the arguments of the backbone's forward besides `input_ids`, on the device of the rows."""
    attention: str = backbone.config.get_text_config()._attn_implementation  # type: ignore[union-attr, operator]
    if attention != TREE_ATTENTION:
        return {}
    device = rows.input_ids.device
    sequences = Sequences.of(rows.spans, rows.input_ids.shape[1]).to(device) if device.type == "cuda" else None
    return {"position_ids": rows.position_ids, "trees": Trees(rows.spans, sequences)}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens of a row, from `start`, that see each other causally. All of them also see the whole earlier piece `context`, if any."""

    start: int
    length: int
    context: int | None


def pieces(spans: tuple[TreeSpan, ...]) -> list[Piece]:
    """Return the pieces of a row, in order. A tree with one completion is one piece; others are their prompt and each of their
    completions."""
    found: list[Piece] = []
    for span in spans:
        if len(span.completions) == 1:
            found.append(Piece(span.start, span.prompt + span.completions[0], None))
            continue
        prompt, at = len(found), span.start + span.prompt
        found.append(Piece(span.start, span.prompt, None))
        for length in span.completions:
            found.append(Piece(at, length, prompt))
            at += length
    return found


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The pieces of all rows in the form that flash attention takes: each piece's queries, in the order of the flattened rows, and its
    keys, which end with the piece itself. A row's padding is a piece too, because what is not computed would be undefined.

    `queries` and `keys` [pieces + 1] int32 are where those of each piece begin, and where the last one's end. `longest_queries` and
    `longest_keys` are the most that a piece has. `places` [keys] int64 are the keys' places in the flattened rows; None if they are the
    queries'.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int
    places: Tensor | None

    @classmethod
    def of(cls, trees: Spans, width: int) -> Sequences:
        """Make the sequences of rows of this width with these trees, on the CPU."""
        places, lengths = [], []
        for r, spans in enumerate(trees):
            row = pieces(spans)
            end = row[-1].start + row[-1].length
            if end < width:
                row.append(Piece(end, width - end, None))
            for piece in row:
                first = row[piece.context] if piece.context is not None else Piece(piece.start, 0, None)
                places += [
                    r * width + np.arange(first.start, first.start + first.length),
                    r * width + np.arange(piece.start, piece.start + piece.length),
                ]
                lengths.append((piece.length, first.length + piece.length))
        queries, keys = np.array(lengths).T
        shared = (queries != keys).any()
        return cls(
            queries=_edges(queries),
            keys=_edges(keys),
            longest_queries=int(queries.max()),
            longest_keys=int(keys.max()),
            places=torch.from_numpy(np.concatenate(places)) if shared else None,
        )

    def to(self, device: torch.device) -> Sequences:
        places = None if self.places is None else on_device(self.places, device)
        queries, keys = on_device(self.queries, device), on_device(self.keys, device)
        return dataclasses.replace(self, queries=queries, keys=keys, places=places)


@dataclasses.dataclass
class Trees:
    """The layout of a micro-batch for attention: the trees of each row, and for a GPU their sequences.

    It is not frozen: torch.compile would compare the content of a tuple or a frozen dataclass, and compile a layer for each layout.
    """

    spans: Spans
    sequences: Sequences | None = None


def _edges(lengths: np.ndarray[Any, np.dtype[Any]]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


@torch.compiler.disable  # it would be compiled again for each layout
def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trees: Trees | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention over rows of trees, with the signature that transformers models call (`AttentionInterface`).

    `query` is [R, H, W, D], `key` and `value` are [R, H / groups, W, D]. Returns [R, W, H, D], with any finite values on padding. `trees`
    come through the model's keyword arguments, so a model that does not pass them on raises an error rather than attending across paths.
    Raises `ServiceError` for a case that it can't compute.
    """
    if trees is None or softcap is not None or s_aux is not None or dropout:
        raise ServiceError(
            f"{type(module).__name__}: its attention can't be computed tree by tree; set policy.share_prompts and "
            "policy.sequence_packing.enabled to false"
        )
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    head = key.shape[3]
    flash = dtype.itemsize == 2 and head == value.shape[3] <= FLASH_HEAD and head % 8 == 0
    if trees.sequences is not None and flash:
        return by_flash(query, key, value, trees.sequences, dtype, scaling, sliding_window), None
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return by_pieces(query, key, value, trees.spans, scaling, sliding_window), None


def by_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    dtype: torch.dtype,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute the attention of all rows in one call of flash attention, in `dtype`."""
    rows, heads, width, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if sequences.places is not None:
        # in float32, so that the gradients of a prompt's keys are summed over its completions in float32
        key, value = (x.float().index_select(0, sequences.places) for x in (key, value))
    out = varlen_attn(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        sequences.queries,
        sequences.keys,
        sequences.longest_queries,
        sequences.longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=heads != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.unflatten(0, (rows, width))


def by_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trees: Spans,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Compute the attention of all rows, piece by piece; 0 on padding. `query`, `key` and `value` have equally many heads."""
    rows = []
    for r, spans in enumerate(trees):
        row = pieces(spans)
        lengths = [piece.length for piece in row]
        rest = query.shape[2] - sum(lengths)
        # the gradient of a split is one tensor; the gradient of each slice would be as large as the row
        q, k, v = (x[r, None].split([*lengths, rest], dim=2) for x in (query, key, value))
        parts = [
            _causal(q[i], k[i], v[i], scaling, window)
            if piece.context is None
            else _causal(
                q[i],
                torch.cat([k[piece.context], k[i]], dim=2),
                torch.cat([v[piece.context], v[i]], dim=2),
                scaling,
                window,
            )
            for i, piece in enumerate(row)
        ]
        parts.append(query.new_zeros(1, query.shape[1], rest, value.shape[3]))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows).transpose(1, 2).contiguous()


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Compute causal attention. The queries belong to the last keys. Each sees its own key and earlier ones, at most `window` in all."""
    count, keys = query.shape[2], key.shape[2]
    if count == keys and (window is None or keys <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    parts = []
    for first in range(0, count, QUERIES):
        last = min(first + QUERIES, count)
        end = keys - count + last
        begin = 0 if window is None else max(0, keys - count + first - window + 1)
        mask = _mask(last - first, end - begin, window, key.device)
        seen = slice(begin, end)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, seen], value[:, :, seen], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(parts, dim=2)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [queries, keys] bool with which the last `queries` of `keys` positions see themselves and earlier ones, at most
    `window` in all."""
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place[None, :]
    return (distance >= 0) & (distance < (keys if window is None else window))
