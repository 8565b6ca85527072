"""Which rank trains on what: everything goes to one rank, in about equal parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.control.shares import split_across_ranks, split_groups_across_ranks


@given(sized=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 6)), max_size=40), ranks=st.integers(1, 5))
def test_groups_that_share_a_prompt_stay_on_one_rank(sized: list[tuple[int, int]], ranks: int) -> None:
    lengths, groups = [n for n, _ in sized], [g for _, g in sized]
    shares = split_groups_across_ranks(lengths, groups, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    for group in set(groups):
        assert sum(any(groups[i] == group for i in share) for share in shares) == 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    largest = max((sum(n for n, g in sized if g == group) for group in groups), default=0)
    assert max(loads) - min(loads) <= largest


@given(lengths=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 5))
def test_split_across_ranks_is_a_partition_of_even_counts(lengths: list[int], ranks: int) -> None:
    shares = split_across_ranks(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 2 * max(lengths, default=0)
