"""Which sequences share a row and a micro-batch: pure decisions on lengths.

A **tree** is one prompt and the completions that follow it in the same row; without prompt sharing it has one completion. A
**row** is a list of trees, a **micro-batch** a list of rows that go through the model at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.config.policy import Policy as PolicySection
from headrace.trajectory import Int32, UInt8
from services.trainer.network.rows.bins import ALGORITHMS, first_fit_decreasing

Tree = tuple[int, ...]
Row = tuple[Tree, ...]


@dataclasses.dataclass(frozen=True)
class TokenSequence:
    """Prompt [S ≥ 1] and completion [T ≥ 1] token ids, and which of the completion's tokens the policy wrote (`policy` [T], 0/1)."""

    prompt: Int32
    completion: Int32
    policy: UInt8

    @property
    def length(self) -> int:
        return self.prompt.size + self.completion.size

    @property
    def policy_tokens(self) -> int:
        """How many values of the flat [N] are this sequence's."""
        return int(np.count_nonzero(self.policy))


@dataclasses.dataclass(frozen=True)
class Layout:
    """How sequences are put together.

    `padded`: each row holds one tree and all rows of a micro-batch are as wide as the widest; a micro-batch has at most
    `sequences` sequences, or at most `tokens` places (rows times width) where that is given. `packed`: one row of at most
    `tokens` tokens, filled by `algorithm`. With `share_prompts`, sequences of equal prompts are one tree where they fit. Widths
    are rounded up to a multiple of `multiple`, as far as `tokens` allows.
    """

    mode: Literal["padded", "packed"]
    sequences: int | None
    tokens: int | None
    algorithm: str
    multiple: int
    share_prompts: bool

    @classmethod
    def of(cls, policy: PolicySection, *, training: bool) -> Layout:
        """As `policy` says, for passes with (`training`) or without gradients."""
        size = policy.train_micro_batch_size if training else policy.logprob_batch_size or policy.train_micro_batch_size
        packing, batching = policy.sequence_packing, policy.dynamic_batching
        chosen = packing if packing.enabled else batching if batching.enabled else None
        tokens = None
        if chosen is not None:
            given = chosen.train_mb_tokens if training else chosen.logprob_mb_tokens
            tokens = given or size * policy.max_total_sequence_length
        return cls(
            mode="packed" if packing.enabled else "padded",
            sequences=size if chosen is None else None,
            tokens=tokens,
            algorithm=packing.algorithm,
            multiple=1 if chosen is None else chosen.sequence_length_round,
            share_prompts=policy.share_prompts,
        )

    def width(self, length: int) -> int:
        """Of rows whose longest has `length` tokens."""
        rounded = math.ceil(length / self.multiple) * self.multiple
        return rounded if self.tokens is None else max(length, min(rounded, self.tokens))


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows of trees of places in the list of sequences that was planned. No rows: a pass that only keeps pace."""

    rows: tuple[Row, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The sequences, in the order in which their tokens lie in every flat [N]."""
        return tuple(i for row in self.rows for tree in row for i in tree)


def plan(sequences: Sequence[TokenSequence], layout: Layout) -> list[MicroBatch]:
    """Micro-batches that hold every sequence with a policy token exactly once and whole; what costs most comes first.

    Raises `ValueError` for a sequence that is longer than `layout.tokens`.
    """
    wanted = [i for i, sequence in enumerate(sequences) if sequence.policy_tokens]
    wanted.sort(key=lambda i: (-sequences[i].length, i))
    for i in wanted:
        if layout.tokens is not None and sequences[i].length > layout.tokens:
            raise ValueError(f"a sequence of {sequences[i].length} tokens does not fit into {layout.tokens}")
    if layout.tokens is None:
        assert layout.sequences is not None
        size = layout.sequences
        grouped = [i for same in _by_prompt(sequences, wanted, layout) for i in same]
        shares = [grouped[i : i + size] for i in range(0, len(grouped), size)]
        return [MicroBatch(tuple((tuple(same),) for same in _by_prompt(sequences, share, layout))) for share in shares]
    trees = _trees(sequences, wanted, layout, layout.tokens)
    lengths = [tree_length(sequences, tree) for tree in trees]
    if layout.mode == "packed":
        bins = ALGORITHMS[layout.algorithm](lengths, layout.tokens)
        return [MicroBatch((tuple(trees[i] for i in row),)) for row in bins]
    return _padded(trees, lengths, layout, layout.tokens)


def tree_length(sequences: Sequence[TokenSequence], tree: Tree) -> int:
    """Tokens of a tree in its row: the prompt once, and each completion."""
    return sequences[tree[0]].prompt.size + sum(sequences[i].completion.size for i in tree)


def join(batch: MicroBatch, of: Callable[[int], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Flat [N] of what `of` gives for each sequence of the micro-batch, [policy tokens], by its place among those that were planned."""
    parts = [of(i) for i in batch.order]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def divide(
    batch: MicroBatch, sequences: Sequence[TokenSequence], values: npt.NDArray[Any]
) -> list[tuple[int, npt.NDArray[Any]]]:
    """Place of each sequence of the micro-batch, and its share [policy tokens] of the flat `values` [N]."""
    ends = np.cumsum([sequences[i].policy_tokens for i in batch.order])
    return list(zip(batch.order, np.split(values, ends[:-1]) if batch.rows else [], strict=True))


def _by_prompt(sequences: Sequence[TokenSequence], items: Sequence[int], layout: Layout) -> list[list[int]]:
    """Those that share a prompt together, in the order in which they first come; each alone where prompts are not shared."""
    if not layout.share_prompts:
        return [[i] for i in items]
    same: dict[bytes, list[int]] = {}
    for i in items:
        same.setdefault(sequences[i].prompt.tobytes(), []).append(i)
    return list(same.values())


def _trees(sequences: Sequence[TokenSequence], items: Sequence[int], layout: Layout, capacity: int) -> list[Tree]:
    """Trees of at most `capacity` tokens, longest first: a group that is longer has its prompt in more than one."""
    trees: list[Tree] = []
    for same in _by_prompt(sequences, items, layout):
        room = capacity - sequences[same[0]].prompt.size
        bins = first_fit_decreasing([sequences[i].completion.size for i in same], room)
        trees.extend(tuple(same[i] for i in one) for one in bins)
    return sorted(trees, key=lambda tree: (-tree_length(sequences, tree), tree))


def _padded(trees: Sequence[Tree], lengths: Sequence[int], layout: Layout, capacity: int) -> list[MicroBatch]:
    """Rows of like length, as many at once as `capacity` places allow; `trees` come longest first."""
    batches: list[list[Tree]] = []
    width = 0
    for tree, length in zip(trees, lengths, strict=True):
        if not batches or (len(batches[-1]) + 1) * width > capacity:
            batches.append([])
            width = layout.width(length)
        batches[-1].append(tree)
    return [MicroBatch(tuple((tree,) for tree in batch)) for batch in batches]
