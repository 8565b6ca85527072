"""Packing: decides which paths (`Batch.paths`) share a row and a micro-batch, and makes the tensors of the rows.

    micro_batches = plan(paths, packing)                         pure; a path is never divided
    packed = pack(paths, micro_batches[0], packing)              tensors on the CPU; `.to(device)`
    logprobs = policy.forward(packed, warper).logprobs           [N]

A **tree** is one prompt and the completions that follow it in the same row; without prompt sharing it has one completion. A **row** is a
sequence of trees. A **micro-batch** is the rows that go through the model at once. Its N values are those of its policy tokens, one path
after the other, in the order of `PackedRows.indices`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.config.policy import PolicyConfig
from headrace.records.trajectory import Int32, Trajectory

from ..distributed.host_copies import on_device

Tree = tuple[int, ...]  # indices of its paths among those that are planned
Row = tuple[Tree, ...]
Rows = tuple[Row, ...]  # a micro-batch; without rows, the pass of a rank that only keeps pace with the others
Bins = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Packing:
    """The settings of packing.

    `padded`: each row holds one tree, and all rows of a micro-batch are as wide as the widest. A micro-batch has at most `paths` paths, or
    at most `tokens` positions (rows times width) if that is given. `packed`: one row of at most `tokens` tokens, filled by `algorithm`.
    With `share_prompts`, paths with equal prompts are one tree where they fit. Widths are rounded up to a multiple of `multiple`, as far as
    `tokens` allows.
    """

    mode: Literal["padded", "packed"]
    paths: int | None
    tokens: int | None
    algorithm: str = "modified_first_fit_decreasing"
    multiple: int = 1
    share_prompts: bool = False

    @classmethod
    def of(cls, policy: PolicyConfig, *, training: bool) -> Packing:
        """Read the settings from `policy`, for passes with (`training`) or without gradients."""
        size = policy.train_micro_batch_size if training else policy.logprob_batch_size or policy.train_micro_batch_size
        packing, batching = policy.sequence_packing, policy.dynamic_batching
        chosen = packing if packing.enabled else batching if batching.enabled else None
        tokens = None
        if chosen is not None:
            given = chosen.train_mb_tokens if training else chosen.logprob_mb_tokens
            tokens = given or size * policy.max_total_sequence_length
        return cls(
            mode="packed" if packing.enabled else "padded",
            paths=size if chosen is None else None,
            tokens=tokens,
            algorithm=packing.algorithm,
            multiple=1 if chosen is None else chosen.sequence_length_round,
            share_prompts=policy.share_prompts,
        )

    def width(self, length: int) -> int:
        """Return the width of rows whose longest has `length` tokens."""
        rounded = math.ceil(length / self.multiple) * self.multiple
        return rounded if self.tokens is None else max(length, min(rounded, self.tokens))


@dataclasses.dataclass(frozen=True)
class TreeSpan:
    """The position of a tree in its row. It begins at `start` with `prompt` tokens, followed by `completions` of these lengths."""

    start: int
    prompt: int
    completions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of passes over rows.

    `places` go through the layers, padding included. `targets` are the places whose logits are computed. `pairs` are pairs of a token and
    one that it attends to; a causal sequence of s tokens has s² / 2 of them.
    """

    places: float = 0
    targets: float = 0
    pairs: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.places + other.places, self.targets + other.targets, self.pairs + other.pairs)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """R rows of width W, and the N policy tokens in them; all tensors int64.

    `input_ids` [R, W], padded on the right. `position_ids` [R, W]: a token's position in its own path, 0 for the first of the prompt.
    `spans` are the trees of each row. Per policy token, [N]: `before`, the index in the flattened [R·W] of the token that precedes it in
    its path (the model's output there predicts it), and `targets`, its id. `indices` are those of the paths among the planned ones, in the
    order of their tokens in every [N].
    """

    input_ids: Tensor
    position_ids: Tensor
    before: Tensor
    targets: Tensor
    indices: tuple[int, ...]
    spans: tuple[tuple[TreeSpan, ...], ...]

    @classmethod
    def of_tokens(cls, token_ids: Int32) -> PackedRows:
        """Make one row of `token_ids` [L]; the last L - 1 count as policy tokens."""
        ids = torch.from_numpy(token_ids.astype(np.int64))
        place = torch.arange(ids.numel())
        return cls(
            input_ids=ids[None],
            position_ids=place[None],
            before=place[:-1],
            targets=ids[1:],
            indices=(0,),
            spans=((TreeSpan(0, 1, (ids.numel() - 1,)),),),
        )

    @property
    def work(self) -> Work:
        """The work of a pass. A row with one path attends as a whole, padding included. In other rows each tree attends only to itself."""
        rows, width = self.input_ids.shape
        pairs = rows * width**2 / 2
        trees = [tree for row in self.spans for tree in row]
        if len(trees) > rows or any(len(tree.completions) > 1 for tree in trees):
            pairs = sum(
                tree.prompt**2 / 2 + sum(length * (tree.prompt + length / 2) for length in tree.completions)
                for tree in trees
            )
        return Work(rows * width, self.targets.numel(), pairs)

    def to(self, device: torch.device) -> PackedRows:
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: on_device(x, device) for name, x in tensors.items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **moved)


def plan(paths: Sequence[Trajectory], packing: Packing, chosen: Sequence[int] | None = None) -> list[Rows]:
    """Plan micro-batches of the `chosen` paths (None: all). Each path with a policy token is in one of them, undivided. The most expensive
    micro-batch comes first.

    Raises `ValueError` for a path that is longer than `packing.tokens`.
    """
    places = range(len(paths)) if chosen is None else chosen
    wanted = [i for i in places if paths[i].loss_mask.any()]
    wanted.sort(key=lambda i: (-_length(paths, (i,)), i))
    for i in wanted:
        if packing.tokens is not None and _length(paths, (i,)) > packing.tokens:
            raise ValueError(f"a path of {_length(paths, (i,))} tokens does not fit into {packing.tokens}")
    if packing.tokens is None:
        assert packing.paths is not None
        size = packing.paths
        grouped = [i for same in _by_prompt(paths, wanted, packing) for i in same]
        parts = [grouped[i : i + size] for i in range(0, len(grouped), size)]
        return [tuple((tuple(same),) for same in _by_prompt(paths, part, packing)) for part in parts]
    trees = _trees(paths, wanted, packing, packing.tokens)
    lengths = [_length(paths, tree) for tree in trees]
    if packing.mode == "packed":
        bins = BIN_PACKING[packing.algorithm](lengths, packing.tokens)
        return [(tuple(trees[i] for i in row),) for row in bins]
    return _pad(trees, lengths, packing, packing.tokens)


def pack(paths: Sequence[Trajectory], rows: Rows, packing: Packing) -> PackedRows:
    """Make the tensors of one micro-batch. A micro-batch without rows becomes a single padding token with N = 0."""
    widest = max((sum(_length(paths, tree) for tree in row) for row in rows), default=1)
    shape = (max(len(rows), 1), packing.width(widest) if rows else 1)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    before: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    targets: list[npt.NDArray[Any]] = [np.empty(0, np.int64)]
    spans: list[tuple[TreeSpan, ...]] = []
    for r, row in enumerate(rows):
        spans_of_row, end = [], 0
        for tree in row:
            start, prompt = end, paths[tree[0]].prompt_token_ids
            cursor = start + prompt.size
            ids[r, start:cursor] = prompt
            positions[r, start:cursor] = np.arange(prompt.size)
            for i in tree:
                completion = paths[i].completion_token_ids
                place = slice(cursor, cursor + completion.size)
                ids[r, place] = completion
                positions[r, place] = prompt.size + np.arange(completion.size)
                own = np.flatnonzero(paths[i].loss_mask)
                # the first token of a completion follows the end of the prompt, wherever that is in the row
                previous = np.where(own == 0, start + prompt.size - 1, cursor + own - 1)
                before.append(r * shape[1] + previous)
                targets.append(completion[own])
                cursor = place.stop
            end = cursor
            spans_of_row.append(TreeSpan(start, prompt.size, tuple(paths[i].completion_token_ids.size for i in tree)))
        positions[r, end:] = np.arange(shape[1] - end)  # padding is a separate sequence
        spans.append(tuple(spans_of_row))
    return PackedRows(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        before=torch.from_numpy(np.concatenate(before).astype(np.int64)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        indices=tuple(i for row in rows for tree in row for i in tree),
        # a row of only padding is one prompt of one token
        spans=tuple(spans) or ((TreeSpan(0, 0, (1,)),),),
    )


def _length(paths: Sequence[Trajectory], tree: Tree) -> int:
    """Return the number of tokens of a tree in its row: the prompt once, and each completion."""
    prompt = paths[tree[0]].prompt_token_ids.size
    return prompt + sum(paths[i].completion_token_ids.size for i in tree)


def _by_prompt(paths: Sequence[Trajectory], places: Sequence[int], packing: Packing) -> list[list[int]]:
    """Group the paths by prompt, in order of first appearance. If prompts are not shared, each path is a group."""
    if not packing.share_prompts:
        return [[i] for i in places]
    same: dict[bytes, list[int]] = {}
    for i in places:
        same.setdefault(paths[i].prompt_token_ids.tobytes(), []).append(i)
    return list(same.values())


def _trees(paths: Sequence[Trajectory], places: Sequence[int], packing: Packing, capacity: int) -> list[Tree]:
    """Make trees of at most `capacity` tokens, longest first. A longer group is split into trees that repeat its prompt."""
    trees: list[Tree] = []
    for same in _by_prompt(paths, places, packing):
        room = capacity - paths[same[0]].prompt_token_ids.size
        bins = first_fit_decreasing([paths[i].completion_token_ids.size for i in same], room)
        trees.extend(tuple(same[i] for i in one) for one in bins)
    return sorted(trees, key=lambda tree: (-_length(paths, tree), tree))


def _pad(trees: Sequence[Tree], lengths: Sequence[int], packing: Packing, capacity: int) -> list[Rows]:
    """Make micro-batches of rows of similar length, with as many rows as `capacity` positions allow. `trees` are sorted longest first."""
    batches: list[list[Tree]] = []
    width = 0
    for tree, length in zip(trees, lengths, strict=True):
        if not batches or (len(batches[-1]) + 1) * width > capacity:
            batches.append([])
            width = packing.width(length)
        batches[-1].append(tree)
    return [tuple((tree,) for tree in batch) for batch in batches]


# -- bin packing: put all items into few bins of equal capacity. Items are sizes, bins hold their indices, and ties are broken by index.


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Put items, largest first, each into the first bin with room. It takes at most 11/9 of the optimum plus 6/9 of a bin (Dósa 2007)."""
    bins: Bins = []
    room: list[int] = []
    for item in _decreasing(sizes, capacity):
        place = next((i for i, free in enumerate(room) if free >= sizes[item]), None)
        if place is None:
            bins.append([item])
            room.append(capacity - sizes[item])
        else:
            bins[place].append(item)
            room[place] -= sizes[item]
    return bins


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """Give each item larger than half a bin its own bin, top these up by size class, and pack the rest first-fit decreasing.

    It takes at most 71/60 of the optimum plus one bin (Johnson and Garey, "A 71/60 theorem for bin packing", 1985).
    """
    order = _decreasing(sizes, capacity)
    large = [i for i in order if 2 * sizes[i] > capacity]
    medium = [i for i in order if 2 * sizes[i] <= capacity < 3 * sizes[i]]
    small = [i for i in order if 3 * sizes[i] <= capacity < 6 * sizes[i]]
    tiny = [i for i in order if 6 * sizes[i] <= capacity]
    bins = [[i] for i in large]

    def room(place: int) -> int:
        return capacity - sum(sizes[i] for i in bins[place])

    def largest_that_fits(items: list[int], place: int) -> int | None:
        return next((i for i in items if sizes[i] <= room(place)), None)

    for place in range(len(large)):
        if (item := largest_that_fits(medium, place)) is not None:
            medium.remove(item)
            bins[place].append(item)
    for place in reversed([p for p in range(len(large)) if len(bins[p]) == 1]):
        if len(small) >= 2 and sizes[small[-1]] + sizes[small[-2]] <= room(place):
            bins[place].append(small.pop())
            item = next(i for i in small if sizes[i] <= room(place))
            small.remove(item)
            bins[place].append(item)
    for place in range(len(large)):
        rest = [*medium, *small, *tiny]  # still in decreasing order
        while (item := largest_that_fits(rest, place)) is not None:
            rest.remove(item)
            bins[place].append(item)
        medium, small, tiny = ([i for i in items if i in set(rest)] for items in (medium, small, tiny))
    left = [*medium, *small, *tiny]
    return bins + [[left[i] for i in packed] for packed in first_fit_decreasing([sizes[i] for i in left], capacity)]


BIN_PACKING: Mapping[str, Callable[[Sequence[int], int], Bins]] = {
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}


def _decreasing(sizes: Sequence[int], capacity: int) -> list[int]:
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    if order and sizes[order[0]] > capacity:
        raise ValueError(f"an item of {sizes[order[0]]} does not fit into a bin of {capacity}")
    return order
