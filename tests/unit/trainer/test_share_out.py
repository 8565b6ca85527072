"""Which rank trains on what: everything goes to one rank, in about equal parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from loop_cases import group, reservation
from services.trainer.control.shares import assign, split_across_ranks, split_groups_across_ranks


def test_every_trajectory_goes_to_one_rank_and_keeps_its_place_and_group() -> None:
    batch = reservation("a", "b", "c")
    shares = assign(batch, [group(name) for name in "abc"], ranks=2, optimizer_step=6)
    dealt = {a.key: (a.place, a.group) for share in shares for a in share}
    assert dealt == {"a0": (0, 0), "a1": (1, 0), "b0": (2, 1), "b1": (3, 1), "c0": (4, 2), "c1": (5, 2)}
    assert [len(share) for share in shares] == [3, 3]


@given(sized=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 6)), max_size=40), ranks=st.integers(1, 5))
def test_groups_that_share_a_prompt_stay_on_one_rank(sized: list[tuple[int, int]], ranks: int) -> None:
    lengths, groups = [n for n, _ in sized], [g for _, g in sized]
    shares = split_groups_across_ranks(lengths, groups, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    for own in set(groups):
        assert sum(any(groups[i] == own for i in share) for share in shares) == 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    largest = max((sum(n for n, g in sized if g == own) for own in groups), default=0)
    assert max(loads) - min(loads) <= largest


@given(lengths=st.lists(st.integers(1, 500), max_size=40), ranks=st.integers(1, 5))
def test_split_across_ranks_is_a_partition_of_even_counts(lengths: list[int], ranks: int) -> None:
    shares = split_across_ranks(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= 2 * max(lengths, default=0)
