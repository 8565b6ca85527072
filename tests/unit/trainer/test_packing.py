"""Which sequences go together, and where their tokens lie."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from services.trainer.network.rows import Layout, MicroBatch, TokenSequence, build, divide, join, plan
from services.trainer.network.rows.attention import block_mask
from services.trainer.network.rows.bins import ALGORITHMS, first_fit_decreasing, modified_first_fit_decreasing
from services.trainer.network.rows.layout import tree_length

from headrace.config.policy import Policy

PROMPTS = [[1], [2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13]]


def sequence(prompt: list[int], completion: list[int], policy: list[int] | None = None) -> TokenSequence:
    own = policy if policy is not None else [1] * len(completion)
    return TokenSequence(np.array(prompt, np.int32), np.array(completion, np.int32), np.array(own, np.uint8))


@st.composite
def sequences(draw: st.DrawFn) -> list[TokenSequence]:
    """Of four prompts; completions of 1 to 12 tokens, some of the environment, some with no token of the policy's."""
    found = []
    for prompt in draw(st.lists(st.sampled_from(PROMPTS), max_size=14)):
        policy = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        found.append(sequence(prompt, [100 + i for i in range(len(policy))], policy))
    return found


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tokens = draw(st.none() | st.integers(19, 80))
    return Layout(
        mode="padded" if tokens is None else draw(st.sampled_from(["padded", "packed"])),
        sequences=draw(st.integers(1, 6)) if tokens is None else None,
        tokens=tokens,
        algorithm=draw(st.sampled_from(sorted(ALGORITHMS))),
        multiple=draw(st.sampled_from([1, 8, 64])),
        share_prompts=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(sequences=sequences(), layout=layouts())
def test_every_sequence_with_a_policy_token_is_planned_once_and_whole(
    sequences: list[TokenSequence], layout: Layout
) -> None:
    batches = plan(sequences, layout)
    flat = [i for batch in batches for i in batch.order]
    assert sorted(flat) == [i for i, s in enumerate(sequences) if s.policy.any()]
    for batch in batches:
        for row in batch.rows:
            assert layout.mode == "packed" or len(row) == 1
            for tree in row:
                assert layout.share_prompts or len(tree) == 1
                assert len({sequences[i].prompt.tobytes() for i in tree}) == 1


@settings(max_examples=40)
@given(sequences=sequences(), layout=layouts())
def test_no_micro_batch_is_over_its_budget(sequences: list[TokenSequence], layout: Layout) -> None:
    for batch in plan(sequences, layout):
        rows = build(sequences, batch, layout)
        if layout.tokens is None:
            assert layout.sequences is not None
            assert len(batch.order) <= layout.sequences
        else:
            assert rows.input_ids.numel() <= layout.tokens
            assert layout.mode == "padded" or len(batch.rows) == 1
            width = rows.input_ids.shape[1]
            assert width % layout.multiple == 0 or width == layout.tokens


@settings(max_examples=40)
@given(sequences=sequences(), layout=layouts())
def test_what_a_token_may_see_spells_its_own_sequence_up_to_it(sequences: list[TokenSequence], layout: Layout) -> None:
    """From mask and positions alone the sequence of every value is read back, and its target follows it."""
    for batch in plan(sequences, layout):
        rows = build(sequences, batch, layout)
        visible = rows.visible()[:, 0]
        width = rows.input_ids.shape[1]
        owners = [i for i in batch.order for _ in range(sequences[i].policy_tokens)]
        assert [batch.order[place] for place in rows.sequence] == owners
        seen = dict.fromkeys(batch.order, 0)
        for place, target, i in zip(rows.before.tolist(), rows.targets.tolist(), owners, strict=True):
            r, q = divmod(place, width)
            own = sequences[i]
            t = int(np.flatnonzero(own.policy)[seen[i]])
            seen[i] += 1
            context = rows.input_ids[r][visible[r, q]].tolist()
            assert context == [*own.prompt.tolist(), *own.completion[:t].tolist()]
            assert rows.position_ids[r][visible[r, q]].tolist() == list(range(len(context)))
            assert target == own.completion[t]


@settings(max_examples=40)
@given(sequences=sequences(), layout=layouts())
def test_shared_prompts_are_computed_once_where_they_fit(sequences: list[TokenSequence], layout: Layout) -> None:
    trees = [tree for batch in plan(sequences, layout) for row in batch.rows for tree in row]
    computed = sum(tree_length(sequences, tree) for tree in trees)
    wanted = [s for s in sequences if s.policy.any()]
    assert computed <= sum(s.length for s in wanted)
    if layout.share_prompts and layout.tokens is not None:
        by_prompt: dict[bytes, list[TokenSequence]] = {}
        for s in wanted:
            by_prompt.setdefault(s.prompt.tobytes(), []).append(s)
        for prompt, same in by_prompt.items():
            whole = same[0].prompt.size + sum(s.completion.size for s in same)
            own = [tree for tree in trees if sequences[tree[0]].prompt.tobytes() == prompt]
            assert whole > layout.tokens or len(own) == 1


@settings(max_examples=40)
@given(sequences=sequences(), layout=layouts())
def test_join_and_divide_are_each_other_s_inverse(sequences: list[TokenSequence], layout: Layout) -> None:
    arrays = [np.arange(s.policy_tokens) + 100 * i for i, s in enumerate(sequences)]
    for batch in plan(sequences, layout):
        flat = join(batch, arrays.__getitem__)
        assert flat.size == build(sequences, batch, layout).targets.numel()
        for i, own in divide(batch, sequences, flat):
            assert own.tolist() == arrays[i].tolist()


def test_a_pass_that_keeps_pace_has_one_place_and_no_value() -> None:
    layout = Layout("packed", None, 64, "first_fit_decreasing", 64, share_prompts=True)
    rows = build([], MicroBatch(), layout)
    assert rows.input_ids.shape == (1, 1)
    assert rows.targets.numel() == rows.before.numel() == rows.sequence.numel() == 0
    assert join(MicroBatch(), [].__getitem__).size == 0
    assert divide(MicroBatch(), [], np.empty(0)) == []
    assert plan([], layout) == []


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    layout = Layout("padded", None, 4, "first_fit_decreasing", 1, share_prompts=False)
    with pytest.raises(ValueError, match="a sequence of 5 tokens does not fit into 4"):
        plan([sequence([1, 2], [3, 4, 5])], layout)


def test_padded_rows_of_like_length_go_together() -> None:
    lengths = [2, 9, 3, 8, 8]
    layout = Layout("padded", 2, None, "", 1, share_prompts=False)
    batches = plan([sequence([1], [2] * (n - 1)) for n in lengths], layout)
    assert [[lengths[i] for i in batch.order] for batch in batches] == [[9, 8], [8, 3], [2]]


@settings(max_examples=20)
@given(sequences=sequences(), layout=layouts())
def test_flex_attention_s_mask_is_the_same(sequences: list[TokenSequence], layout: Layout) -> None:
    for batch in plan(sequences, layout)[:1]:
        rows = build(sequences, batch, layout)
        mask = block_mask(rows)
        count, width = rows.input_ids.shape
        indices = torch.meshgrid(
            torch.arange(count),
            torch.zeros(1, dtype=torch.int64),
            torch.arange(width),
            torch.arange(width),
            indexing="ij",
        )
        assert torch.equal(mask.mask_mod(*indices), rows.visible())


sizes = st.lists(st.integers(1, 60), max_size=40)


@pytest.mark.parametrize("pack", [first_fit_decreasing, modified_first_fit_decreasing])
@settings(max_examples=40)
@given(sizes=sizes)
def test_bins_hold_every_item_once_and_are_never_over_full(
    pack: Callable[[list[int], int], list[list[int]]], sizes: list[int]
) -> None:
    bins = pack(sizes, 60)
    assert sorted(i for one in bins for i in one) == list(range(len(sizes)))
    assert all(0 < sum(sizes[i] for i in one) <= 60 for one in bins)
    # no two bins could be one
    for a in range(len(bins)):
        for b in range(a):
            assert sum(sizes[i] for i in (*bins[a], *bins[b])) > 60


def test_modified_first_fit_tops_up_large_items_by_class() -> None:
    """The family on which first-fit decreasing takes 11 bins where 9 do."""
    sizes = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    assert len(first_fit_decreasing(sizes, 100)) == 11
    bins = modified_first_fit_decreasing(sizes, 100)
    assert len(bins) == 10
    assert [[sizes[i] for i in one] for one in bins[:6]] == [[51, 23, 26]] * 6


@pytest.mark.parametrize("pack", [first_fit_decreasing, modified_first_fit_decreasing])
def test_an_item_larger_than_a_bin_is_refused(pack: Callable[[list[int], int], list[list[int]]]) -> None:
    with pytest.raises(ValueError, match="an item of 9 does not fit into a bin of 8"):
        pack([1, 9], 8)


@pytest.mark.parametrize(
    ("keys", "training", "expected"),
    [
        ({}, True, ("padded", 4, None, 1)),
        ({"logprob_batch_size": 9}, False, ("padded", 9, None, 1)),
        ({"dynamic_batching": {"enabled": True}}, True, ("padded", None, 4 * 512, 64)),
        ({"sequence_packing": {"enabled": True}, "logprob_batch_size": 2}, False, ("packed", None, 2 * 512, 64)),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 700, "sequence_length_round": 8}},
            True,
            ("packed", None, 700, 8),
        ),
    ],
)
def test_the_layout_is_what_the_policy_s_keys_say(keys: dict[str, Any], training: bool, expected: Any) -> None:
    layout = Layout.of(Policy.model_validate(keys), training=training)
    assert (layout.mode, layout.sequences, layout.tokens, layout.multiple) == expected


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"dynamic_batching": {"enabled": True}, "sequence_packing": {"enabled": True}},
            "dynamic_batching.enabled and sequence_packing.enabled are both true",
        ),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 511}},
            "sequence_packing.train_mb_tokens 511 is less than max_total_sequence_length 512",
        ),
        (
            {"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 1}},
            "dynamic_batching.logprob_mb_tokens 1 is less than",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Policy.model_validate(keys)
