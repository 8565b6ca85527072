"""Which trajectories go together, and where their tokens lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config.policy import PolicyConfig
from headrace.records.trajectory import Trajectory
from headrace_services.trainer.learning.batch import MicroBatch
from headrace_services.trainer.network.attention import Sequences
from headrace_services.trainer.network.packing import (
    BIN_PACKING,
    PackedRows,
    Packing,
    Rows,
    first_fit_decreasing,
    modified_first_fit_decreasing,
    pack,
    plan,
)
from tests.support.trainer import batch, trajectory

PROMPTS = [[1], [2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12, 13]]


@st.composite
def made(draw: st.DrawFn) -> list[Trajectory]:
    """Of four prompts; completions of 1 to 12 tokens, some of the environment, some with no token of the policy's."""
    found = []
    for prompt in draw(st.lists(st.sampled_from(PROMPTS), max_size=14)):
        own = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        found.append(trajectory(prompt, [100 + i for i in range(len(own))], own=own))
    return found


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    tokens = draw(st.none() | st.integers(19, 80))
    return Packing(
        mode="padded" if tokens is None else draw(st.sampled_from(["padded", "packed"])),
        paths=draw(st.integers(1, 6)) if tokens is None else None,
        tokens=tokens,
        algorithm=draw(st.sampled_from(sorted(BIN_PACKING))),
        multiple=draw(st.sampled_from([1, 8, 64])),
        share_prompts=draw(st.booleans()),
    )


def order_of(rows: Rows) -> list[int]:
    return [i for row in rows for tree in row for i in tree]


def trees_and_branches(packed: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Each [R, W]: the tree of its row that a token belongs to (-1 on padding), and 0 in a prompt, 1, 2, … in its completions."""
    trees, branches = np.full((2, *packed.input_ids.shape), -1)
    for r, spans in enumerate(packed.spans):
        for t, span in enumerate(spans):
            ends = np.cumsum([span.start, span.prompt, *span.completions])
            trees[r, span.start : ends[-1]] = t
            for branch, (start, end) in enumerate(itertools.pairwise(ends)):
                branches[r, start:end] = branch
    return trees, branches


def visible(packed: PackedRows) -> np.ndarray:
    """[R, W, W]: whether the token at the second index sees the one at the third: itself, and what precedes it in its tree's prompt and in
    its own completion."""
    trees, branches = trees_and_branches(packed)
    place = np.arange(packed.input_ids.shape[1])
    own = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    return (place[:, None] >= place) & (trees[:, :, None] == trees[:, None, :]) & own


def length(one: Trajectory) -> int:
    return one.prompt_token_ids.size + one.completion_token_ids.size


def with_policy_tokens(trajectories: list[Trajectory]) -> list[int]:
    return [i for i, one in enumerate(trajectories) if one.loss_mask.any()]


@given(trajectories=made(), packing=packings(), data=st.data())
def test_every_trajectory_with_a_policy_token_is_planned_once(
    trajectories: list[Trajectory], packing: Packing, data: st.DataObject
) -> None:
    chosen = [i for i in range(len(trajectories)) if data.draw(st.booleans())]
    for given_places, wanted in ((None, range(len(trajectories))), (chosen, chosen)):
        planned = plan(trajectories, packing, given_places)
        found = [i for rows in planned for i in order_of(rows)]
        assert sorted(found) == [i for i in with_policy_tokens(trajectories) if i in wanted]
        for rows in planned:
            for row in rows:
                assert packing.mode == "packed" or len(row) == 1
                for tree in row:
                    assert packing.share_prompts or len(tree) == 1
                    assert len({trajectories[i].prompt_token_ids.tobytes() for i in tree}) == 1


@given(trajectories=made(), packing=packings())
def test_no_micro_batch_is_over_its_budget(trajectories: list[Trajectory], packing: Packing) -> None:
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        if packing.tokens is None:
            assert packing.paths is not None
            assert len(packed.indices) <= packing.paths
        else:
            assert packed.input_ids.numel() <= packing.tokens
            assert packing.mode == "padded" or len(rows) == 1
            width = packed.input_ids.shape[1]
            assert width % packing.multiple == 0 or width == packing.tokens


@given(trajectories=made(), packing=packings())
def test_what_a_token_may_see_spells_its_own_trajectory(trajectories: list[Trajectory], packing: Packing) -> None:
    """From spans and positions alone the trajectory of every value is read back, and its target follows it."""
    columns = batch(trajectories)
    columns.advantages = np.zeros(columns.trajectory.size)
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        assert list(packed.indices) == order_of(rows)
        seen_by = visible(packed)
        width = packed.input_ids.shape[1]
        owners = [i for i in packed.indices for _ in range(int(trajectories[i].loss_mask.sum()))]
        tokens = MicroBatch.of(columns, packed.indices, torch.device("cpu"))
        assert [packed.indices[place] for place in tokens.trajectory] == owners
        seen = dict.fromkeys(packed.indices, 0)
        for place, target, i in zip(packed.before.tolist(), packed.targets.tolist(), owners, strict=True):
            r, q = divmod(place, width)
            own = trajectories[i]
            t = int(np.flatnonzero(own.loss_mask)[seen[i]])
            seen[i] += 1
            context = packed.input_ids[r][seen_by[r, q]].tolist()
            assert context == [*own.prompt_token_ids.tolist(), *own.completion_token_ids[:t].tolist()]
            assert packed.position_ids[r][seen_by[r, q]].tolist() == list(range(len(context)))
            assert target == own.completion_token_ids[t]


@given(trajectories=made(), packing=packings())
def test_flash_attention_s_sequences_are_what_each_token_sees(trajectories: list[Trajectory], packing: Packing) -> None:
    """Every token is a query once, and the keys up to its own are those that it sees; padding sees no token."""
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        count, width = packed.input_ids.shape
        found = Sequences.of(packed.spans, width)
        queries, keys = (
            np.arange(count * width),
            np.arange(count * width) if found.places is None else found.places.numpy(),
        )
        assert (found.places is not None) == any(len(tree) > 1 for row in rows for tree in row)
        own = list(zip(np.split(queries, found.queries[1:-1]), np.split(keys, found.keys[1:-1]), strict=True))
        assert found.longest_queries == max(len(mine) for mine, _ in own)
        assert found.longest_keys == max(len(seen) for _, seen in own)
        sees = np.zeros((count, width, count, width), bool)
        for mine, seen in own:
            for nth, query in enumerate(mine, start=1):
                sees[divmod(query, width)][np.divmod(seen[: len(seen) - len(mine) + nth], width)] = True
        expected, (trees, _) = visible(packed), trees_and_branches(packed)
        for r in range(count):
            assert not sees[r][:, np.arange(count) != r].any()
            assert (sees[r, :, r][trees[r] >= 0] == expected[r][trees[r] >= 0]).all()
            assert not sees[r, :, r][trees[r] < 0][:, trees[r] >= 0].any()


@given(trajectories=made(), packing=packings())
def test_shared_prompts_are_computed_once_where_they_fit(trajectories: list[Trajectory], packing: Packing) -> None:
    trees = [tree for rows in plan(trajectories, packing) for row in rows for tree in row]
    computed = sum(
        trajectories[tree[0]].prompt_token_ids.size + sum(trajectories[i].completion_token_ids.size for i in tree)
        for tree in trees
    )
    wanted = [trajectories[i] for i in with_policy_tokens(trajectories)]
    assert computed <= sum(length(one) for one in wanted)
    if packing.share_prompts and packing.tokens is not None:
        by_prompt: dict[bytes, list[Trajectory]] = {}
        for one in wanted:
            by_prompt.setdefault(one.prompt_token_ids.tobytes(), []).append(one)
        for prompt, same in by_prompt.items():
            whole = same[0].prompt_token_ids.size + sum(one.completion_token_ids.size for one in same)
            own = [tree for tree in trees if trajectories[tree[0]].prompt_token_ids.tobytes() == prompt]
            assert whole > packing.tokens or len(own) == 1


@given(trajectories=made(), packing=packings())
def test_values_go_to_a_micro_batch_and_back_to_their_places(trajectories: list[Trajectory], packing: Packing) -> None:
    columns = batch(trajectories)
    values = np.concatenate([np.empty(0, int), *(np.arange(n) + 100 * i for i, n in enumerate(columns.lengths))])
    back = np.full(values.size, -1)
    for rows in plan(trajectories, packing):
        packed = pack(trajectories, rows, packing)
        places = columns.tokens_of(packed.indices)
        flat = values[places]
        assert flat.size == packed.targets.numel()
        assert flat.tolist() == [t + 100 * i for i in packed.indices for t in range(columns.lengths[i])]
        back[places] = flat
    assert back.tolist() == values.tolist()


def test_a_pass_that_keeps_pace_has_one_place_and_no_value() -> None:
    packing = Packing("packed", None, 64, "first_fit_decreasing", 64, share_prompts=True)
    packed = pack([], (), packing)
    assert packed.input_ids.shape == (1, 1)
    assert packed.targets.numel() == packed.before.numel() == 0
    assert packed.indices == ()
    assert batch([]).tokens_of(packed.indices).size == 0
    assert plan([], packing) == []


def test_a_row_of_tokens_counts_all_but_the_first() -> None:
    packed = PackedRows.of_tokens(np.array([5, 6, 7], np.int32))
    assert (packed.input_ids.tolist(), packed.position_ids.tolist()) == ([[5, 6, 7]], [[0, 1, 2]])
    assert (packed.before.tolist(), packed.targets.tolist()) == ([0, 1], [6, 7])
    assert visible(packed)[0].tolist() == np.tri(3, dtype=bool).tolist()


def test_a_trajectory_that_does_not_fit_is_refused() -> None:
    packing = Packing("padded", None, 4, "first_fit_decreasing", 1, share_prompts=False)
    with pytest.raises(ValueError, match=r"path of 5 .*4"):
        plan([trajectory([1, 2], [3, 4, 5])], packing)


def test_padded_rows_of_like_length_go_together() -> None:
    lengths = [2, 9, 3, 8, 8]
    packing = Packing("padded", 2, None, "", 1, share_prompts=False)
    planned = plan([trajectory([1], [2] * (n - 1)) for n in lengths], packing)
    assert [[lengths[i] for i in order_of(rows)] for rows in planned] == [[9, 8], [8, 3], [2]]


sizes = st.lists(st.integers(1, 60), max_size=40)


@pytest.mark.parametrize("fill", [first_fit_decreasing, modified_first_fit_decreasing])
@given(sizes=sizes)
def test_bins_hold_every_item_once_and_are_never_over_full(
    fill: Callable[[list[int], int], list[list[int]]], sizes: list[int]
) -> None:
    bins = fill(sizes, 60)
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


@pytest.mark.parametrize("fill", [first_fit_decreasing, modified_first_fit_decreasing])
def test_an_item_larger_than_a_bin_is_refused(fill: Callable[[list[int], int], list[list[int]]]) -> None:
    with pytest.raises(ValueError, match=r"item of 9 .*8"):
        fill([1, 9], 8)


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
def test_packing_is_what_the_policy_s_keys_say(keys: dict[str, Any], training: bool, expected: Any) -> None:
    packing = Packing.of(PolicyConfig.model_validate(keys), training=training)
    assert (packing.mode, packing.paths, packing.tokens, packing.multiple) == expected


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"dynamic_batching": {"enabled": True}, "sequence_packing": {"enabled": True}},
            "dynamic_batching.enabled and sequence_packing.enabled",
        ),
        (
            {"sequence_packing": {"enabled": True, "train_mb_tokens": 511}},
            "train_mb_tokens 511 is less than max_total_sequence_length 512",
        ),
        (
            {"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 1}},
            "dynamic_batching.logprob_mb_tokens 1 is less than",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        PolicyConfig.model_validate(keys)
