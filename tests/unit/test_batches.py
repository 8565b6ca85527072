"""Payloads on their way to the buffer: how they are cut into round trips."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.replay.base_client import WRITTEN, WRITTEN_BYTES, of_bounded_size

SIZES = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2 * WRITTEN_BYTES)), max_size=3 * WRITTEN)


@given(SIZES)
def test_a_round_trip_is_as_large_as_may_be_and_no_larger(sizes: list[int]) -> None:
    batches = list(of_bounded_size(sizes, int))
    assert [size for batch in batches for size in batch] == sizes
    for batch in batches:
        assert 1 <= len(batch) <= WRITTEN
        assert len(batch) == 1 or sum(batch) <= WRITTEN_BYTES
    for batch, after in itertools.pairwise(batches):
        assert len(batch) == WRITTEN or sum(batch) + after[0] > WRITTEN_BYTES
