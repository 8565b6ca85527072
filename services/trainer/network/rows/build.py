"""Rows as tensors: what goes through the model, who sees whom, and where the values of the policy's tokens are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.network.rows.layout import Layout, MicroBatch, Row, TokenSequence, tree_length

PADDING = -1


@dataclasses.dataclass(frozen=True)
class TreeSpan:
    """A tree in its row: it begins at `start`, with `prompt` tokens; its completions, of so many tokens each, follow."""

    start: int
    prompt: int
    completions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """R rows of width W, and the N policy tokens in them; all int64.

    `input_ids` [R, W], padded on the right. `position_ids` [R, W]: a token's place in its own sequence, 0 for the first of the
    prompt. `tree` [R, W]: which tree of its row a token belongs to (0, 1, …; -1 on padding), `branch` [R, W] 0 in a prompt and
    1, 2, … in its completions. Flat over policy tokens, [N]: `before`, where in the flattened [R·W] the token lies that precedes
    it in its sequence (what is read there predicts it); `targets`, its id; `sequence`, the place of its sequence in
    `MicroBatch.order`, ascending.

    `spans` say the same of the trees of each row as `tree` and `branch`.
    """

    input_ids: Tensor
    position_ids: Tensor
    tree: Tensor
    branch: Tensor
    before: Tensor
    targets: Tensor
    sequence: Tensor
    spans: tuple[tuple[TreeSpan, ...], ...]

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one tree."""
        return any(len(row) > 1 for row in self.spans)

    @property
    def shared(self) -> bool:
        """Whether a tree has more than one completion."""
        return any(len(tree.completions) > 1 for row in self.spans for tree in row)

    def to(self, device: torch.device) -> Rows:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in tensors.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved)

    def visible(self) -> Tensor:
        """[R, 1, W, W] bool: whether the token at the third index sees the one at the fourth.

        A token sees what is not after it in its own tree's prompt and in its own completion. Padding sees padding, so that no
        token sees nothing.
        """
        place = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        causal = place[:, None] >= place[None, :]
        same_tree = self.tree[:, :, None] == self.tree[:, None, :]
        branch, other = self.branch[:, :, None], self.branch[:, None, :]
        return (causal & same_tree & ((other == 0) | (other == branch)))[:, None]


def build(sequences: Sequence[TokenSequence], batch: MicroBatch, layout: Layout) -> Rows:
    """The tensors of one micro-batch. One without rows becomes a single padding token with no value, for a rank that only keeps pace."""
    widest = max((_row_length(sequences, row) for row in batch.rows), default=1)
    shape = (max(len(batch.rows), 1), layout.width(widest) if batch.rows else 1)
    ids, positions, branches = (np.zeros(shape, np.int64) for _ in range(3))
    trees = np.full(shape, PADDING, np.int64)
    before, targets = [], []
    for r, row in enumerate(batch.rows):
        end = 0
        for t, tree in enumerate(row):
            start, end = end, end + tree_length(sequences, tree)
            trees[r, start:end] = t
            prompt = sequences[tree[0]].prompt
            cursor = start + prompt.size
            ids[r, start:cursor] = prompt
            positions[r, start:cursor] = np.arange(prompt.size)
            for b, i in enumerate(tree, start=1):
                completion = sequences[i].completion
                place = slice(cursor, cursor + completion.size)
                ids[r, place] = completion
                positions[r, place] = prompt.size + np.arange(completion.size)
                branches[r, place] = b
                own = np.flatnonzero(sequences[i].policy)
                # the first token of a completion follows the end of the prompt, wherever in the row it lies
                previous = np.where(own == 0, start + prompt.size - 1, cursor + own - 1)
                before.append(r * shape[1] + previous)
                targets.append(completion[own])
                cursor = place.stop
        positions[r, end:] = np.arange(shape[1] - end)  # padding is a sequence of its own
    counts = [part.size for part in targets]
    return Rows(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        tree=torch.from_numpy(trees),
        branch=torch.from_numpy(branches),
        before=_flat(before),
        targets=_flat(targets),
        sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts).astype(np.int64)),
        spans=_spans(sequences, batch),
    )


def _spans(sequences: Sequence[TokenSequence], batch: MicroBatch) -> tuple[tuple[TreeSpan, ...], ...]:
    """Of each row; a row of padding alone, which keeps pace, is one prompt of one token."""
    rows = []
    for row in batch.rows:
        starts = np.cumsum([0, *(tree_length(sequences, tree) for tree in row)]).tolist()
        rows.append(
            tuple(
                TreeSpan(start, sequences[tree[0]].prompt.size, tuple(sequences[i].completion.size for i in tree))
                for start, tree in zip(starts, row, strict=False)
            )
        )
    return tuple(rows) or ((TreeSpan(0, 0, (1,)),),)


def _row_length(sequences: Sequence[TokenSequence], row: Row) -> int:
    return sum(tree_length(sequences, tree) for tree in row)


def _flat(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64))
